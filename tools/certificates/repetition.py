"""What a section of several micro-batches must compute: the logical program with one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.certificates.sections import SectionCheck
from tools.certificates.spans import require
from tools.certificates.values import CURRENT, Claims
from tools.checker.program import MICRO_STEPS, Declarations
from tools.checker.reading import FileRecord


def is_sliced(names: Declarations, buffer: FileRecord) -> bool:
    """Whether a buffer has a slice for each micro-batch of a section."""
    is_given = buffer.role in {"input", "rng"} or getattr(buffer.holds, "micro", "") == "current"
    return is_given or buffer.name == names.report("batch_loss")


def check_groups(names: Declarations, logical: Declarations) -> None:
    """Require that a step consists of the groups of micro-batches that the schedule runs."""
    count, steps = names.program.interleaved, dict(names.program.options).get("micro_steps", "1")
    is_logical = logical.program.interleaved == 1 and "micro_step" in logical.sections
    is_whole = steps.isdecimal() and int(steps) % count == 0
    is_whole &= "micro_step" in names.sections or steps == str(count)
    require(is_logical and is_whole, f"a step does not consist of groups of {count} micro-batches")


def repeated(
    names: Declarations, logical: Declarations, claims: Claims, writes: dict[str, list[Any]]
) -> dict[str, SectionCheck]:
    """Run the sections of the logical program, micro-steps as often as a section of the schedule has micro-batches."""
    check_groups(names, logical)
    earlier = logical.sections["micro_step"].body
    if "micro_step" not in names.sections:
        del logical.sections["micro_step"]
    runs: dict[str, SectionCheck] = {}
    for name in ("micro_step", "last_micro_step", "update", "evaluate", "save"):
        if name not in logical.sections:
            continue
        section, count = logical.sections[name], 1
        if name in MICRO_STEPS:
            count = names.program.interleaved
        bodies = [earlier] * (count - 1) + [section.body]
        require(len(writes[name]) == sum(map(len, bodies)), f"{name} has other ops")
        run = runs[name] = SectionCheck(
            logical, section, claims, runs.get("last_micro_step") if name == "update" else None
        )
        at = 0
        for micro_batch, body in enumerate(bodies):
            if name in MICRO_STEPS:
                _give(run, names, micro_batch)
            run.section = FileRecord("Section", {**vars(section), "body": body})
            run.run(writes[name][at : at + len(body)])
            at += len(body)
            for rank, buffer in _sliced(run):
                run.slices.setdefault((buffer.name, rank), []).append(run.tell(buffer.name, rank))
        run.section = section
        run.end()
    return runs


def _sliced(run: SectionCheck) -> Iterator[tuple[int, FileRecord]]:
    for buffer in run.names.program.buffers:
        if is_sliced(run.names, buffer):
            yield from ((rank, buffer) for rank in run.ranks)


def _give(run: SectionCheck, names: Declarations, micro_batch: int) -> None:
    """Set inputs, seeds and weights to those of a micro-batch, as the schedule has them in its slices."""
    of_content = {b.holds.name: b for b in names.program.buffers if b.role in {"input", "rng"}}
    for rank, buffer in _sliced(run):
        memory, content = run.memory[rank][buffer.name], buffer.holds
        if content.kind == "WeightContent":
            memory.write(0, buffer.numel, (("weight", ((CURRENT - micro_batch, (), 1),)), 0))
        elif content.kind == "NamedContent" and content.name in of_content:
            length = of_content[content.name].numel // names.program.interleaved
            value = ("value", f"{content.name} 0", ()), micro_batch * length
            memory.write(0, buffer.numel, value)
