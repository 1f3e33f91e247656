"""Merge neighbouring small collectives: one launch moves several (source, destination) pairs.

A launch costs a latency that grows with the number of ranks and not with its size: units that are small, or small once
cut for many ranks, are better moved together. Blocks of megabytes are not, because a merged launch overlaps less
computation and needs more memory at once; so nothing is merged by default. Neighbouring collectives of one communicator
in a section become one launch where they move at most ``bytes`` bytes together (of the full buffers, in the dtype that
is sent); larger ones stay alone. ``gathers`` is another limit for all-gathers. Bytes on the wire and results stay the
same.

A gather moves up to the previous one, with its allocs, unless its buffer's previous life ends only after the unit
before the bucket has been gathered: the bucket would have to wait for it and start too late. Other collectives, whose
sources are complete only there, move down to the one after them, and with them the ops of their stream that depend on
them: releases, and sums over micro-steps. No op is moved across an op with which it conflicts.

A bound counts a bucket as one unit. So with ``bound-gradients{live}`` at most ``live`` buckets of full gradients are
live, whether it runs before or after this pass, and with a later ``prefetch{distance}`` at most distance + 1 buckets of
gathered parameters. None is larger than the largest unit and ``bytes`` together.

What ``bucket{bytes=4096}`` changes::

      alloc %a.full  stream=gather
    + alloc %b.full  stream=gather
    - !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
    + !0 = all_gather %a.param -> %a.full, %b.param -> %b.full  comm=gather stream=gather
    - alloc %b.full  stream=gather
    - !2 = all_gather %b.param -> %b.full  comm=gather stream=gather
    - wait !2  on=compute
    - reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
    - release %b.grad_full  stream=reduce
    - reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + reduce_scatter %b.grad_full -> %b.grad, %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + release %b.grad_full  stream=reduce
      release %a.grad_full  stream=reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched

_Mergeable = ops.AllGather | ops.ReduceScatter | ops.AllReduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(Pass):
    """Merge neighbouring collectives of at most ``bytes`` bytes together, gathers of at most ``gathers`` if given."""

    name: ClassVar[str] = "bucket"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.GRADIENTS_REDUCED, Fact.GATHERED_AT_FIRST_USE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    bytes: int
    gathers: int | None = None

    def __post_init__(self) -> None:
        for option, value in (("bytes", self.bytes), ("gathers", self.gathers)):
            if value is not None and value < 0:
                raise UserError(
                    f"The option `{option}` of `{self.name}` is a number of bytes, at least 0, not {value}."
                )

    def __call__(self, program: Program) -> Program:
        """Return the program with its small collectives merged."""
        return rewrite.map_sections(program, lambda section: self._rewrite(section, program))

    def _rewrite(self, section: Section, program: Program) -> Section:
        pending = {p.event for p in section.exit.pending}
        body = section.body
        for comm in program.comms:
            body = self._merge(body, comm.name, pending, program)
        return replace(section, body=body)

    def _merge(
        self, body: tuple[Op, ...], comm: str, pending: set[str], program: Program
    ) -> tuple[Op, ...]:
        """Return the body with the collectives of one communicator merged into the previous one where possible."""
        last: int | None = None
        # the places of the last collective of this bucket and of the one before
        place = before = -1
        index = 0
        while index < len(body):
            op = body[index]
            if isinstance(op, _Mergeable) and op.comm == comm and op.event not in pending:
                merged = (
                    None if last is None else self._merged(body, (before, last, index), program)
                )
                if merged is None:
                    before, place, last = place, index, index
                else:
                    place = index
                    body, last = merged
                    index = last
            elif isinstance(op, ops.Collective) and op.comm == comm:
                last = None
            index += 1
        return body

    def _merged(
        self, body: tuple[Op, ...], places: tuple[int, int, int], program: Program
    ) -> tuple[tuple[Op, ...], int] | None:
        """Return the body with two collectives merged, and the place of the result; None if they must stay separate.

        ``places`` are those of the collective before both, of the first and of the second.
        """
        before, first, second = places
        merged = _as_one(body[first], body[second])
        if merged is None or payload_bytes(merged, program) > self._most_bytes(merged):
            return None
        moved = None
        if not _ends_a_life(body[before + 1 : first], body[second]):
            moved = _earlier(body, first, second, merged, program)
        return moved or _later(body, first, second, merged, program)

    def _most_bytes(self, op: _Mergeable) -> int:
        is_other = isinstance(op, ops.AllGather) and self.gathers is not None
        return (self.gathers or 0) if is_other else self.bytes


def _as_one(first: Op, second: Op) -> _Mergeable | None:
    """Return both collectives as one launch, if they differ only in their pairs."""
    if not (isinstance(first, _Mergeable) and isinstance(second, _Mergeable)):
        return None
    merged = replace(first, pairs=(*first.pairs, *second.pairs), event=None)
    is_alike = replace(second, pairs=merged.pairs, event=None) == merged
    return merged if is_alike and merged.staging is None else None


def _ends_a_life(body: Sequence[Op], gather: Op) -> bool:
    """Return whether one of these ops releases a gathered buffer: the bucket would wait for it and start too late."""
    return any(
        isinstance(op, ops.Release) and op.buffer in rewrite.used_buffers(gather) for op in body
    )


def _earlier(
    body: Sequence[Op], first: int, second: int, merged: _Mergeable, program: Program
) -> tuple[tuple[Op, ...], int] | None:
    """Return the body with the second collective and its allocs moved up to the first; None if impossible."""
    moving = Touched(program)
    moving.add(body[second], second)
    allocs: list[int] = []
    for index in range(second - 1, first - 1, -1):
        op = body[index]
        if isinstance(op, ops.Wait):
            return None
        if moving.is_against(op):
            if not isinstance(op, ops.Alloc) or op.stream != merged.stream or index == first:
                return None
            allocs.append(index)
            moving.add(op, index)
    moved = {*allocs, second}
    rest = [op for index, op in enumerate(body) if index > first and index not in moved]
    begun = (body[index] for index in sorted(allocs))
    return (*body[:first], *begun, merged, *rest), first + len(allocs)


def _later(
    body: Sequence[Op], first: int, second: int, merged: _Mergeable, program: Program
) -> tuple[tuple[Op, ...], int] | None:
    """Return the body with the first collective moved down to the second, and its dependents after it.

    None if impossible.
    """
    moving = Touched(program)
    moving.add(body[first], first)
    after: list[int] = []
    for index in range(first + 1, second + 1):
        op = body[index]
        if isinstance(op, ops.Wait):
            return None
        if moving.is_against(op):
            if op.stream != merged.stream or index == second:
                return None
            after.append(index)
            moving.add(op, index)
    moved = {first, *after}
    above = [op for index, op in enumerate(body[:second]) if index not in moved]
    below = (body[index] for index in after)
    return (*above, merged, *below, *body[second + 1 :]), len(above)
