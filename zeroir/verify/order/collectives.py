"""Collectives agree between ranks: every rank issues the same sequence, with sizes that fit the axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, assert_never

from zeroir.ir import ops
from zeroir.ir.program import Program, Section
from zeroir.verify.context import Findings, spell, title


class LaunchSignature(NamedTuple):
    """One collective as one rank issues it; its peers must issue an equal one."""

    kind: str
    comm: str
    pairs: tuple[tuple[int, int, str], ...]
    detail: str


def launches(program: Program, section: Section) -> list[LaunchSignature]:
    """Return the collectives of a section in issue order.

    Regions have equal local sizes, so ranks issue the same ones.
    """
    return [_launch(program, op) for op in section.body if isinstance(op, ops.Collective)]


def _launch(program: Program, op: ops.CollectiveOp) -> LaunchSignature:
    kind, detail = title(op), ""
    match op:
        case ops.Gather():
            # A prefetch on one rank may meet an all-gather on another.
            kind = "all_gather"
        case ops.ReduceScatter() | ops.AllReduce():
            detail = str(op.reduction)
        case ops.Broadcast():
            detail = f"root {op.root}"
        case _:
            assert_never(op)
    pairs = tuple(
        (
            pair.source.local_numel(program.mesh),
            pair.destination.local_numel(program.mesh),
            str(op.wire_dtype or program.buffer_by_name[pair.source.buffer].dtype),
        )
        for pair in op.pairs
    )
    return LaunchSignature(kind, op.comm, pairs, detail)


def check_collectives(program: Program, findings: Findings) -> None:
    """Check that each collective fits its axis: then every group of ranks agrees on it."""
    for section in program.sections:
        for line, op in enumerate(section.body):
            if not isinstance(op, ops.Collective):
                continue
            comm = program.comm_by_name[op.comm]
            sentence = _misfit(program, op, comm.ranks or program.mesh.size(comm.axis))
            if sentence is not None:
                findings.add("Z201", sentence, section=section, line=line)


def _misfit(program: Program, op: ops.CollectiveOp, size: int) -> str | None:
    if isinstance(op, ops.Broadcast) and not 0 <= op.root < size:
        return f"broadcast from rank {op.root} of an axis that has {size}"
    for pair in op.pairs:
        source = pair.source.local_numel(program.mesh)
        destination = pair.destination.local_numel(program.mesh)
        match op:
            case ops.Gather():
                wanted = source * size
            case ops.ReduceScatter():
                wanted = source // size if source % size == 0 else -1
            case _:
                wanted = source
        if destination != wanted:
            return (
                f"{title(op)} over {size} ranks takes {spell(pair.source, program)} of {source} elements "
                f"to {spell(pair.destination, program)} of {destination}"
            )
    return None


def compare_jobs(programs: Sequence[Program], findings: Findings) -> None:
    """Check that programs that run as one job issue the same collectives."""
    first = programs[0]
    for number, program in enumerate(programs[1:], start=1):
        for sentence in _differences(first, program, f"program {number}"):
            findings.add("Z201", sentence)


def _differences(first: Program, program: Program, name: str) -> Iterator[str]:
    """Yield the differences of a program from the first one, program 0."""
    if program.mesh != first.mesh or program.comms != first.comms:
        yield f"{name} has another mesh or other communicators than program 0"
        return
    if [s.name for s in program.sections] != [s.name for s in first.sections]:
        yield f"{name} has other sections than program 0"
        return
    counts = [p.option.get("micro_steps", "1") for p in (first, program)]
    if counts[0] != counts[1]:
        yield f"{name} takes {counts[1]} micro-steps a step, program 0 takes {counts[0]}"
        return
    for first_section, section in zip(first.sections, program.sections, strict=True):
        first_launches, own_launches = launches(first, first_section), launches(program, section)
        where = section.name
        for at, (a, b) in enumerate(zip(first_launches, own_launches, strict=False)):
            if a != b:
                yield (
                    f"collective {at} of {where} is {a.kind} on {a.comm} {list(a.pairs)} in program 0 "
                    f"and {b.kind} on {b.comm} {list(b.pairs)} in {name}"
                )
                break
        else:
            counts_here = (len(first_launches), len(own_launches))
            if counts_here[0] != counts_here[1]:
                yield f"{where} has {counts_here[0]} collectives in program 0 and {counts_here[1]} in {name}"
