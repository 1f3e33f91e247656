"use strict";
// The visible items of the timeline and of the memory curve. Items within one or two pixels are drawn as one, so that the
// time to draw depends on the width of a chart and not on the length of the step. Every pan and zoom computes them again.

const BLOCK_PX = 2;

/** The first of `count` positions for which `isAfter` holds; it also holds for all later positions. */
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
 * The ops of a lane within [from, to], as blocks to draw.
 *
 * `spans` are { row, start, end } in the order of time; none begins before the previous one has ended. An op that is
 * narrower than two pixels joins the block that touches it on its left; the block has the row and the colour of its
 * longest op. Neighbouring blocks of this kind that look equal become one. A block is at least a pixel wide, and a wide
 * block ends one pixel early, so that neighbours stay apart.
 */
function blocksOf(spans, from, to, pixel, { colourOf, alphaOf }) {
  const blocks = [];
  let open = null;
  const close = () => {
    if (!open) return;
    const { left, right, rows, row, isNarrow } = open;
    const block = { left, right, row, isNarrow, colour: colourOf(row), alpha: alphaOf(rows) };
    const last = blocks[blocks.length - 1];
    const isAlike = last && last.isNarrow && isNarrow && last.colour === block.colour && last.alpha === block.alpha;
    if (isAlike && left - last.right < pixel) last.right = right;
    else blocks.push(block);
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
  for (const block of blocks) {
    const width = block.right - block.left;
    if (!block.isNarrow && width > 6 * pixel) block.right -= pixel;
    else if (width < pixel) block.right = block.left + pixel;
  }
  return blocks;
}

/** The times that spans cover, as [left, right]; gaps of at most a pixel are closed. */
function covered(spans, from, to, pixel) {
  const stretches = [];
  for (let at = firstWhere(spans.length, (i) => spans[i].end >= from); at < spans.length; at += 1) {
    const { start, end } = spans[at];
    if (start > to) break;
    const last = stretches[stretches.length - 1];
    if (last && start - last[1] <= pixel) last[1] = Math.max(last[1], end);
    else stretches.push([start, end]);
  }
  return stretches;
}

/**
 * The points of a step curve within [from, to]: of each block of pixels the first position with the largest height.
 *
 * `positions` ascend, and two may be equal. A block whose last height is smaller ends at its right edge, unless the next
 * block begins within a pixel, so that no height lasts beyond the block. `chosen` are indices of `heights`.
 */
function highest(positions, heights, from, to, pixel) {
  const at = [];
  const chosen = [];
  const width = BLOCK_PX * pixel;
  const begin = Math.max(0, firstWhere(positions.length, (i) => positions[i] > from) - 1);
  let column = null;
  for (let i = begin; i < positions.length; i += 1) {
    const own = Math.floor(positions[i] / width);
    if (own !== column) {
      const edge = (column + 1) * width;
      if (i > begin && chosen[chosen.length - 1] !== i - 1 && positions[i] - edge >= pixel) {
        at.push(edge);
        chosen.push(i - 1);
      }
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
