"""Visits: temporary copies of elements where ops work, around ops whose buffers have their home in another space.

The ``space`` of a persistent buffer is its home. An op works in one space, so where the home is elsewhere, a temporary
buffer has the elements that the op uses: transfers copy the elements that it needs there, the op works on the temporary
buffer, and transfers copy changed elements back home. One visit serves a *run* of uses, which ends where an op computes
without the buffer, where an op uses another buffer that is away from home, or other elements of this one, and where an
op works on the home itself.

Visits that are live together form a *stop*. The transfers to stop n are placed ``distance`` stops or computations
ahead, so they overlap with these; the bound ``device_staging`` (or ``disk_staging``) keeps them from running further
ahead. So at most ``distance`` + 1 stops are live: with a distance of 1, staging is double-buffered. Where a section has
both visits that copy changes home and visits that do not, one more may be live, so that the latter need not wait for
the former.

No code here depends on a role or an optimizer: the transfers of a visit are derived from the effects of the ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Final

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.bounds import AheadBound, BoundKind, with_bound
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.mesh import COPY_IN, COPY_OUT, IO
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.common import rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The transfers between a home and the space in which ops work, and their streams."""

    arrival: type[ops.ToDevice] | type[ops.Load]
    departure: type[ops.ToHost] | type[ops.Store]
    inward: str
    outward: str
    bound: BoundKind

    @property
    def home(self) -> Space:
        """The space of the home."""
        return self.arrival.from_space

    @property
    def away(self) -> Space:
        """The space of the visits."""
        return self.arrival.to_space

    def arrive(self, source: Region, destination: Region) -> Op:
        """Return the transfer from home."""
        return self.arrival(source=source, destination=destination, stream=self.inward)

    def depart(self, source: Region, destination: Region) -> Op:
        """Return the transfer back home."""
        return self.departure(source=source, destination=destination, stream=self.outward)


HOST_TO_DEVICE: Final = Route(
    arrival=ops.ToDevice,
    departure=ops.ToHost,
    inward=COPY_IN,
    outward=COPY_OUT,
    bound=BoundKind.DEVICE_STAGING,
)
"""Homes in host memory, ops on the device."""

DISK_TO_HOST: Final = Route(
    arrival=ops.Load,
    departure=ops.Store,
    inward=IO,
    outward=IO,
    bound=BoundKind.DISK_STAGING,
)
"""Homes on disk; ops, and transfers to the device, use host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Elements of a home where ops work, for a run of uses.

    ``uses`` are the indices of these ops in the section, in order. The visit has ``region`` of the home; ``arriving``
    are the parts of it that the ops read before they write them, ``departing`` those that they change.
    """

    home: str
    uses: tuple[int, ...]
    region: Region
    arriving: tuple[Region, ...]
    departing: tuple[Region, ...]

    def numel(self, program: Program) -> int:
        """Return the number of elements of the visit on one rank."""
        return self.region.local_numel(program.mesh)

    def moved(self, region: Region, buffer: Buffer) -> Region:
        """Return the place of a region of the home in the buffer of the visit, which starts at element 0."""
        if not _is_plain(self.region):
            return whole(buffer)
        return replace(region, buffer=buffer.name, offset=region.offset - self.region.offset)


def with_visits(
    program: Program,
    homes: Collection[str],
    route: Route,
    *,
    distance: int = 1,
    is_at_home: Callable[[Op], bool] = lambda _: False,
    is_used_up: Callable[[Op, Region], bool] = lambda _, __: False,
) -> Program:
    """Return the program with these persistent buffers at home in another space, and visits around their users.

    The program has no waits yet. Its ops use these buffers in the space ``route.away``, in which the buffers still are,
    except those for which ``is_at_home`` is True: these use them in ``route.home``. A region for which ``is_used_up``
    is True is read by no later op, so it is not copied home. Each distinct visited region of a home has one staging
    buffer, with the role ``staging``.
    """
    if not homes:
        return program
    staging = _StagingBuffers(program, route)
    visits = {s.name: find_visits(s.body, homes, is_at_home, is_used_up) for s in program.sections}

    def with_own_visits(section: Section) -> Section:
        own = visits[section.name]
        body = place_visits(section.body, own, staging.of, route, distance=distance)
        return replace(section, body=body)

    program = rewrite.map_sections(program, with_own_visits)
    changed = {
        name: (replace(program.buffer_by_name[name], space=route.home), *staging.of_home(name))
        for name in homes
    }
    program = rewrite.replace_buffers(program, changed)
    if not any(visits.values()):
        return program
    is_mixed = any(len({bool(v.departing) for v in own}) == 2 for own in visits.values())
    stated = (
        b.ahead for b in program.bounds if isinstance(b, AheadBound) and b.kind is route.bound
    )
    bound = AheadBound(kind=route.bound, ahead=max(int(is_mixed), *stated, 0))
    return replace(
        program,
        streams=rewrite.with_streams(program.streams, {route.inward, route.outward}),
        bounds=with_bound(program.bounds, bound),
    )


class _StagingBuffers:
    """The staging buffers of a program's visits: one for each region of a home."""

    def __init__(self, program: Program, route: Route) -> None:
        self._program = program
        self._route = route
        self._taken = set(program.buffer_by_name)
        self._buffers: dict[Region, Buffer] = {}

    def of(self, visit: Visit) -> Buffer:
        """Return the buffer of a visit."""
        buffer = self._buffers.get(visit.region)
        if buffer is None:
            home = self._program.buffer_by_name[visit.home]
            buffer = self._buffers[visit.region] = Buffer(
                name=self._free_name(f"{visit.home}.{self._route.away}"),
                dtype=home.dtype,
                numel=visit.numel(self._program),
                space=self._route.away,
                role=Role.STAGING,
            )
        return buffer

    def of_home(self, name: str) -> Iterator[Buffer]:
        """Return the buffers of the visits to one home."""
        return (buffer for region, buffer in self._buffers.items() if region.buffer == name)

    def _free_name(self, stem: str) -> str:
        names = (stem if number == 0 else f"{stem}.{number}" for number in count())
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name


# ------------------------------------------------------------------------------------------------------ finding visits


def find_visits(
    body: Sequence[Op],
    homes: Collection[str],
    is_at_home: Callable[[Op], bool],
    is_used_up: Callable[[Op, Region], bool],
) -> list[Visit]:
    """Return the visits that the ops of a section need, in the order of their first uses."""
    visits: list[Visit] = []
    runs: dict[str, _RunOfUses] = {}

    def end(names: Iterable[str]) -> None:
        visits.extend(runs.pop(name).visit() for name in names)

    for index, op in enumerate(body):
        effect = effects(op)
        uses: dict[str, _UsedRegions] = {}
        for region in (*effect.reads, *effect.accumulates):
            if region.buffer in homes:
                uses.setdefault(region.buffer, _UsedRegions()).read.append(region)
        for region in (*effect.writes, *effect.accumulates):
            if region.buffer in homes:
                use = uses.setdefault(region.buffer, _UsedRegions())
                (use.used_up if is_used_up(op, region) else use.written).append(region)
        if is_at_home(op):
            end(uses.keys() & runs.keys())
            continue
        if uses or isinstance(op, ops.Compute):
            end([name for name, run in runs.items() if not run.is_continued(uses.get(name))])
        for name, use in uses.items():
            runs.setdefault(name, _RunOfUses(name)).add(index, use)
    end(list(runs))
    return sorted(visits, key=lambda visit: visit.uses[0])


@dataclass(frozen=True, slots=True)
class _UsedRegions:
    """The regions of one home that an op reads, those that it writes, and those that no later op needs."""

    read: list[Region] = field(default_factory=list)
    written: list[Region] = field(default_factory=list)
    used_up: list[Region] = field(default_factory=list)


class _RunOfUses:
    """A run of uses of one home so far."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._uses: list[int] = []
        self._regions: dict[Region, None] = {}
        self._arriving: dict[Region, None] = {}
        self._written: dict[Region, None] = {}

    def is_continued(self, use: _UsedRegions | None) -> bool:
        """Return whether the run continues with an op: it uses elements that the run has used."""
        return use is not None and any(
            _overlap(region, used) for region in (*use.read, *use.written) for used in self._regions
        )

    def add(self, index: int, use: _UsedRegions) -> None:
        """Add an op, which reads before it writes."""
        self._uses.append(index)
        for region in use.read:
            self._regions[region] = None
            if not any(_covers(written, region) for written in self._written):
                self._arriving[region] = None
        for region in use.used_up:
            for written in [each for each in self._written if _overlap(each, region)]:
                del self._written[written]
        for region in use.written:
            self._regions[region] = None
            self._written[region] = None

    def visit(self) -> Visit:
        """Return the visit that serves the run."""
        arriving = (_hull(self._arriving),) if self._arriving else ()
        departing = _merged(self._written)
        if len({_is_plain(region) for region in departing}) > 1:
            # Slices and other parts together: the elements between them must be copied home as well.
            arriving = departing = (_hull(self._regions),)
        return Visit(
            home=self._home,
            uses=tuple(self._uses),
            region=_hull(self._regions),
            arriving=arriving,
            departing=departing,
        )


def _is_plain(region: Region) -> bool:
    """Return whether a region is neither a slice nor a part of one."""
    return region.shard is None and region.part is None


def _overlap(first: Region, second: Region) -> bool:
    """Return whether two regions have common elements on one rank; parts of the same slice are compared exactly."""
    is_same_slice = replace(first, part=None) == replace(second, part=None)
    if is_same_slice and first.part is not None and second.part is not None:
        return first.part[0] < second.part[1] and second.part[0] < first.part[1]
    return first.overlaps(second)


def _covers(outer: Region, inner: Region) -> bool:
    """Return whether one region has all elements of another of the same buffer, on every rank."""
    return outer == inner or (
        _is_plain(outer) and outer.offset <= inner.offset and inner.stop <= outer.stop
    )


def _hull(regions: Collection[Region]) -> Region:
    """Return the smallest region with the elements of all of them.

    A slice if there is only one region, otherwise plain.
    """
    first, *others = regions
    if not others:
        return first
    start = min(region.offset for region in regions)
    stop = max(region.stop for region in regions)
    return Region(buffer=first.buffer, offset=start, numel=stop - start)


def _merged(regions: Collection[Region]) -> tuple[Region, ...]:
    """Return regions with exactly these elements; adjacent and overlapping ones are merged."""
    merged: list[Region] = []
    for region in sorted(filter(_is_plain, regions), key=lambda r: r.offset):
        if merged and region.offset <= merged[-1].stop:
            merged[-1] = _hull((merged[-1], region))
        else:
            merged.append(region)
    slices = [r for r in regions if not (_is_plain(r) or any(_covers(m, r) for m in merged))]
    return (*merged, *slices)


# ------------------------------------------------------------------------------------------------------ placing visits


def place_visits(
    body: Sequence[Op],
    visits: Sequence[Visit],
    staging: Callable[[Visit], Buffer],
    route: Route,
    *,
    distance: int = 1,
) -> tuple[Op, ...]:
    """Return the ops of a section on the staging buffers of their visits, with these begun, filled, emptied and ended.

    ``visits`` are in the order of their first uses. Two visits with equal names of staging buffers follow one another.
    """
    buffers = [staging(visit) for visit in visits]
    before: dict[int, list[Op]] = {}
    after: dict[int, list[Op]] = {}
    moved: dict[int, dict[str, tuple[Visit, Buffer]]] = {}
    places = _places(body, visits, [buffer.name for buffer in buffers], distance)
    for visit, buffer, place in zip(visits, buffers, places, strict=True):
        for index in visit.uses:
            moved.setdefault(index, {})[visit.home] = visit, buffer
        begin = before.setdefault(place, [])
        begin.append(ops.Alloc(buffer=buffer.name, stream=route.inward))
        begin += [route.arrive(region, visit.moved(region, buffer)) for region in visit.arriving]
        end = after.setdefault(visit.uses[-1], [])
        end += [route.depart(visit.moved(region, buffer), region) for region in visit.departing]
        stream = route.outward if visit.departing else effects(body[visit.uses[-1]]).stream
        end.append(ops.Release(buffer=buffer.name, stream=stream))
    visiting = [
        _on_staging(op, moved[index]) if index in moved else op for index, op in enumerate(body)
    ]
    return rewrite.insert(visiting, before=before, after=after)


def _on_staging(op: Op, moved: Mapping[str, tuple[Visit, Buffer]]) -> Op:
    def change(region: Region) -> Region:
        if region.buffer not in moved:
            return region
        visit, buffer = moved[region.buffer]
        return visit.moved(region, buffer)

    return rewrite.map_regions(op, change)


def _places(
    body: Sequence[Op], visits: Sequence[Visit], names: Sequence[str], distance: int
) -> list[int]:
    """Return the op before which each visit begins: ``distance`` stops or computations ahead, or as far as possible."""
    stops = _stops(visits)
    anchors = _anchors(body, stops)
    earliest = _earliest_places(body, visits, names)
    places: list[int] = []
    place = 0
    for stop in stops:
        anchor = bisect_left(anchors, stop.start) - distance
        place = max(place, anchors[anchor] if anchor >= 0 else 0)
        first = len(places)
        # Never before the home has the elements, or the buffer's earlier visit has ended, and in the order of use.
        possible = list(accumulate(earliest[first : first + stop.visits], max, initial=place))[1:]
        place = possible[-1]
        # All begin together, except those used before another one's elements are at home: they begin alone.
        for visit, own in zip(visits[first : first + stop.visits], possible, strict=True):
            places.append(place if place <= visit.uses[0] else own)
    return places


@dataclass(slots=True)
class _Stop:
    """How many consecutive visits are live together, and the first and the last op that uses any of them."""

    start: int
    last: int
    visits: int


def _stops(visits: Sequence[Visit]) -> list[_Stop]:
    stops: list[_Stop] = []
    for visit in visits:
        start, last = visit.uses[0], visit.uses[-1]
        if stops and start <= stops[-1].last:
            stops[-1].visits += 1
            stops[-1].last = max(stops[-1].last, last)
        else:
            stops.append(_Stop(start, last, 1))
    return stops


_Working = ops.Compute | ops.Direction | ops.OptimizerStep
"""Ops that take long enough for a transfer to overlap with them."""


def _anchors(body: Sequence[Op], stops: Sequence[_Stop]) -> list[int]:
    """Return the first op of each stop, and the ops outside stops that take long, in order."""
    inside = {index for stop in stops for index in range(stop.start, stop.last + 1)}
    working = (index for index, op in enumerate(body) if isinstance(op, _Working))
    return sorted({stop.start for stop in stops}.union(i for i in working if i not in inside))


def _earliest_places(
    body: Sequence[Op], visits: Sequence[Visit], names: Sequence[str]
) -> list[int]:
    """Return for each visit one past the last op that it must follow, which changes its elements or uses its buffer."""
    uses = {(index, visit.home) for visit in visits for index in visit.uses}
    homes = {visit.home for visit in visits}
    changes: dict[str, list[tuple[int, Region]]] = {home: [] for home in homes}
    for index, op in enumerate(body):
        effect = effects(op)
        for region in (*effect.writes, *effect.accumulates):
            if region.buffer in homes and (index, region.buffer) not in uses:
                changes[region.buffer].append((index, region))
    for visit in visits:
        changes[visit.home] += [(visit.uses[-1], region) for region in visit.departing]
    ends: dict[str, int] = {}
    earliest: list[int] = []
    for visit, name in zip(visits, names, strict=True):
        place = ends.get(name, 0)
        for index, region in changes[visit.home]:
            is_earlier = place <= index < visit.uses[0]
            if is_earlier and any(_overlap(region, arriving) for arriving in visit.arriving):
                place = index + 1
        earliest.append(place)
        ends[name] = visit.uses[-1] + 1
    return earliest
