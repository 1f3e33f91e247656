"use strict";
// What a screen can show of the timeline and of the memory curve: what falls into a pixel or two is drawn as one, so that a
// step of any length is drawn as quickly as the chart is wide. The charts are given anew with every pan and zoom.

const BLOCK_PX = 2;

/** The first of `count` positions for which `isAfter` holds, which from there on always does. */
function firstWhere(count, isAfter) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isAfter(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * A lane's ops within [from, to], as blocks to be drawn.
 *
 * `spans` are { row, start, end } in the order of time, none begins before the last has ended. What is narrower than two
 * pixels becomes a block with what touches it on its left, with the row and the colour of its longest op; of such blocks,
 * neighbours that look alike are one. A block is at least a pixel wide, and of wide ones the last pixel is left free, so
 * that neighbours stay apart.
 */
function blocksOf(spans, from, to, pixel, { colourOf, alphaOf }) {
  const found = [];
  let open = null;
  const close = () => {
    if (!open) return;
    const { left, right, rows, row, isNarrow } = open;
    const block = { left, right, row, isNarrow, colour: colourOf(row), alpha: alphaOf(rows) };
    const last = found[found.length - 1];
    const isAlike = last && last.isNarrow && isNarrow && last.colour === block.colour && last.alpha === block.alpha;
    if (isAlike && left - last.right < pixel) last.right = right;
    else found.push(block);
  };
  for (let at = firstWhere(spans.length, (i) => spans[i].end >= from); at < spans.length; at += 1) {
    const { row, start, end } = spans[at];
    if (start > to) break;
    const isNarrow = end - start < BLOCK_PX * pixel;
    if (open && isNarrow && start - open.right < pixel && open.right - open.left < BLOCK_PX * pixel) {
      open.right = end;
      open.rows.push(row);
      if (end - start > open.longest) { open.longest = end - start; open.row = row; }
    } else {
      close();
      open = { left: start, right: end, row, rows: [row], longest: end - start, isNarrow };
    }
  }
  close();
  for (const block of found) {
    const width = block.right - block.left;
    if (!block.isNarrow && width > 6 * pixel) block.right -= pixel;
    else if (width < pixel) block.right = block.left + pixel;
  }
  return found;
}

/** Times in which something goes on, as [left, right], where less than a pixel between two does not part them. */
function stretches(spans, from, to, pixel) {
  const found = [];
  for (let at = firstWhere(spans.length, (i) => spans[i].end >= from); at < spans.length; at += 1) {
    const { start, end } = spans[at];
    if (start > to) break;
    const last = found[found.length - 1];
    if (last && start - last[1] <= pixel) last[1] = Math.max(last[1], end);
    else found.push([start, end]);
  }
  return found;
}

/** Of ascending positions those within [from, to], and of all in one block of pixels the one with the largest height. */
function highest(positions, heights, from, to, pixel) {
  const at = [];
  const chosen = [];
  const begin = Math.max(0, firstWhere(positions.length, (i) => positions[i] > from) - 1);
  let column = null;
  for (let i = begin; i < positions.length; i += 1) {
    const own = Math.floor(positions[i] / (BLOCK_PX * pixel));
    if (own !== column) {
      at.push(positions[i]);
      chosen.push(i);
      column = own;
    } else if (heights[i] > heights[chosen[chosen.length - 1]]) {
      chosen[chosen.length - 1] = i;
    }
    if (positions[i] > to) break;
  }
  return { at, chosen };
}
