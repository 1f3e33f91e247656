// The data of the page, what is shown of it, and numbers as text.

const data = JSON.parse(document.getElementById("data").textContent);
const { ops, sides, measured } = data;
const count = ops.op.length;
const element = (id) => document.getElementById(id);

/** What the reader has chosen. */
const chosen = { hidden: new Set(data.hidden), rank: 0, isStretched: false, axis: "time", isDifferent: false };

// ------------------------------------------------------------------------------------------------------------- text

const scaled = (n, unit) => {
  if (!n) return "";
  const powers = ["", "k", "M", "G", "T"];
  let at = 0;
  while (Math.abs(n) >= 999.95 && at < powers.length - 1) { n /= 1000; at += 1; }
  return `${at ? n.toFixed(1) : n} ${powers[at]}${unit}`;
};
const bytes = (n) => scaled(n, "B");

/** A duration in µs with three digits, in a unit of its size. */
function duration(us) {
  const size = Math.abs(us);
  const [unit, name] = size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : size >= 1 || !size ? [1, "µs"] : [1e-3, "ns"];
  return `${Number((us / unit).toPrecision(3)).toLocaleString("en")} ${name}`;
}
const signed = (us) => (us > 0 ? `+${duration(us)}` : duration(us).replace("-", "−"));
const ratioText = (ratio) => (Number.isFinite(ratio) ? `${Number(ratio.toPrecision(3)).toLocaleString("en")}×` : "");
const changeText = (ratio) => {
  if (!Number.isFinite(ratio) || Math.abs(ratio - 1) < 0.0005) return "";
  if (ratio >= 10) return ratioText(ratio);
  const percent = Number((100 * Math.abs(ratio - 1)).toPrecision(3)).toLocaleString("en");
  return `${ratio > 1 ? "+" : "−"}${percent} %`;
};

const clockDigits = { µs: 1, ms: 3, s: 5 }[data.time.name];
const clockFormat = new Intl.NumberFormat("en", { minimumFractionDigits: clockDigits, maximumFractionDigits: clockDigits });
/** The numbers at the axes; Bokeh formats every tick several times in each frame. */
const axisNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });
/** A moment of the step in the unit of the time axis, without its name. */
const moment = (us) => clockFormat.format(us / data.time.size);

// -------------------------------------------------------------------------------------------------------------- ops

/** The lines of the table: an op of a program, or of two programs the ops that stand for each other, -1 for none. */
const lines = data.pairs
  ? data.pairs.map(([a, b, isEqual]) => ({ a, b, isEqual: Boolean(isEqual) }))
  : Array.from({ length: count }, (_, row) => ({ a: row, b: -1, isEqual: true }));
const lineOf = new Int32Array(count);
lines.forEach(({ a, b }, line) => {
  if (a >= 0) lineOf[a] = line;
  if (b >= 0) lineOf[b] = line;
});
const leadOf = ({ a, b }) => (a >= 0 ? a : b);

/** The op of the other program that stands for this one, -1 for none. */
function partnerOf(row) {
  const { a, b } = lines[lineOf[row]];
  return a === row ? b : a;
}

const isHidden = (row) => chosen.hidden.has(ops.kind[row]);
/** The class of ranks whose simulated times are shown: the first, or that of the measured rank. */
const rankClass = () => (measured ? measured.ranks[chosen.rank].class : 0);
const took = (row, ofClass = rankClass()) => ops.end[row][ofClass] - ops.start[row][ofClass];
const isCritical = (row) => ops.critical[row].includes(1);
/** The measured duration on the chosen rank; NaN where it did not carry the op out. */
function tookMeasured(row) {
  const { start, end } = measured.ranks[chosen.rank];
  return start[row] === null ? NaN : end[row] - start[row];
}

/** The factor from simulated to drawn time. */
const stretch = () => (chosen.isStretched ? measured.end / sides[0].end : 1);

/** The [beginning, end] of an op as drawn in a lane; null where it was not measured. */
function drawnSpan(row, lane) {
  if (lane.isMeasured) {
    const { start, end } = measured.ranks[chosen.rank];
    return start[row] === null ? null : [start[row], end[row]];
  }
  const own = measured ? rankClass() : lane.class;
  return [ops.start[row][own] * stretch(), ops.end[row][own] * stretch()];
}

/** For each lane its visible ops of some duration in the order of their beginnings: all, waits, others, critical ones. */
let lanes = [];
function buildLanes() {
  lanes = data.lanes.map((lane) => {
    const all = [];
    const { first, count: own } = sides[lane.side];
    for (let row = first; row < first + own; row += 1) {
      if (ops.stream[row] !== lane.stream || isHidden(row)) continue;
      const span = drawnSpan(row, lane);
      if (span && span[1] > span[0]) all.push({ row, start: span[0], end: span[1] });
    }
    all.sort((a, b) => a.start - b.start);
    const isWait = ({ row }) => ops.kind[row] === "wait";
    const work = all.filter((span) => !isWait(span));
    const ownClass = measured ? rankClass() : lane.class;
    return {
      all,
      work,
      waits: all.filter(isWait),
      critical: lane.isMeasured ? [] : work.filter((span) => ops.critical[span.row][ownClass]),
    };
  });
}

/** The place in a lane of the op at a time: of the last one that began, if it has not ended; -1 for none. */
function placeAt(time, lane) {
  const { all } = lanes[lane] || { all: [] };
  const place = firstWhere(all.length, (i) => all[i].start > time) - 1;
  return place >= 0 && time <= all[place].end ? place : -1;
}

/** The op at a time in a lane, null for none. */
function opAt(time, lane) {
  const place = placeAt(time, lane);
  return place < 0 ? null : lanes[lane].all[place].row;
}

// ----------------------------------------------------------------------------------------------------------- memory

/** For each side and role the top of its band at each position of the curve; the last one is the sum of all roles. */
const ceilings = sides.map(({ at, roles }) => {
  const tops = roles.map(() => new Float64Array(at.length));
  roles.forEach((sizes, role) => {
    sizes.forEach((size, i) => {
      tops[role][i] = size / data.bytes.size + (role ? tops[role - 1][i] : 0);
    });
  });
  return tops;
});

/** Where an op stands on the axis of the memory chart; `number` counts the ops of its side, and their count is the end. */
function memoryX(side, number) {
  if (chosen.axis === "ops") return number;
  return number < side.count ? ops.clock[side.first + number] * stretch() : side.end * stretch();
}

/** The number of the op at a place on the axis of the memory chart. */
function memoryOpAt(side, x) {
  const number = firstWhere(side.count, (i) => memoryX(side, i) > x) - 1;
  return Math.max(0, Math.min(side.count - 1, number));
}

/** The op of a side with the most memory within a pixel of a place, which is the one that the chart draws there. */
function highestOpAt(side, x) {
  const own = sides[side];
  const [, , pixel] = view(models.memory[side]);
  let highest = memoryOpAt(own, x - pixel / 2);
  const last = memoryOpAt(own, x + pixel / 2);
  for (let i = highest + 1; i <= last; i += 1) if (ops.used[own.first + i] > ops.used[own.first + highest]) highest = i;
  return highest;
}

/** The last visible op at or before an op of a side, else the first one after it; null where all are hidden. */
function visibleAt(side, number) {
  for (let i = number; i >= 0; i -= 1) if (!isHidden(side.first + i)) return side.first + i;
  for (let i = number; i < side.count; i += 1) if (!isHidden(side.first + i)) return side.first + i;
  return null;
}
