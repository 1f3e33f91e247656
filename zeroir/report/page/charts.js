// The charts: what they show at their zoom, their axes, and their colours.

const SPAN_HALF = 0.38;
const WAIT_HALF = 0.06;
const FAINT = 0.08;
const SHORTEST_LABEL_PX = 20;

/** The visible interval of a chart, and the width of a pixel in its unit. */
function view({ x_range: { start, end }, inner_width: width }) {
  return [start, end, (end - start) / (width || 1000)];
}

// --------------------------------------------------------------------------------------------------------- timeline

/** Draw the timeline at its current zoom; ops that the filter leaves out are faint. */
function drawSpans() {
  const spans = { left: [], right: [], top: [], bottom: [], colour: [], alpha: [], row: [] };
  const critical = { left: [], right: [], top: [], bottom: [] };
  const labels = { x: [], y: [], text: [], ink: [] };
  const sight = view(models.timeline);
  const [from, to, pixel] = sight;
  lanes.forEach(({ waits, work, critical: own }, lane) => {
    for (const [laneOps, half, full] of [[waits, WAIT_HALF, 0.5], [work, SPAN_HALF, 0.9]]) {
      const blocks = blocksOf(laneOps, ...sight, {
        colourOf: (row) => colours.get(ops.kind[row]),
        alphaOf: (rows) => (rows.some((row) => placeOf[lineOf[row]] >= 0) ? full : FAINT),
      });
      for (const block of blocks) {
        spans.left.push(block.left);
        spans.right.push(block.right);
        spans.top.push(half - lane);
        spans.bottom.push(-half - lane);
        spans.colour.push(block.colour);
        spans.alpha.push(block.alpha);
        spans.row.push(block.row);
        const left = Math.max(block.left, from);
        const width = (Math.min(block.right, to) - left) / pixel;
        if (laneOps !== work || block.isNarrow || block.alpha === FAINT || width < SHORTEST_LABEL_PX) continue;
        const text = fitting(block.row, width - 6);
        if (!text) continue;
        labels.x.push(left);
        labels.y.push(-lane);
        labels.text.push(text);
        labels.ink.push(inkOn(block.colour));
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
  models.labels.data = labels;
}

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "11px helvetica";
const widths = new Map();
function widthOf(text) {
  if (!widths.has(text)) widths.set(text, ruler.measureText(text).width);
  return widths.get(text);
}

/**
 * The longest name of an op that fits into this width, else nothing.
 *
 * Units differ at the end of their names: of `model.layers.79`, `…layers.79` or `…79` is left where the whole is too long.
 */
function fitting(row, width) {
  const unit = ops.unit[row];
  const verb = ops.op[row] === "compute" ? ops.kind[row] : ops.op[row];
  const short = unit || verb;
  const parts = short.split(".");
  const ends = parts.slice(1).map((_, i) => `…${parts.slice(i + 1).join(".")}`);
  return [`${unit} ${verb}`.trim(), short, ...ends].find((text) => widthOf(text) <= width) || "";
}

const inks = new Map();
/** Black or white, whichever is easier to read on a colour. */
function inkOn(colour) {
  if (!inks.has(colour)) {
    const [r, g, b] = colour.match(/\d+/g).map((part) => (Number(part) / 255) ** 2.2);
    inks.set(colour, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#0d1216" : "#ffffff");
  }
  return inks.get(colour);
}

let fading = null;
function fadeSoon() {
  // Drawing the chart again after every key would be slow.
  clearTimeout(fading);
  if (models.spans) fading = setTimeout(drawSpans, 60);
}

/** Draw the timeline and the memory anew, after what is shown of the ops has changed. */
function redraw() {
  buildLanes();
  if (!models.spans) return;
  drawSpans();
  sides.forEach((_, side) => drawMemory(side));
  drawMarks();
}

// ----------------------------------------------------------------------------------------------------------- memory

/** Draw the memory curve of a side at its current zoom. */
function drawMemory(side) {
  const heights = ceilings[side];
  const places = sides[side].at.map((number) => memoryX(sides[side], number));
  const { at, chosen: points } = highest(places, heights[heights.length - 1] || [], ...view(models.memory[side]));
  const columns = { at };
  let floor = new Float64Array(points.length);
  heights.forEach((tops, role) => {
    columns[`low_${role}`] = floor;
    floor = Float64Array.from(points, (i) => tops[i]);
    columns[`high_${role}`] = floor;
  });
  models.live[side].data = columns;
}

/** Put the memory charts on the axis of time, which is that of the timeline, or on that of the ops. */
function setAxis(axis) {
  chosen.axis = axis;
  const most = Math.max(...sides.map((side) => side.count));
  const whole = axis === "ops" ? [-0.01 * most, 1.01 * most] : [models.timeline.x_range.reset_start, models.timeline.x_range.reset_end];
  const seen = axis === "ops" ? whole : [models.timeline.x_range.start, models.timeline.x_range.end];
  models.memory.forEach((chart, side) => {
    chart.below[0].formatter.args = { size: axis === "ops" ? 1 : data.time.size };
    chart.x_range.setv({ start: seen[0], end: seen[1], reset_start: whole[0], reset_end: whole[1] });
    drawMemory(side);
    placeJoints(side);
  });
  nameAxes();
  drawMarks();
}

/** Put the borders of sections where they are on the present axis, and their names where there is room. */
function placeJoints(side) {
  const chart = models.memory[side];
  const named = (name) => chart.center.filter((item) => item.name === name);
  const end = memoryX(sides[side], sides[side].count);
  const [borders, labels] = [named("boundary"), named("boundary-label")];
  const [, , pixel] = view(chart);
  let free = -Infinity;
  sides[side].boundaries.forEach((number, i) => {
    const x = memoryX(sides[side], number);
    const width = (widthOf(labels[i].text) + 4) * pixel;
    const isLast = x > 0.85 * end;
    const left = isLast ? x - width : x;
    borders[i].location = x;
    labels[i].setv({ x, text_align: isLast ? "right" : "left", visible: left >= free });
    if (left >= free) free = left + width;
  });
}

/** Say what the horizontal axes show. */
function nameAxes() {
  const factor = chosen.isStretched ? `, the simulated step stretched ${ratioText(stretch())}` : "";
  const time = `${measured ? "time" : "simulated time"}, ${data.time.name}${factor}`;
  models.timeline.below[0].axis_label = time;
  for (const chart of models.memory) chart.below[0].axis_label = chosen.axis === "ops" ? "op of the step, in program order" : time;
}

// ------------------------------------------------------------------------------------------------------------ views

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

/** Charts with one axis show one interval of it: all of them over time, the memory charts alone over ops. */
function link() {
  const all = [models.timeline, ...models.memory];
  for (const chart of all) {
    chart.x_range.change.connect(() => {
      if (chosen.axis === "ops" && chart === models.timeline) return;
      const { start, end } = chart.x_range;
      for (const follower of chosen.axis === "ops" ? models.memory : all) {
        if (follower.x_range.start !== start || follower.x_range.end !== end) follower.x_range.setv({ start, end });
      }
    });
  }
}

/** Zoom a chart by a factor around a place of its axis. */
function zoomAt(chart, factor, centre) {
  const { start, end } = chart.x_range;
  chart.x_range.setv({ start: centre - (centre - start) * factor, end: centre + (end - centre) * factor });
}

/** Let the plots of all charts begin at the same distance from the left, so that equal times are above one another. */
function alignPlots() {
  const all = [models.timeline, ...models.memory];
  for (const chart of all) chart.min_border_left = 0;
  requestAnimationFrame(() => {
    const left = Math.max(...all.map((chart) => Bokeh.index.get_one(chart).frame.bbox.left));
    for (const chart of all) chart.min_border_left = Math.ceil(left);
  });
}

function paint() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const [ink, faint, line, bad] = ["--ink", "--faint", "--line", "--bad"].map(colour);
  const size = isNarrow.matches ? "10px" : "12px";
  for (const chart of [models.timeline, ...models.memory]) {
    for (const axis of [...chart.below, ...chart.left].filter((item) => "axis_label" in item.attributes)) {
      axis.setv({
        axis_label_text_color: faint, axis_label_text_font_style: "normal", axis_label_text_font_size: size,
        major_label_text_color: ink, major_label_text_font_size: size,
        axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null,
      });
    }
    for (const grid of chart.center.filter((item) => "grid_line_color" in item.attributes)) grid.grid_line_color = line;
    for (const item of chart.center) {
      if (item.name === "boundary") item.line_color = faint;
      if (item.name === "boundary-label") item.text_color = faint;
      if (item.name === "budget") item.line_color = bad;
      if (item.name === "band") item.setv({ fill_color: ink, fill_alpha: 0.05 });
    }
  }
  for (const box of [...models.timeMarks, ...models.memoryMarks]) {
    box.setv({ fill_color: ink, fill_alpha: 0.18, line_color: ink, line_width: 2, line_alpha: 1 });
  }
}

/** Let a finger that moves up or down over a chart scroll the page, where Bokeh would keep all that fingers do. */
function letPageScroll(chart) {
  Bokeh.index.get_one(chart).canvas_view.events_el.style.touchAction = "pan-y";
}

async function drawCharts() {
  const embed = async (item, id) => {
    const views = await Bokeh.embed.embed_item(item, id);
    return (views.roots || views)[0].model;
  };
  models.timeline = await embed(data.timeline, "timeline");
  models.memory = [];
  for (const [side, { memory }] of sides.entries()) models.memory.push(await embed(memory, `memory-${side}`));
  const named = (chart, name) => chart.center.filter((item) => item.name === name);
  models.timeMarks = named(models.timeline, "mark");
  models.memoryMarks = models.memory.flatMap((chart) => named(chart, "mark"));
  [models.spans, models.critical, models.labels] = models.timeline.renderers.map((renderer) => renderer.data_source);
  models.live = models.memory.map((chart) => chart.renderers[0].data_source);
  for (const chart of [models.timeline, ...models.memory]) letPageScroll(chart);
  drawAsSeen(models.timeline, drawSpans);
  models.memory.forEach((chart, side) => drawAsSeen(chart, () => { drawMemory(side); placeJoints(side); }));
  link();
  setAxis(chosen.axis);
  paint();
  alignPlots();
}
