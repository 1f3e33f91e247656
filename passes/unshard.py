"""Keep a unit's gathered parameters from their first use to their last: no release after the forward, no second gather.

For every flat of these units, the pass keeps only the first gather of a section and the last release, which
`insert-releases` then moves up to the last use. This costs the memory of the full flat from forward to backward and
saves its second all-gather. For all units, it is FSDP's ``reshard_after_forward=False``, with 2Ψ on the wire instead
of 3Ψ. Every micro-step still gathers the parameters again.

What ``unshard{units=a}`` changes::

      fill %a.grad_full[128:512] = 0.0  stream=compute
    - !3 = release %a.full  stream=compute
    - wait !3  on=gather
    - alloc %a.full  stream=gather
    - !4 = all_gather %a.param -> %a.full  comm=gather stream=gather
    - wait !4  on=compute
    - !5 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
    + !3 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.units import ALL_REPEATED, check_patterns, matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshard(Pass):
    """Keep the parameters of these units, by default of all repeated ones, once they are gathered."""

    name: ClassVar[str] = "unshard"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.GATHERED_PER_RUN, Fact.GATHERED_AT_FIRST_USE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    units: tuple[str, ...] = (ALL_REPEATED,)

    def __post_init__(self) -> None:
        check_patterns(self.units, self.name)

    def __call__(self, program: Program) -> Program:
        """The program with one gather of each of these units' flats in a section.

        Raises:
            UserError: where a pattern names no unit.
        """
        units = matching(self.units, program, self.spec())
        params = rewrite.param_buffers(program)
        gathered_once = {
            pair.destination.buffer
            for op in program.ops()
            if isinstance(op, ops.AllGather)
            for pair in op.pairs
            if program.buffer_by_name[pair.destination.buffer].role is Role.GATHERED
            and pair.source.buffer in params
            and params[pair.source.buffer].unit in units
        }
        return rewrite.map_sections(program, lambda section: _rewrite(section, gathered_once))


def _rewrite(section: Section, gathered_once: set[str]) -> Section:
    if section.name == UPDATE:
        return section
    return replace(section, body=tuple(_ops(section, gathered_once)))


def _ops(section: Section, gathered_once: set[str]) -> Iterator[Op]:
    last_release = {
        op.buffer: index
        for index, op in enumerate(section.body)
        if isinstance(op, ops.Release) and op.buffer in gathered_once
    }
    begun: set[str] = set()
    gathered: set[str] = set()
    for index, op in enumerate(section.body):
        match op:
            case ops.Alloc() if op.buffer in begun:
                continue
            case ops.Alloc() if op.buffer in gathered_once:
                begun.add(op.buffer)
                yield op
            case ops.Release() if last_release.get(op.buffer, index) != index:
                continue
            case ops.AllGather():
                pairs = tuple(p for p in op.pairs if p.destination.buffer not in gathered)
                gathered.update(
                    p.destination.buffer for p in pairs if p.destination.buffer in gathered_once
                )
                if pairs:
                    yield replace(op, pairs=pairs)
            case _:
                yield op
