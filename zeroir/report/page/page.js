// What the reader does with the pointer, the keyboard and the controls.

let isTouch = false;
addEventListener("pointerdown", ({ pointerType, target }) => {
  isTouch = pointerType === "touch";
  if (!target.closest(".plot")) hideTip();
}, { capture: true });

function followPointer() {
  const timeline = models.timeline;
  const onTimeline = (event) => {
    const lane = Math.round(-event.y);
    const place = lane >= 0 && lane < lanes.length ? placeAt(event.x, lane) : -1;
    if (place < 0) { mark(null); hideTip(); return; }
    mark(lanes[lane].all[place].row);
    showOpTip(lane, place, event.x);
  };
  const leave = () => {
    if (isTouch) return; // a finger leaves at once, and what it asked for stays
    mark(null);
    hideTip();
  };
  for (const kind of ["mousemove", "tap"]) timeline.on_event(kind, onTimeline);
  timeline.on_event("mouseleave", leave);
  models.memory.forEach((chart, side) => {
    const onMemory = (event) => {
      const own = sides[side];
      if (event.x < 0 || event.x > memoryX(own, own.count)) { mark(null); hideTip(); return; }
      const number = highestOpAt(side, event.x);
      mark(visibleAt(own, number));
      showMemoryTip(side, number, ...inWindow(chart, event.x, event.y));
    };
    for (const kind of ["mousemove", "tap"]) chart.on_event(kind, onMemory);
    chart.on_event("mouseleave", leave);
  });
}

// --------------------------------------------------------------------------------------------------------- keyboard

/** Move the view of a chart until the middle of an interval is inside, unless the interval fills the view. */
function reveal(chart, from, to) {
  const { start, end } = chart.x_range;
  const middle = (from + to) / 2;
  if ((middle >= start && middle <= end) || (from <= start && to >= end)) return;
  chart.x_range.setv({ start: middle - (end - start) / 2, end: middle + (end - start) / 2 });
}

/** Zoom by + and -, and show the whole step by 0; whether the key was one of these. */
function zoomByKey(chart, key, centre) {
  if (key === "+" || key === "=") zoomAt(chart, 0.5, centre);
  else if (key === "-" || key === "−") zoomAt(chart, 2, centre);
  else if (key === "0") chart.x_range.setv({ start: chart.x_range.reset_start, end: chart.x_range.reset_end });
  else return false;
  return true;
}

const cursor = { lane: 0, place: -1 };

function onTimelineKey(event) {
  const here = lanes[cursor.lane].all[cursor.place];
  const { start, end } = models.timeline.x_range;
  const centre = here ? (here.start + here.end) / 2 : (start + end) / 2;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") { cursor.place = -1; mark(null); hideTip(); return; }
  if (zoomByKey(models.timeline, event.key, centre)) hideTip();
  else if (step) cursor.place = Math.max(0, Math.min(lanes[cursor.lane].all.length - 1, cursor.place + step));
  else if (turn) {
    cursor.lane = Math.max(0, Math.min(lanes.length - 1, cursor.lane + turn));
    const { all } = lanes[cursor.lane];
    cursor.place = Math.min(all.length - 1, firstWhere(all.length, (i) => all[i].end >= centre));
  } else return;
  event.preventDefault();
  const now = lanes[cursor.lane].all[cursor.place];
  if (!now || !(step || turn)) return;
  reveal(models.timeline, now.start, now.end);
  mark(now.row);
  showOpTip(cursor.lane, cursor.place);
}

function onMemoryKey(event, side) {
  const own = sides[side];
  const chart = models.memory[side];
  let at = marked !== null && ops.side[marked] === side ? marked - own.first : -1;
  if (event.key === "Escape") { mark(null); hideTip(); return; }
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (zoomByKey(chart, event.key, memoryX(own, Math.max(0, at)))) { event.preventDefault(); hideTip(); return; }
  if (!step) return;
  event.preventDefault();
  do at += step; while (at >= 0 && at < own.count && isHidden(own.first + at));
  if (at < 0 || at >= own.count) return;
  reveal(chart, memoryX(own, at), memoryX(own, at + 1));
  mark(own.first + at);
  showMemoryTip(side, at, ...inWindow(chart, memoryX(own, at), chart.y_range.end / 2));
}

function onTableKey(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") mark(null);
  if (!step || event.target !== element("ops")) return;
  event.preventDefault();
  const place = marked === null ? -1 : placeOf[lineOf[marked]];
  const line = shown[Math.max(0, Math.min(shown.length - 1, place + step))];
  if (line === undefined) return;
  mark(leadOf(lines[line]), { isFromTable: true });
  scrollToLine(line, { isNear: true });
}

// --------------------------------------------------------------------------------------------------------- controls

for (const key of document.querySelectorAll(".key")) {
  const swatch = key.querySelector("i");
  if (swatch) colours.set(key.textContent.trim(), swatch.style.background);
}
element("kinds").addEventListener("change", ({ target }) => {
  if (target.checked) chosen.hidden.delete(target.value);
  else chosen.hidden.add(target.value);
  redraw();
  arrange();
});
for (const choice of document.querySelectorAll("input[name=axis]")) {
  choice.addEventListener("change", () => setAxis(choice.value));
}
element("changes")?.addEventListener("change", ({ target }) => { chosen.isDifferent = target.checked; arrange(); });
element("rank")?.addEventListener("change", ({ target }) => { chosen.rank = Number(target.value); redraw(); arrange(); });
element("stretch")?.addEventListener("change", ({ target }) => {
  chosen.isStretched = target.checked;
  redraw();
  sides.forEach((_, side) => placeJoints(side));
  nameAxes();
});
element("filter").addEventListener("input", arrange);
element("ops").addEventListener("scroll", drawRowsSoon);
element("ops").addEventListener("keydown", onTableKey);
element("ops").addEventListener("mouseleave", () => mark(null));
element("rows").addEventListener("mouseover", (event) => {
  const box = event.target.closest(".row");
  if (box) mark(Number(box.dataset.row), { isFromTable: true });
});
element("timeline").addEventListener("keydown", onTimelineKey);
sides.forEach((_, side) => element(`memory-${side}`).addEventListener("keydown", (event) => onMemoryKey(event, side)));
for (const plot of document.querySelectorAll(".plot")) plot.addEventListener("blur", hideTip);
addEventListener("scroll", hideTip, { passive: true });
addEventListener("resize", drawRowsSoon);

buildLanes();
arrange();
const ready = drawCharts().then(() => {
  followPointer();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  isNarrow.addEventListener("change", () => { paint(); alignPlots(); arrange(); });
  arrange();
});
// For tests and for the console.
window.zeroir = { data, models, chosen, opAt, mark, ready };
