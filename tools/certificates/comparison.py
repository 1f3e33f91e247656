"""Compares what the sections of a schedule compute with what those of its logical program do."""

from __future__ import annotations

from typing import Any

from tools.certificates.repetition import is_sliced
from tools.certificates.sections import KINDS, SectionCheck
from tools.certificates.spans import Pieces, merged, require
from tools.certificates.values import moved
from tools.checker.program import changes
from tools.checker.reading import ITEM_BYTES, FileRecord


def compare(logical: dict[str, SectionCheck], scheduled: dict[str, SectionCheck]) -> None:
    """Require that sections compute what those of the logical program do: gradients, scalars, settings."""
    ops = (op for run in logical.values() for op in run.section.body)
    decided = {
        region.buffer
        for op in ops
        if op.kind in {"GradNorm", "CheckFinite", "Decide"}
        for region, _ in changes(op)
    }
    for name, of in logical.items():
        run, what = scheduled[name], f"section {name} has other"
        for rank in run.ranks:
            same = rank if len(of.ranks) > 1 else 0
            is_so = run.contributions[rank] == of.contributions[same]
            require(is_so, f"{what} contributions to gradients than in the logical program")
            for buffer in of.names.program.buffers:
                is_early = name == "last_micro_step" and buffer.name in decided
                if getattr(buffer.holds, "kind", "") == "NamedContent" and not is_early:
                    own, wanted = run.told[buffer.name, rank], of.told[buffer.name, same]
                    if run.names.program.interleaved > 1 and is_sliced(of.names, buffer):
                        own, wanted = _slices(run, of, buffer, rank, same)
                    require(own == wanted, f"{what} contents of %{buffer.name}")
    _check_sums(logical, scheduled)
    settings = [{s for run in of.values() for s in run.settings} for of in (logical, scheduled)]
    require(settings[0] == settings[1], "the update has other settings than in the logical program")


def _slices(
    run: SectionCheck, of: SectionCheck, buffer: FileRecord, rank: int, same: int
) -> tuple[list[Any], list[Any]]:
    """Return what the slices of a buffer hold, and what it held in the logical program after each micro-batch."""
    wanted = of.slices.get((buffer.name, same)) or [of.told[buffer.name, same]]
    length = run.names.buffers[buffer.name].numel // run.names.program.interleaved
    require(length >= buffer.numel, f"%{buffer.name} has no place for {len(wanted)} micro-batches")
    told = run.told[buffer.name, rank]
    return [_cut(told, length * j, buffer.numel) for j in range(len(wanted))], list(wanted)


def _cut(pieces: Pieces, start: int, numel: int) -> Pieces:
    stop = start + numel
    inside = [(max(a, start), min(b, stop), v) for a, b, v in pieces if a < stop and b > start]
    return merged([(a - start, b - start, moved(v, start)) for a, b, v in inside])


def _check_sums(logical: dict[str, SectionCheck], scheduled: dict[str, SectionCheck]) -> None:
    """Require that sums of contributions are rounded and added only as in the logical program."""
    of = [
        {what: set().union(*(run.sums[what] for run in runs.values())) for what in KINDS}
        for runs in (logical, scheduled)
    ]
    narrowest: dict[Any, str] = {}
    for *sum_, dtype in of[0]["held"]:
        known = narrowest.setdefault(tuple(sum_), dtype)
        if ITEM_BYTES[dtype] < ITEM_BYTES[known]:
            narrowest[tuple(sum_)] = dtype
    require(of[1]["rounded"] <= of[0]["held"], "a gradient passes through another dtype")
    require(of[1]["added"] <= of[0]["added"], "contributions are added in another way")
    for *sum_, dtype in of[1]["reduced"]:
        require(narrowest.get(tuple(sum_), dtype) == dtype, f"ranks add a gradient up in {dtype}")
