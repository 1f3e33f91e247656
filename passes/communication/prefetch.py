"""Issue each gather ``distance`` units ahead of its use, and never further, in the forward and in the backward.

The parameters that one compute op is the first to read form a group. The gathers of group g + ``distance`` are issued
before the first use of group g, under the name ``prefetch``, and so run while g computes. The bound ``full_parameters
ahead=0`` enforces that order on the gather stream: it starts a group only once all groups that are released above it
have ended. However slow the compute stream is, at most ``distance`` + 1 groups are live. ``distance=0`` gathers nothing
ahead and still limits the gather stream. Buffers of a bucket belong to the group of the one that is read first.

With ``prefetch{bytes=BYTES}`` the distance varies: group g is gathered before the first use of the earliest group after
which at most this number of bytes is gathered up to g. A group that is larger is gathered at its first use.

With ``prefetch{budget=BYTES}`` there is no fixed distance: each gather is issued as early as possible while the memory
of buffers on the device stays within the budget (``gather_early``). It must then run after all passes that need memory.
The bound ``full_parameters behind=compute`` makes a gather wait for the op of the compute stream after which it was
placed.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.bounds import AheadBound, BehindBound, Bound, BoundKind, with_bound
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.gather_early import as_early_as_fits
from zeroir.passes.common.gather_groups import GatherGroup, ahead, find_groups
from zeroir.passes.common.order import derive_waits

_DEFAULT_DISTANCE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchGathers(Pass):
    """Gather ``distance`` groups ahead, by default 1, at most ``bytes`` ahead, or as early as a ``budget`` allows.

    ``bytes`` counts the full buffers that are gathered ahead; ``budget`` is the device memory, in bytes.
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.RELEASED_AFTER_LAST_USE, Fact.GATHERED_AT_FIRST_USE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_AT_FIRST_USE})

    distance: int | None = None
    budget: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        units = {"distance": "units", "budget": "bytes", "bytes": "bytes"}
        given = {name: value for name in units if (value := getattr(self, name)) is not None}
        if not given:
            object.__setattr__(self, "distance", _DEFAULT_DISTANCE)
        if len(given) > 1:
            raise UserError(
                f"The pass `{self.name}` takes a distance, bytes or a budget, not {' and '.join(given)}; leave "
                "one of them out."
            )
        for option, value in given.items():
            if value < 0:
                raise UserError(
                    f"The option `{option}` of `{self.name}` is a number of {units[option]}, at least 0, not {value}."
                )

    def __call__(self, program: Program) -> Program:
        """Return the program with its gathers issued ahead, and the bound that limits them."""
        kind = BoundKind.FULL_PARAMETERS
        bounds = _with_room_for_arrivals(program.bounds)
        in_order = with_bound(bounds, AheadBound(kind=kind, ahead=0))
        if self.distance is not None:
            return replace(_at_distance(program, self.distance), bounds=in_order)
        if self.bytes is not None:
            return replace(_within_bytes(program, self.bytes), bounds=in_order)
        assert self.budget is not None  # exactly one of the two is given
        # The live memory depends on how far streams run ahead, and so on waits.
        at_first_use = derive_waits(replace(_at_distance(program, 0), bounds=in_order))
        behind = with_bound(bounds, BehindBound(kind=kind, behind=COMPUTE))
        return replace(as_early_as_fits(at_first_use, self.budget), bounds=behind)


def _with_room_for_arrivals(bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
    """Return the bounds that allow the shard of a gather to arrive while the previous gather reads its own.

    A gather moves together with the visit that it reads, which then does not begin before the previous one has ended.
    """
    for bound in bounds:
        if bound == AheadBound(kind=BoundKind.DEVICE_STAGING, ahead=0):
            return with_bound(bounds, AheadBound(kind=BoundKind.DEVICE_STAGING, ahead=1))
    return bounds


def _at_distance(program: Program, distance: int) -> Program:
    def issued_with(groups: Sequence[GatherGroup]) -> list[int]:
        return [max(number - distance, 0) for number in range(len(groups))]

    return rewrite.map_sections(program, lambda section: _moved(section, program, issued_with))


def _within_bytes(program: Program, most_bytes: int) -> Program:
    def issued_with(groups: Sequence[GatherGroup]) -> list[int]:
        sizes = [sum(payload_bytes(g.op, program) for g in group.gathers) for group in groups]
        earliest, ahead_bytes, targets = 0, 0, []
        for number, size in enumerate(sizes):
            ahead_bytes += size if number else 0
            while earliest < number and ahead_bytes > most_bytes:
                earliest += 1
                ahead_bytes -= sizes[earliest]
            targets.append(earliest)
        return targets

    return rewrite.map_sections(program, lambda section: _moved(section, program, issued_with))


def _moved(
    section: Section, program: Program, issued_with: Callable[[Sequence[GatherGroup]], list[int]]
) -> Section:
    """Return the section with each group issued before the first use of its group number in ``issued_with``."""
    body = section.body
    groups = find_groups(body, program)
    before: dict[int, list[Op]] = {}
    at = 0
    for group, target in zip(groups, issued_with(groups), strict=True):
        # Never before an earlier life of the same buffer has ended, and always in the order of use.
        at = max(at, groups[target].first_use, *(gather.earliest for gather in group.gathers))
        for gather in group.gathers:
            issued = gather.op if at == group.first_use else ahead(gather.op)
            before.setdefault(at, []).extend(gather.issued(body, issued))
    moved = {i for group in groups for gather in group.gathers for i in gather.indices}
    return replace(section, body=rewrite.insert(body, before=before, without=moved))
