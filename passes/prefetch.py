"""Issue each gather ``distance`` units ahead of its use, and never further, in the forward and in the backward.

What one compute op is the first to read is gathered together: a *wave*. Before the first op of wave w runs, wave
w + distance is gathered, under the name ``prefetch``, while w computes. That gather first waits for the release of
wave w − 1, so that however slow the compute stream is, at most distance + 1 waves are live. ``distance=0`` gathers
nothing ahead and still holds the gather stream back. A bucket belongs to the wave of what is first read of it.

With ``prefetch{budget=BYTES}`` no distance is fixed: each gather is issued as early as the device memory that buffers
take stays within the budget (``early``). It then stands after all passes that take memory, whose waits it keeps.

What ``prefetch{distance=1}`` changes::

      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
    + alloc %b.full  stream=gather
    + !1 = prefetch %b.param -> %b.full  comm=gather stream=gather
      wait !0  on=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
    + !2 = release %a.full  stream=compute
    + wait !2  on=gather
    - alloc %b.full  stream=gather
    - !2 = all_gather %b.param -> %b.full  comm=gather stream=gather
    - wait !2  on=compute
    + wait !1  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.base import Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.gather_early import as_early_as_fits
from zeroir.passes.common.gather_groups import Wave, ahead, find_waves, without_gather_waits
from zeroir.passes.common.order import synchronise, unordered

_DEFAULT_DISTANCE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Pass):
    """Gather ``distance`` waves ahead, 1 by default, or as early as a ``budget`` of device memory, in bytes, allows."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED_AFTER_LAST_USE})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_AHEAD})

    distance: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.distance is None and self.budget is None:
            object.__setattr__(self, "distance", _DEFAULT_DISTANCE)
        if self.distance is not None and self.budget is not None:
            raise UserError(
                f"The pass `{self.name}` takes a distance or a budget, not both; leave one of them out."
            )
        if self.distance is not None and self.distance < 0:
            raise UserError(
                f"The option `distance` of `{self.name}` is a number of units, at least 0, not {self.distance}."
            )
        if self.budget is not None and self.budget < 0:
            raise UserError(
                f"The option `budget` of `{self.name}` is a number of bytes, at least 0, not {self.budget}."
            )

    def __call__(self, program: Program) -> Program:
        """The program with its gathers issued ahead."""
        if self.distance is not None:
            return _at_distance(unordered(program), self.distance)
        assert self.budget is not None  # One of the two is given.
        # Other waits bound what others take.
        held_back = _at_distance(rewrite.map_sections(program, without_gather_waits), 0)
        return as_early_as_fits(held_back, self.budget)


def _at_distance(program: Program, distance: int) -> Program:
    return synchronise(
        rewrite.map_sections(program, lambda section: _moved(section, program, distance))
    )


def _moved(section: Section, program: Program, distance: int) -> Section:
    body = list(section.body)
    waves = find_waves(body, program)
    before: dict[int, list[Op]] = {}
    at = 0
    for number, wave in enumerate(waves):
        target = waves[max(number - distance, 0)].first_use
        # Never before an earlier life of the same buffer has ended, and always in the order of use.
        at = max(at, target, *(gather.earliest for gather in wave.gathers))
        found = before.setdefault(at, [])
        if number > distance:
            found.extend(_holding_back(body, waves[number - distance - 1], wave.stream, at))
        for gather in wave.gathers:
            found.extend(body[alloc] for alloc in gather.allocs)
            found.append(gather.op if at == wave.first_use else ahead(gather.op))
    moved = {i for wave in waves for g in wave.gathers for i in (*g.allocs, g.index)}
    left: list[Op] = []
    for index, op in enumerate(body):
        left.extend(before.get(index, ()))
        if index not in moved:
            left.append(op)
    return replace(section, body=tuple(left))


def _holding_back(body: list[Op], wave: Wave, stream: str, at: int) -> Sequence[Op]:
    """Waits of a stream for the releases of a wave before ``at``; these signal from now on."""
    found: list[Op] = []
    for release in wave.releases:
        if release < at:
            body[release], event = rewrite.signalling(body[release], release)
            found.append(ops.Wait(waited=event, on=stream))
    return found
