"""Keep a unit's gathered parameters from their first use to their last, without a release after the forward.

For every flat of these units, the pass keeps only the first gather of a section and the last release, which
`insert-releases` then moves up to the last use. This costs the memory of the full flat from forward to backward and
saves its second all-gather. For all units, it is FSDP's ``reshard_after_forward=False``, with 2Ψ on the wire instead
of 3Ψ. Every micro-step still gathers the parameters again.

``within`` also chooses every flat between whose uses at most this number of bytes is gathered. The last units of the
forward are used again soon, so keeping them takes memory for the shortest time.

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

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.units import ALL_REPEATED, check_patterns, matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshard(Pass):
    """Keep the parameters of these units, and of those used again ``within`` this number of gathered bytes.

    Without options, keep those of all repeated units.
    """

    name: ClassVar[str] = "unshard"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.GATHERED_PER_RUN, Fact.GATHERED_AT_FIRST_USE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    units: tuple[str, ...] | None = None
    within: int | None = None

    def __post_init__(self) -> None:
        if self.units is None and self.within is None:
            object.__setattr__(self, "units", (ALL_REPEATED,))
        if self.units is not None:
            check_patterns(self.units, self.name)
        if self.within is not None and self.within < 0:
            raise UserError(
                f"The option `within` of `{self.name}` is a number of bytes, at least 0, not {self.within}."
            )

    def __call__(self, program: Program) -> Program:
        """Return the program with one gather of each of these units' flats in a section.

        Raises:
            UserError: if a pattern names no unit.
        """
        units = matching(self.units, program, self.spec()) if self.units is not None else ()
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
        if self.within is not None:
            gathered_once |= _used_again_soon(program, self.within)
        return rewrite.map_sections(program, lambda section: _rewrite(section, gathered_once))


def _used_again_soon(program: Program, most_bytes: int) -> set[str]:
    """Return gathered buffers between whose uses, in every section, at most ``most_bytes`` are gathered into others."""
    furthest: dict[str, int] = {}
    for section in program.sections:
        if section.name == UPDATE:
            continue
        gathered_bytes = 0
        at_last_use: dict[str, int] = {}
        for op in section.body:
            match op:
                case ops.AllGather():
                    own = {pair.destination.buffer for pair in op.pairs}
                    for name in own & at_last_use.keys():
                        distance = gathered_bytes - at_last_use[name]
                        furthest[name] = max(furthest.get(name, 0), distance)
                    gathered_bytes += payload_bytes(op, program)
                case ops.Alloc() | ops.Release():
                    pass
                case _:
                    names = (n for n in rewrite.used_buffers(op) if _is_gathered(n, program))
                    at_last_use.update(dict.fromkeys(names, gathered_bytes))
    return {name for name, distance in furthest.items() if distance <= most_bytes}


def _is_gathered(name: str, program: Program) -> bool:
    return program.buffer_by_name[name].role is Role.GATHERED


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
