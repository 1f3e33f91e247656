"""Issue each gather ``distance`` units ahead of its use, and never further, in the forward and in the backward.

What one compute op is the first to read is gathered together, as a group. The gathers of group g + ``distance`` are
issued before the first use of group g, under the name ``prefetch``, and so run while g computes. The bound
``full_parameters ahead=0`` makes the stream of gathers keep to that order: it begins a group only once all groups that
are released above it have ended. However slow the compute stream is, at most ``distance`` + 1 groups are live.
``distance=0`` gathers nothing ahead and still holds the gather stream back. Buffers of a bucket belong to the group of
the one that is read first.

With ``prefetch{budget=BYTES}`` no distance is fixed: each gather is issued as early as the device memory that buffers
take stays within the budget (see ``gather_early``). It then stands after all passes that take memory. The bound
``full_parameters behind=compute`` makes a gather wait for the op of the compute stream behind which it was put.

What ``prefetch{distance=1}`` changes::

    + bound full_parameters ahead=0
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

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir.bounds import AheadBound, BehindBound, BoundKind, with_bound
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.gather_early import as_early_as_fits
from zeroir.passes.common.gather_groups import ahead, find_groups
from zeroir.passes.common.order import derive_waits

_DEFAULT_DISTANCE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchGathers(Pass):
    """Gather ``distance`` groups ahead, by default 1, or as early as a ``budget`` of device memory in bytes allows."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.RELEASED_AFTER_LAST_USE, Fact.GATHERED_AT_FIRST_USE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_AT_FIRST_USE})

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
        """The program with its gathers issued ahead, and the bound that holds them back."""
        kind = BoundKind.FULL_PARAMETERS
        in_order = with_bound(program.bounds, AheadBound(kind=kind, ahead=0))
        if self.distance is not None:
            return replace(_at_distance(program, self.distance), bounds=in_order)
        assert self.budget is not None  # One of the two is given.
        # How much is live depends on how far streams run ahead, so on waits.
        at_first_use = derive_waits(replace(_at_distance(program, 0), bounds=in_order))
        behind = with_bound(program.bounds, BehindBound(kind=kind, behind=COMPUTE))
        return replace(as_early_as_fits(at_first_use, self.budget), bounds=behind)


def _at_distance(program: Program, distance: int) -> Program:
    return rewrite.map_sections(program, lambda section: _moved(section, program, distance))


def _moved(section: Section, program: Program, distance: int) -> Section:
    body = section.body
    groups = find_groups(body, program)
    before: dict[int, list[Op]] = {}
    at = 0
    for number, group in enumerate(groups):
        target = groups[max(number - distance, 0)].first_use
        # Never before an earlier life of the same buffer has ended, and always in the order of use.
        at = max(at, target, *(gather.earliest for gather in group.gathers))
        for gather in group.gathers:
            issued = gather.op if at == group.first_use else ahead(gather.op)
            before.setdefault(at, []).extend((*(body[alloc] for alloc in gather.allocs), issued))
    moved = {i for group in groups for g in group.gathers for i in (*g.allocs, g.index)}
    return replace(section, body=rewrite.insert(body, before=before, without=moved))
