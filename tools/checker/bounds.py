"""The bounds of a program: which buffers surely have ended when another of their kind begins."""

from __future__ import annotations

from collections.abc import Iterator

from tools.checker.order import Bounds, OrderedRun, Report
from tools.checker.program import TRANSFERS, Declarations, changes, reads
from tools.checker.reading import FileRecord

Numbered = list[tuple[int, int, FileRecord]]
"""The ops of a section that runs: index, node in the run, and op."""


def kinds(names: Declarations) -> dict[str, str]:
    """Return the kind of each temporary buffer to which a bound can apply."""
    temporary = {b.name: b for b in names.program.buffers if b.holds is None}
    found: dict[str, str] = {}
    for name, buffer in temporary.items():
        if buffer.role in {"gathered", "page"}:
            found[name] = "full_parameters" if buffer.role == "gathered" else "pages"
        elif buffer.role in {"saved", "activation"} and buffer.space == "device":
            found[name] = "activations"
    for section in names.program.sections:
        for op in section.body:
            if op.kind == "Compute":
                written = [d for d in op.destinations if d is not None and d.gradient is not None]
                found |= {
                    d.view.region.buffer: "full_gradients"
                    for d in written
                    if d.view.region.buffer in temporary
                }
            elif op.kind in TRANSFERS:
                for name in (op.source.buffer, op.destination.buffer):
                    buffer = temporary.get(name)
                    if buffer is not None and buffer.role == "staging" and buffer.space != "disk":
                        of_disk = buffer.space == "host" and op.kind in {"Load", "Store"}
                        if of_disk or name not in found:
                            found[name] = "disk_staging" if of_disk else f"{buffer.space}_staging"
    return found


def _marks(op: FileRecord, kind_of: dict[str, str], mark: dict[str, int], index: int) -> None:
    """Note the op that says to which group a buffer belongs."""
    for region in reads(op):
        kind = kind_of.get(region.buffer, "")
        if kind == "full_parameters" or (kind.endswith("staging") and op.kind not in TRANSFERS):
            mark.setdefault(region.buffer, index)
    for region, _ in changes(op):
        kind = kind_of.get(region.buffer, "")
        if kind == "full_gradients":
            mark[region.buffer] = index
        elif kind == "activations" or (kind.endswith("staging") and op.kind not in TRANSFERS):
            mark.setdefault(region.buffer, index)
    if op.kind == "ReduceScatter":
        reduced = [r.buffer for r in reads(op) if kind_of.get(r.buffer) == "full_gradients"]
        last = max((mark.get(name, index) for name in reduced), default=index)
        mark |= dict.fromkeys(reduced, last)


def groups(ops: Numbered, kind_of: dict[str, str]) -> Iterator[tuple[int, str, int, int]]:
    """Yield each release of a bounded buffer: its index, the buffer's name, its group and the node."""
    mark: dict[str, int] = {}
    for index, node, op in ops:
        if op.kind == "Alloc":
            mark.pop(op.buffer, None)
        elif op.kind == "Release":
            if op.buffer in kind_of:
                yield index, op.buffer, mark.pop(op.buffer, index), node
        elif op.kind != "Wait":
            _marks(op, kind_of, mark, index)


def check_bounds(state: OrderedRun, ops: Numbered, kind_of: dict[str, str], report: Report) -> None:
    """Report each alloc of a section that may come too early for the bound on its kind."""
    releases = list(groups(ops, kind_of))
    for bound in state.names.program.bounds:
        for index, node, op in ops:
            if op.kind != "Alloc" or kind_of.get(op.buffer) != bound.kind_:
                continue
            late = False
            if bound.kind == "BehindBound":
                above = [
                    n
                    for i, n, o in ops
                    if i < index and o.kind not in {"Alloc", "Wait"} and o.stream == bound.behind
                ]
                late = bool(above) and not state.is_before(above[-1], node)
            elif bound.kind == "AheadBound":
                of_group: dict[int, list[int]] = {}
                for i, name, group, released in releases:
                    if i < index and kind_of[name] == bound.kind_:
                        of_group.setdefault(group, []).append(released)
                ordered = sorted(of_group.values(), key=max)
                ended = ordered[: len(ordered) - bound.ahead]
                late = any(not state.is_before(n, node) for group in ended for n in group)
            else:
                lives = [*state.ended, *state.lives.values()]
                others = [
                    life
                    for life in lives
                    if kind_of.get(life.buffer) == bound.kind_
                    and life.begin < node
                    and (life.end is None or not state.is_before(life.end, node))
                ]
                late = len(others) > bound.live - 1
            if late:
                report(f"alloc of %{op.buffer} may come too early for the bound on {bound.kind_}")


def bounds_of(names: Declarations) -> Bounds:
    """Return the check of the bounds of a program, for each section of a run."""
    kind_of = kinds(names)
    return lambda state, ops: check_bounds(state, ops, kind_of, state.report)
