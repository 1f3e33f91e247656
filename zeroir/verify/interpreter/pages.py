"""Pages: a page is loaded before an op uses it (Z501), and changes to it are not lost (Z502).

A *page* is a temporary buffer of the role ``page``. It temporarily has elements on the device whose home is another
buffer, and changed elements are written back before the page ends or gets other elements. A page whose contents are
also in a buffer at rest may be dropped. The number of pages live at once is a bound of the program (Z503).

The laws of all buffers find most errors. For pages they get codes that say what a page lacks; only the check for
dropped changes needs the values.
"""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, whole
from zeroir.ir.ops import Op
from zeroir.verify.context import spell, title
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import POISON, Elements, FlatKey
from zeroir.verify.interpreter.intervals import IntervalMap
from zeroir.verify.interpreter.section_run import SectionRun


def code_of_conflict(code: str, earlier: Op | None, later: Op, *, was_write: bool) -> str:
    """Return the code of a conflict of two ops over a page; for another buffer it would be ``code``."""
    if isinstance(earlier, ops.Alloc):
        return code
    if was_write and isinstance(earlier, ops.Transfer):
        return code if _fills(later) else "Z501"
    is_written_back = isinstance(earlier, ops.Transfer) or isinstance(later, ops.Transfer)
    return "Z502" if is_written_back or isinstance(later, ops.Release) else code


def _fills(op: Op) -> bool:
    """Return whether an op ignores the content of a page: it fills or ends it."""
    return isinstance(op, ops.Release | ops.ToDevice | ops.Load)


def code_of_absence(op: Op) -> str:
    """Return the code of the use of a page that is not live: its write-back, or another use."""
    return "Z502" if isinstance(op, ops.ToHost | ops.Store) else "Z501"


def check_dropped(run: SectionRun, op: Op) -> None:
    """Report changed elements of a page that an op drops, because it ends the page or overwrites them."""
    dropped = [r for r in effects(op).writes if r.buffer in run.shared.pages]
    if isinstance(op, ops.Release) and op.buffer in run.shared.pages:
        dropped.append(whole(run.program.buffer_by_name[op.buffer]))
    for region in dropped:
        for start, stop, value in run.memory.read(region):
            if isinstance(value, Elements) and isinstance(value.key, FlatKey):
                _check_kept(run, op, region, (start, stop), value, value.key)


def _check_kept(
    run: SectionRun,
    op: Op,
    region: Region,
    interval: tuple[int, int],
    value: Elements,
    key: FlatKey,
) -> None:
    """Check that dropped elements of a page are in a buffer at rest, or in one that is being copied to it."""
    first, last = (at + value.shift for at in interval)
    homes = [
        (buffer, content)
        for buffer, content in run.shared.resting.get((key.quantity, key.flat), ())
        if run.layout.strides(content, buffer.numel) == value.strides
    ]
    kept = IntervalMap(last - first, False)
    for buffer in (*(buffer for buffer, _ in homes), *run.shared.staging):
        for start, stop, there in run.memory.read(whole(buffer)):
            if isinstance(there, Elements) and replace(there, shift=value.shift) == value:
                low, high = max(start + there.shift, first), min(stop + there.shift, last)
                kept.write(low - first, max(high, low) - first, True)
        if all(is_kept for _, _, is_kept in kept.read(0, last - first)):
            return
    run.fail(
        "Z502",
        f"{title(op)} drops {describe(value)} in {spell(region, run.program)}, which no other buffer holds",
        region.buffer,
        *(buffer.name for buffer, _ in homes),
    )
    for buffer, content in homes:
        _poison(run, buffer, content.offset, first, last)


def _poison(run: SectionRun, home: Buffer, offset: int, start: int, stop: int) -> None:
    """Mark elements ``[start, stop)`` so that their loss is reported only once."""
    first, last = max(start - offset, 0), min(stop - offset, home.numel)
    if first < last:
        region = Region(buffer=home.name, offset=first, numel=last - first)
        run.memory.write(region, [(0, last - first, POISON)])
