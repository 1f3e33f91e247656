// The table of ops, of which only the visible rows exist.

const ROW_PX = 24;
const GAP_PX = 6;
const isNarrow = matchMedia("(max-width: 700px)");
const number = (name, width, value, text, more = {}) => ({ name, width, isNumber: true, value, text, ...more });
const words = (name, width, key, more = {}) => ({ name, width, value: (line) => ops[key][leadOf(line)], ...more });
const inNarrow = { isInNarrow: true };
const of = (get) => (line) => get(leadOf(line));
/** The value of the op of one side of a pair; NaN without one, which sorts last. */
const ofSide = (side, get) => (line) => (line[side] < 0 ? NaN : get(line[side]));
const unlessNone = (text) => (value) => (Number.isNaN(value) ? "" : text(value));
const ratio = (line) => (line.a < 0 || line.b < 0 ? NaN : took(line.b) / took(line.a));
const deviation = (row) => tookMeasured(row) - took(row);

const COLUMNS = data.pairs
  ? [
      number("#", "44px", (line) => lineOf[leadOf(line)]),
      { name: "in", width: "52px", value: sideText, ...inNarrow },
      words("section", "112px", "section"),
      words("op", "minmax(76px, 118px)", "op", inNarrow),
      words("stream", "66px", "stream"),
      words("unit", "minmax(60px, 1fr)", "unit", inNarrow),
      words("what", "minmax(120px, 2fr)", "what"),
      number("size A", "70px", ofSide("a", (row) => ops.bytes[row]), unlessNone(bytes)),
      number("size B", "70px", ofSide("b", (row) => ops.bytes[row]), unlessNone(bytes)),
      number("takes A", "62px", ofSide("a", took), unlessNone((us) => (us ? duration(us) : "")), inNarrow),
      number("takes B", "62px", ofSide("b", took), unlessNone((us) => (us ? duration(us) : "")), inNarrow),
      number("change", "66px", ratio, changeText),
    ]
  : measured
    ? [
        number("#", "44px", of((row) => row)),
        words("section", "112px", "section"),
        words("line", "40px", "line", { isNumber: true }),
        words("op", "minmax(76px, 118px)", "op", inNarrow),
        words("stream", "66px", "stream"),
        words("unit", "minmax(60px, 1fr)", "unit", inNarrow),
        words("what", "minmax(120px, 2fr)", "what"),
        number("size", "70px", of((row) => ops.bytes[row]), bytes),
        number("simulated", "66px", of(took), duration, inNarrow),
        number("measured", "62px", of(tookMeasured), unlessNone(duration), inNarrow),
        number("difference", "94px", of((row) => Math.abs(deviation(row))), (_, line) => unlessNone(signed)(deviation(leadOf(line)))),
        number("ratio", "52px", of((row) => tookMeasured(row) / took(row)), ratioText, inNarrow),
      ]
    : [
        number("#", "44px", of((row) => row)),
        words("section", "112px", "section"),
        words("line", "40px", "line", { isNumber: true }),
        words("op", "minmax(96px, 118px)", "op", inNarrow),
        words("stream", "66px", "stream"),
        words("unit", "minmax(80px, 1fr)", "unit", inNarrow),
        words("what", "minmax(174px, 2fr)", "what"),
        number("size", "76px", of((row) => ops.bytes[row]), bytes),
        number("computes", "84px", of((row) => ops.flops[row]), (n) => scaled(n, "FLOP")),
        number(`begins, ${data.time.name}`, "80px", of((row) => ops.start[row][rankClass()]), moment),
        number("takes", "66px", of(took), (us) => (us ? duration(us) : ""), inNarrow),
        number("in use", "72px", of((row) => ops.used[row]), bytes, inNarrow),
      ];
const shownColumns = () => COLUMNS.filter((column) => !isNarrow.matches || column.isInNarrow);

/** Whether a line is in both programs, and equal there. */
function sideText({ a, b, isEqual }) {
  if (a < 0) return "only B";
  if (b < 0) return "only A";
  return isEqual ? "both" : "changed";
}

const wordsOf = (row) =>
  [ops.section[row], ops.op[row], ops.kind[row], ops.stream[row], ops.unit[row], ops.what[row], ops.source[row]]
    .concat(isCritical(row) ? ["critical"] : []);
const haystack = lines.map((line) =>
  (data.pairs ? [line.a, line.b] : [leadOf(line)])
    .filter((row) => row >= 0)
    .flatMap(wordsOf)
    .concat(data.pairs ? [sideText(line)] : [])
    .join(" ")
    .toLowerCase(),
);
let shown = [];
let placeOf = [];
let sorting = measured
  ? { column: COLUMNS.findIndex(({ name }) => name === "difference"), isDown: true }
  : { column: 0, isDown: false };
const colours = new Map();

function drawHead() {
  const columns = shownColumns();
  const { style } = element("ops");
  const least = columns.reduce((sum, { width }) => sum + parseInt(width.match(/\d+/)[0], 10) + GAP_PX, 0);
  style.setProperty("--columns", columns.map(({ width }) => width).join(" "));
  style.setProperty("--least", `${least + GAP_PX}px`);
  const focused = [...element("head").children].indexOf(document.activeElement);
  element("head").replaceChildren(
    ...columns.map((column) => {
      const at = COLUMNS.indexOf(column);
      const isSorted = sorting.column === at;
      const cell = document.createElement("button");
      cell.textContent = column.name + (isSorted && at ? (sorting.isDown ? " ▾" : " ▴") : "");
      if (column.isNumber) cell.className = "number";
      if (isSorted) cell.setAttribute("aria-sort", sorting.isDown ? "descending" : "ascending");
      cell.onclick = () => {
        sorting = { column: at, isDown: isSorted ? !sorting.isDown : Boolean(column.isNumber && at) };
        arrange();
      };
      return cell;
    }),
  );
  if (focused >= 0) element("head").children[focused]?.focus();
}

/** Choose and sort the lines, and draw the table and, soon, the timeline. */
function arrange() {
  const wanted = element("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = [];
  let hiddenCount = 0;
  lines.forEach((line, at) => {
    if (chosen.isDifferent && line.isEqual) return;
    if (!wanted.every((word) => haystack[at].includes(word))) return;
    if (isHidden(leadOf(line))) hiddenCount += 1;
    else shown.push(at);
  });
  if (sorting.column || sorting.isDown) {
    const keys = new Array(lines.length);
    for (const at of shown) keys[at] = COLUMNS[sorting.column].value(lines[at]);
    const sign = sorting.isDown ? -1 : 1;
    const isNone = (key) => Number(Number.isNaN(key));
    shown.sort((a, b) => isNone(keys[a]) - isNone(keys[b]) || (keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b));
  }
  placeOf = new Array(lines.length).fill(-1);
  shown.forEach((at, place) => { placeOf[at] = place; });
  const all = lines.length.toLocaleString("en");
  element("count").textContent =
    (shown.length === lines.length ? all : `${shown.length.toLocaleString("en")} of ${all}`) +
    (hiddenCount ? `; ${hiddenCount.toLocaleString("en")} are of kinds that are not shown` : "");
  element("space").style.height = `${shown.length * ROW_PX}px`;
  drawHead();
  drawRows();
  fadeSoon();
}

function drawRows() {
  const pane = element("ops");
  const first = Math.max(0, Math.floor(pane.scrollTop / ROW_PX) - 4);
  const last = Math.min(shown.length, first + Math.ceil(pane.clientHeight / ROW_PX) + 8);
  const rows = element("rows");
  const columns = shownColumns();
  rows.style.transform = `translateY(${first * ROW_PX}px)`;
  rows.replaceChildren(...shown.slice(first, last).map((at) => drawRow(lines[at], columns)));
}

function drawRow(line, columns) {
  const box = document.createElement("div");
  const row = leadOf(line);
  box.className = isMarked(row) ? "row marked" : "row";
  if (!line.isEqual) box.classList.add(line.a < 0 ? "added" : line.b < 0 ? "removed" : "changed");
  box.dataset.row = row;
  for (const column of columns) {
    const cell = document.createElement("span");
    if (column.isNumber) cell.className = "number";
    if (column.name === "op") {
      const dot = document.createElement("i");
      dot.className = "dot";
      dot.style.background = colours.get(ops.kind[row]) || "transparent";
      cell.append(dot);
    }
    const value = column.value(line);
    const text = String(column.text ? column.text(value, line) : value);
    cell.append(text);
    if (column.name === "what" || column.name === "unit") cell.title = text;
    box.append(cell);
  }
  return box;
}

let isDrawing = false;
function drawRowsSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => { isDrawing = false; drawRows(); });
}

/** Scroll the table until a line is in sight: to its middle, or with `isNear` no further than needed. */
function scrollToLine(line, { isNear = false } = {}) {
  const place = placeOf[line];
  if (place < 0) return;
  const pane = element("ops");
  if (!isNear) { pane.scrollTop = Math.max(0, (place + 1) * ROW_PX - pane.clientHeight / 2); return; }
  const top = place * ROW_PX;
  const bottom = top + 2 * ROW_PX + 2;
  if (top < pane.scrollTop) pane.scrollTop = top;
  else if (bottom > pane.scrollTop + pane.clientHeight) pane.scrollTop = bottom - pane.clientHeight;
}
