// The op table and its links with the two charts: an op under the pointer in any of the three is marked in all of them.

const data = JSON.parse(document.getElementById("data").textContent);
const ops = data.ops;
const count = ops.op.length;
const ROW_PX = 24;
const LANE_HALF = 0.46;
const SPAN_HALF = 0.38;
const WAIT_HALF = 0.06;

const element = (id) => document.getElementById(id);
const bytes = (n) => scaled(n, "B");
const scaled = (n, unit) => {
  if (!n) return "";
  const powers = ["", "k", "M", "G", "T"];
  let at = 0;
  while (Math.abs(n) >= 999.95 && at < powers.length - 1) { n /= 1000; at += 1; }
  return `${at ? n.toFixed(1) : n} ${powers[at]}${unit}`;
};
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const micros = (x) => tenths.format(x);
const isCritical = (row) => ops.critical[row].includes(1);
const took = (row) => ops.end[row][0] - ops.start[row][0];

// ------------------------------------------------------------------------------------------------------------ table

const COLUMNS = [
  { name: "#", isNumber: true, value: (row) => row },
  { name: "section", value: (row) => ops.section[row] },
  { name: "line", isNumber: true, value: (row) => ops.line[row] },
  { name: "op", value: (row) => ops.op[row] },
  { name: "stream", value: (row) => ops.stream[row] },
  { name: "unit", value: (row) => ops.unit[row] },
  { name: "what", value: (row) => ops.what[row] },
  { name: "size", isNumber: true, value: (row) => ops.bytes[row], text: (row) => bytes(ops.bytes[row]) },
  { name: "computes", isNumber: true, value: (row) => ops.flops[row], text: (row) => scaled(ops.flops[row], "FLOP") },
  { name: "begins, µs", isNumber: true, value: (row) => ops.start[row][0], text: (row) => micros(ops.start[row][0]) },
  { name: "takes, µs", isNumber: true, value: took, text: (row) => (took(row) ? micros(took(row)) : "") },
  { name: "in use", isNumber: true, value: (row) => ops.used[row], text: (row) => bytes(ops.used[row]) },
];

const haystack = Array.from({ length: count }, (_, row) =>
  [ops.section[row], ops.op[row], ops.kind[row], ops.stream[row], ops.unit[row], ops.what[row], ops.source[row]]
    .concat(isCritical(row) ? ["critical"] : [])
    .join(" ")
    .toLowerCase(),
);
let shown = Array.from({ length: count }, (_, row) => row);
let placeOf = shown.slice();
let sorting = { column: 0, isDown: false };
let marked = null;
const colours = new Map();

function drawHead() {
  element("head").replaceChildren(
    ...COLUMNS.map((column, number) => {
      const cell = document.createElement("span");
      cell.textContent = column.name + (sorting.column === number && number ? (sorting.isDown ? " ▾" : " ▴") : "");
      if (column.isNumber) cell.className = "number";
      if (sorting.column === number) cell.setAttribute("aria-sort", sorting.isDown ? "descending" : "ascending");
      cell.onclick = () => {
        sorting = { column: number, isDown: sorting.column === number ? !sorting.isDown : Boolean(column.isNumber && number) };
        arrange();
      };
      return cell;
    }),
  );
}

function arrange() {
  const words = element("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = [];
  for (let row = 0; row < count; row += 1) {
    if (words.every((word) => haystack[row].includes(word))) shown.push(row);
  }
  if (sorting.column || sorting.isDown) {
    const keys = new Array(count);
    for (const row of shown) keys[row] = COLUMNS[sorting.column].value(row);
    const sign = sorting.isDown ? -1 : 1;
    shown.sort((a, b) => (keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b));
  }
  placeOf = new Array(count).fill(-1);
  shown.forEach((row, place) => { placeOf[row] = place; });
  element("count").textContent =
    shown.length === count ? count.toLocaleString("en") : `${shown.length.toLocaleString("en")} of ${count.toLocaleString("en")}`;
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
  rows.style.transform = `translateY(${first * ROW_PX}px)`;
  rows.replaceChildren(...shown.slice(first, last).map(drawRow));
}

function drawRow(row) {
  const line = document.createElement("div");
  line.className = row === marked ? "row marked" : "row";
  line.dataset.row = row;
  for (const column of COLUMNS) {
    const cell = document.createElement("span");
    if (column.isNumber) cell.className = "number";
    if (column.name === "op") {
      const dot = document.createElement("i");
      dot.className = "dot";
      dot.style.background = colours.get(ops.kind[row]) || "transparent";
      cell.append(dot);
    }
    const text = String(column.text ? column.text(row) : column.value(row));
    cell.append(text);
    if (column.name === "what" || column.name === "unit") cell.title = text;
    line.append(cell);
  }
  return line;
}

// ------------------------------------------------------------------------------------------------------------- marks

/** Mark an op in the table and in both charts; scroll the table to it unless the pointer is in the table. */
function mark(row, { isFromTable = false } = {}) {
  if (row === marked) return;
  marked = row;
  if (row !== null && !isFromTable && placeOf[row] >= 0) {
    const pane = element("ops");
    pane.scrollTop = Math.max(0, (placeOf[row] + 1) * ROW_PX - pane.clientHeight / 2);
  }
  for (const line of element("rows").children) line.classList.toggle("marked", Number(line.dataset.row) === row);
  element("detail").textContent = row === null ? "Point at a row or into a chart." : describe(row);
  markTime(row);
  markMemory(row);
}

function describe(row) {
  const parts = [`${ops.section[row]}:${ops.line[row]} ${ops.op[row]} ${ops.what[row]}`, ops.unit[row], `on ${ops.stream[row]}`];
  if (took(row)) parts.push(`${micros(ops.start[row][0])} to ${micros(ops.end[row][0])} µs`);
  if (ops.bytes[row]) parts.push(bytes(ops.bytes[row]));
  if (ops.flops[row]) parts.push(scaled(ops.flops[row], "FLOP"));
  parts.push(`${bytes(ops.used[row]) || "0 B"} in use`);
  if (isCritical(row)) parts.push("on the critical path");
  if (ops.source[row]) parts.push(ops.source[row]);
  return parts.filter(Boolean).join("  ·  ");
}

let isDrawing = false;
function drawRowsSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => { isDrawing = false; drawRows(); });
}

const models = {};
function markTime(row) {
  const box = models.timeMark;
  if (!box) return;
  const lane = row === null ? -1 : data.lanes.findIndex((lane) => lane.stream === ops.stream[row]);
  if (lane < 0) { box.visible = false; return; }
  const [left, right] = [ops.start[row][0], ops.end[row][0]];
  box.setv({ left, right, bottom: -lane - LANE_HALF, top: -lane + LANE_HALF, visible: true });
}

function markMemory(row) {
  const box = models.memoryMark;
  if (!box) return;
  if (row === null) box.visible = false;
  else box.setv({ left: row, right: row + 1, visible: true });
}

// ------------------------------------------------------------------------------------------------------------ charts

/** For each lane its ops of some duration in the order of their beginnings: all, waits, others, and critical ones. */
const lanes = data.lanes.map(({ class: rankClass, stream }) => {
  const all = [];
  for (let row = 0; row < count; row += 1) {
    const [start, end] = [ops.start[row][rankClass], ops.end[row][rankClass]];
    if (ops.stream[row] === stream && end > start) all.push({ row, start, end });
  }
  all.sort((a, b) => a.start - b.start);
  const isWait = ({ row }) => ops.kind[row] === "wait";
  return {
    all,
    waits: all.filter(isWait),
    work: all.filter((span) => !isWait(span)),
    critical: all.filter((span) => !isWait(span) && ops.critical[span.row][rankClass]),
  };
});

/** The op at a time in a lane: the last one that began, if it has not ended. */
function opAt(time, lane) {
  const { all } = lanes[lane] || { all: [] };
  const span = all[firstWhere(all.length, (i) => all[i].start > time) - 1];
  return span && time <= span.end ? span.row : null;
}

/** The visible interval of a chart, and the width of a pixel in its unit. */
function view({ x_range: { start, end }, inner_width: width }) {
  return [start, end, (end - start) / (width || 1000)];
}

/** Draw the timeline at its current zoom; ops that the filter leaves out are faint. */
function drawSpans() {
  const spans = { left: [], right: [], top: [], bottom: [], colour: [], alpha: [], row: [] };
  const critical = { left: [], right: [], top: [], bottom: [] };
  const sight = view(models.timeline);
  lanes.forEach(({ waits, work, critical: own }, lane) => {
    for (const [laneOps, half, full] of [[waits, WAIT_HALF, 0.5], [work, SPAN_HALF, 0.9]]) {
      const blocks = blocksOf(laneOps, ...sight, {
        colourOf: (row) => colours.get(ops.kind[row]),
        alphaOf: (rows) => (rows.some((row) => placeOf[row] >= 0) ? full : 0.08),
      });
      for (const block of blocks) {
        spans.left.push(block.left);
        spans.right.push(block.right);
        spans.top.push(half - lane);
        spans.bottom.push(-half - lane);
        spans.colour.push(block.colour);
        spans.alpha.push(block.alpha);
        spans.row.push(block.row);
      }
    }
    for (const [left, right] of covered(own, ...sight)) {
      critical.left.push(left);
      critical.right.push(right);
      critical.top.push(-SPAN_HALF - 0.02 - lane);
      critical.bottom.push(-LANE_HALF - 0.02 - lane);
    }
  });
  models.spans.data = spans;
  models.critical.data = critical;
}

/** For each role the top of its band at each position of the curve; the last one is the sum of all roles. */
const ceilings = data.live.roles.map(() => new Float64Array(data.live.at.length));
data.live.roles.forEach((sizes, role) => {
  sizes.forEach((size, at) => {
    ceilings[role][at] = size / data.live.unit_bytes + (role ? ceilings[role - 1][at] : 0);
  });
});

/** Draw the memory curve at its current zoom. */
function drawMemory() {
  const { at, chosen } = highest(data.live.at, ceilings[ceilings.length - 1] || [], ...view(models.memory));
  const columns = { at };
  let floor = new Float64Array(chosen.length);
  ceilings.forEach((heights, role) => {
    columns[`low_${role}`] = floor;
    floor = Float64Array.from(chosen, (i) => heights[i]);
    columns[`high_${role}`] = floor;
  });
  models.live.data = columns;
}

/** Draw a chart now and after each change of its view, at most once per frame. */
function drawAsSeen(chart, draw) {
  let isDue = false;
  let seen = null;
  const drawIfNew = () => {
    isDue = false;
    const sight = view(chart).join();
    if (sight === seen) return;
    seen = sight;
    draw();
  };
  const soon = () => {
    if (!isDue) queueMicrotask(drawIfNew);
    isDue = true;
  };
  chart.x_range.change.connect(soon);
  chart.properties.inner_width.change.connect(soon);
  drawIfNew();
}

let fading = null;
function fadeSoon() {
  // Drawing the chart again after every key would be slow.
  clearTimeout(fading);
  if (models.spans) fading = setTimeout(drawSpans, 60);
}

function paint() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const [ink, faint, line, bad] = ["--ink", "--faint", "--line", "--bad"].map(colour);
  for (const chart of [models.timeline, models.memory]) {
    for (const axis of [...chart.below, ...chart.left].filter((item) => "axis_label" in item.attributes)) {
      axis.setv({
        axis_label_text_color: faint, axis_label_text_font_style: "normal", axis_label_text_font_size: "12px",
        major_label_text_color: ink, major_label_text_font_size: "12px",
        axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null,
      });
    }
    for (const grid of chart.center.filter((item) => "grid_line_color" in item.attributes)) grid.grid_line_color = line;
    for (const item of chart.center) {
      if (item.name === "joint") item.line_color = faint;
      if (item.name === "joint-label") item.text_color = faint;
      if (item.name === "budget") item.line_color = bad;
    }
  }
  for (const box of [models.timeMark, models.memoryMark]) {
    box.setv({ fill_color: ink, fill_alpha: 0.18, line_color: ink, line_width: 2, line_alpha: 1 });
  }
}

async function drawCharts() {
  const roots = [];
  for (const id of ["timeline", "memory"]) {
    const views = await Bokeh.embed.embed_item(data[id], id);
    roots.push((views.roots || views)[0].model);
  }
  const named = (chart, name) => chart.center.find((item) => item.name === name);
  [models.timeline, models.memory] = roots;
  models.timeMark = named(models.timeline, "time-mark");
  models.memoryMark = named(models.memory, "memory-mark");
  [models.spans, models.critical] = models.timeline.renderers.map((renderer) => renderer.data_source);
  models.live = models.memory.renderers[0].data_source;
  drawAsSeen(models.timeline, drawSpans);
  drawAsSeen(models.memory, drawMemory);
  models.timeline.on_event("mousemove", (event) => {
    const lane = Math.round(-event.y);
    mark(lane >= 0 && lane < lanes.length ? opAt(event.x, lane) : null);
  });
  models.memory.on_event("mousemove", (event) => {
    const row = Math.floor(event.x);
    mark(row >= 0 && row < count ? row : null);
  });
  for (const chart of roots) chart.on_event("mouseleave", () => mark(null));
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

for (const key of document.querySelectorAll(".key")) {
  colours.set(key.textContent, key.querySelector("i").style.background);
}
element("filter").addEventListener("input", arrange);
element("ops").addEventListener("scroll", drawRowsSoon);
element("rows").addEventListener("mouseover", (event) => {
  const line = event.target.closest(".row");
  if (line) mark(Number(line.dataset.row), { isFromTable: true });
});
element("ops").addEventListener("mouseleave", () => mark(null));
addEventListener("resize", drawRowsSoon);
arrange();
// For tests and for the console.
window.zeroir = { data, models, opAt, mark, ready: drawCharts().then(arrange) };
