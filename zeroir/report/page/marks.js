// The marked op, which is the same in the table and in all charts, and the tooltip beside it.

const LANE_HALF = 0.46;
const models = {};
let marked = null;

/** Whether the op, or the one that stands for it in the other program, is marked. */
const isMarked = (row) => marked !== null && lineOf[row] === lineOf[marked];

/** Mark an op in the table and in all charts; scroll the table to it unless the pointer is in the table. */
function mark(row, { isFromTable = false } = {}) {
  if (row === marked) return;
  marked = row;
  if (row !== null && !isFromTable) scrollToLine(lineOf[row]);
  for (const box of element("rows").children) box.classList.toggle("marked", isMarked(Number(box.dataset.row)));
  element("detail").textContent =
    row === null ? "Point at a row or into a chart." : [titleOf(row), ...factsOf(row).map((fact) => fact.join(" "))].join("  ·  ");
  drawMarks();
}

/** Draw the marks of the charts where the marked op is now. */
function drawMarks() {
  if (!models.timeline) return;
  const rows = marked === null ? [] : [marked, partnerOf(marked)].filter((row) => row >= 0);
  const places = [];
  data.lanes.forEach((lane, number) => {
    for (const row of rows) {
      if (lane.side !== ops.side[row] || lane.stream !== ops.stream[row]) continue;
      const span = drawnSpan(row, lane);
      if (span) places.push({ number, span });
    }
  });
  models.timeMarks.forEach((box, i) => {
    if (i >= places.length) { box.visible = false; return; }
    const { number, span: [left, right] } = places[i];
    box.setv({ left, right, bottom: -number - LANE_HALF, top: -number + LANE_HALF, visible: true });
  });
  models.memoryMarks.forEach((box, i) => {
    const row = rows.find((own) => ops.side[own] === i);
    if (row === undefined) { box.visible = false; return; }
    const at = row - sides[i].first;
    box.setv({ left: memoryX(sides[i], at), right: memoryX(sides[i], at + 1), visible: true });
  });
}

const titleOf = (row) => `${ops.op[row]} ${ops.what[row]}`.trim();

/** What is known about an op, as pairs of a name and a text; its times are those of a class of ranks. */
function factsOf(row, ofClass = rankClass()) {
  const facts = [];
  const add = (name, text) => { if (text) facts.push([name, text]); };
  const partner = partnerOf(row);
  const isPair = data.pairs && partner >= 0;
  const [a, b] = [lines[lineOf[row]].a, lines[lineOf[row]].b];
  add("unit", ops.unit[row]);
  add("on", ops.stream[row]);
  add("at", `${ops.section[row]}:${ops.line[row]}`);
  if (data.pairs) add("in", sideText(lines[lineOf[row]]));
  // The other program may have fewer classes of ranks.
  const here = (own) => took(own, ofClass < ops.end[own].length ? ofClass : 0);
  if (here(row) || (isPair && here(partner))) {
    add("begins", `${moment(ops.start[row][ofClass])} ${data.time.name}`);
    if (isPair) add("takes", `${duration(here(a))} in A, ${duration(here(b))} in B ${changeText(here(b) / here(a))}`);
    else add(measured ? "simulated" : "takes", duration(took(row, ofClass)));
  }
  if (measured && !Number.isNaN(tookMeasured(row))) {
    add("measured", `${duration(tookMeasured(row))} ${took(row) ? `(${ratioText(tookMeasured(row) / took(row))})` : ""}`);
    add("over ranks", `${duration(measured.least[row])} to ${duration(measured.most[row])}`);
  }
  if (isPair && ops.bytes[a] !== ops.bytes[b]) add("size", `${bytes(ops.bytes[a]) || "0 B"} in A, ${bytes(ops.bytes[b]) || "0 B"} in B`);
  else add("size", bytes(ops.bytes[row]));
  add("computes", scaled(ops.flops[row], "FLOP"));
  add("in use", `${bytes(ops.used[row]) || "0 B"}`);
  if (isCritical(row)) add("critical path", "yes");
  add("source", ops.source[row]);
  return facts;
}

// ---------------------------------------------------------------------------------------------------------- tooltip

/** Show a title and facts beside a point of the window; a fact may have a colour as its third item. */
function showTip(x, y, title, facts) {
  const tip = element("tip");
  const heading = document.createElement("b");
  heading.textContent = title;
  const list = document.createElement("dl");
  for (const [name, text, colour] of facts) {
    const [term, value] = ["dt", "dd"].map((tag) => document.createElement(tag));
    if (colour) {
      const dot = document.createElement("i");
      dot.style.background = colour;
      term.append(dot);
    }
    term.append(name);
    value.textContent = text;
    list.append(term, value);
  }
  tip.replaceChildren(heading, list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const [right, bottom] = [document.documentElement.clientWidth, document.documentElement.clientHeight];
  tip.style.left = `${Math.max(4, Math.min(x + 12, right - width - 4))}px`;
  tip.style.top = `${y + 8 + height > bottom ? Math.max(4, y - height - 2 * LANE_PX) : y + 8}px`;
}

const LANE_PX = 16;
function hideTip() {
  element("tip").hidden = true;
}

/** The position in the window of a point of a chart. */
function inWindow(chart, x, y) {
  const view = Bokeh.index.get_one(chart);
  const box = view.el.getBoundingClientRect();
  return [box.left + view.frame.x_scale.compute(x), box.top + view.frame.y_scale.compute(y)];
}

/** Show the tooltip of the op at a place of a lane, under its bar; `time` is where on the bar. */
function showOpTip(lane, place, time) {
  const { row, start, end } = lanes[lane].all[place];
  const [from, to, pixel] = view(models.timeline);
  const at = Math.max(from, Math.min(to, time === undefined ? (Math.max(start, from) + Math.min(end, to)) / 2 : time));
  const { all } = lanes[lane];
  const first = firstWhere(all.length, (i) => all[i].end >= at - pixel);
  const last = firstWhere(all.length, (i) => all[i].start > at + pixel);
  const facts = factsOf(row, measured ? rankClass() : data.lanes[lane].class);
  if (last - first > 2) facts.push(["here", `${(last - first).toLocaleString("en")} ops; zoom in to tell them apart`]);
  const title = data.lanes[lane].isMeasured ? `${titleOf(row)} (measured)` : titleOf(row);
  showTip(...inWindow(models.timeline, at, -lane - LANE_HALF), title, facts);
}

/** Show the tooltip of the memory of a side at an op: its roles from the largest, and the op. */
function showMemoryTip(side, number, x, y) {
  const { at, roles, role_names: names } = sides[side];
  const i = Math.max(0, firstWhere(at.length, (k) => at[k] > number) - 1);
  const held = roles.map((sizes, role) => ({ size: sizes[i], name: names[role].replaceAll("_", " ") })).filter(({ size }) => size);
  held.sort((one, another) => another.size - one.size);
  const row = sides[side].first + number;
  const total = held.reduce((sum, { size }) => sum + size, 0);
  const facts = held.map(({ name, size }) => [name, bytes(size), colours.get(name)]);
  facts.push(["after", titleOf(row)], ["at", `${ops.section[row]}:${ops.line[row]}`]);
  showTip(x, y, `${bytes(total) || "0 B"} in use`, facts);
}
