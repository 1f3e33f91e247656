"""Keep optimizer states in host memory as pages, which are copied to a few slots on the device for their update.

A *page* has the same elements of all states of one flat, at most ``page_bytes`` of them together, so that the update of
these elements needs only one page. The step of each flat becomes one step per page: the page comes in on ``copy_in``,
the step changes it, and it goes out on ``copy_out``. The slots take turns. With three of them, one page comes in and
one goes out while a third is updated; with two, a page comes in while the one before it is updated and goes out. Their
number is a bound of the program (``bound pages live=N``). There are no page faults at run time.

``device_bytes`` is the device memory for the states. The part that the slots do not need has pages that rest there.
Every step uses each page once, in one order, so the page that was just used is the one whose next use is furthest.
Belady's rule (Belady 1966, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
5(2)) therefore evicts the newest page and keeps the others: of N pages, a memory for C of them misses N (N - C) / (N -
1) per step on average, and no replacement policy misses fewer. Here a memory for R pages, in addition to the slots,
lets N - R pages come in per step: no more than Belady's rule with a memory for R pages, and at most one more than with
R + 1, where the page in use counts. LRU misses all N as soon as C < N. The pages that rest on the device are those that
are updated last, when no backward is left to overlap their transfers.

Only states that the optimizer keeps for each element are paged, as in QLoRA's paged optimizers (Dettmers et al. 2023,
section 3). Parameters, master weights, averages and the moments of whole parameters are not paged. The first pages come
in at the start of ``update``, overlapping with the norm; where the update is in the backward, before its first step.

What ``page-optimizer{device_bytes=2048, page_bytes=1024}`` changes::

    + bound pages live=2
    - buffer %a.momentum_buffer : f32[512] device state = momentum_buffer a
    + buffer %a.momentum_buffer : f32[512] host state = momentum_buffer a
    + buffer %page.0 : f32[256] device page
      section update {
    + alloc %page.0  stream=copy_in
    + !0 = to_device %a.momentum_buffer[0:256] -> %page.0  stream=copy_in
    + alloc %page.1  stream=copy_in
    + !1 = to_device %a.momentum_buffer[256:512] -> %page.1  stream=copy_in
    - optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
    + !2 = optimizer_step momentum param=%a.param[0:256] grad=%a.grad[0:256] states=(%page.0) …
    + wait !2  on=copy_out
    + to_host %page.0 -> %a.momentum_buffer[0:256]  stream=copy_out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import ClassVar, Final, TypeGuard, assert_never

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.bounds import BoundKind, LiveBound, with_bound
from zeroir.ir.buffers import Buffer, Region, Role, Space, part_of, whole
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import round_up
from zeroir.ir.mesh import COPY_IN, COPY_OUT
from zeroir.ir.ops import Op
from zeroir.ir.program import (
    SHARD_ALIGNMENT_NUMEL,
    STEP_SECTIONS,
    UPDATE,
    Holding,
    Program,
    Section,
    State,
)
from zeroir.passes.base import NO_FACTS, Fact, Pass, listed
from zeroir.passes.common import rewrite
from zeroir.passes.common.paged_states import PagedStates, StepStates

_Step = ops.Direction | ops.OptimizerStep
_LEAST_SLOTS: Final = 2
_MOST_SLOTS: Final = 3
"""One slot each for the page that comes in, the page that is updated, and the page that goes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptimizer(Pass):
    """Keep optimizer states in pages in host memory. Nothing changes if all states fit into ``device_bytes``."""

    name: ClassVar[str] = "page-optimizer"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.GRADIENTS_REDUCED, Fact.UNSAVED, Fact.STATES_ON_DEVICE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.STATES_ON_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    device_bytes: int
    page_bytes: int = 2 * 1024**2

    def __post_init__(self) -> None:
        for option, amount in (
            ("device_bytes", self.device_bytes),
            ("page_bytes", self.page_bytes),
        ):
            if amount < 0:
                raise UserError(
                    f"The option `{option}` of `{self.name}` is a number of bytes, at least 0, not {amount}."
                )

    def __call__(self, program: Program) -> Program:
        """Return the program with paged optimizer states.

        Raises:
            UserError: if ``device_bytes`` has no room for two pages, a page none for 256 elements of each state, or
                the states of a flat cannot be paged.
        """
        stepped = {states.buffers: states for states in _stepped_states(program)}
        if sum(states.size_bytes for states in stepped.values()) <= self.device_bytes:
            return program
        paging = self._paging(program, tuple(stepped.values()))
        homes = {
            name: buffers
            for states in paging.of_step.values()
            for name, buffers in states.homes(program).items()
        }
        program = rewrite.map_sections(program, lambda section: _with_pages(section, paging, homes))
        program = rewrite.replace_buffers(program, homes)
        bound = LiveBound(kind=BoundKind.PAGES, live=sum(map(len, paging.slots)))
        return replace(
            program,
            streams=rewrite.with_streams(program.streams, {COPY_IN, COPY_OUT}),
            bounds=with_bound(program.bounds, bound),
            buffers=(*program.buffers, *chain.from_iterable(paging.slots)),
        )

    def _paging(self, program: Program, stepped: Sequence[StepStates]) -> _Paging:
        """Return the paged states and the slots; ``stepped`` are the states of each step, in the order of the steps."""
        sizes = [self._page_numel(states) for states in stepped]
        numels: dict[DType, int] = {}
        for states, numel in zip(stepped, sizes, strict=True):
            for dtype, held in states.page_numels(numel).items():
                numels[dtype] = max(numels.get(dtype, 0), held)
        slot_bytes = sum(numel * dtype.itemsize_bytes for dtype, numel in numels.items())
        slots = min(_MOST_SLOTS, self.device_bytes // slot_bytes)
        if slots < _LEAST_SLOTS:
            raise UserError(
                f"`{self.spec()}` has no room on the device for {_LEAST_SLOTS} pages of {slot_bytes} bytes, one that "
                "comes in and one that is updated: raise device_bytes (--page-optimizer), or lower page_bytes "
                "(--page-bytes)."
            )
        room_bytes = self.device_bytes - slots * slot_bytes
        paged: dict[tuple[str, ...], PagedStates] = {}
        for states, numel in reversed(list(zip(stepped, sizes, strict=True))):
            most = room_bytes // states.aligned_bytes * SHARD_ALIGNMENT_NUMEL
            resident = min(states.numel, most)
            room_bytes -= resident // SHARD_ALIGNMENT_NUMEL * states.aligned_bytes
            paged[states.buffers] = PagedStates(
                states=states, page_numel=numel, host_numel=states.numel - resident
            )
        taken = set(program.buffer_by_name)
        return _Paging(
            of_step=paged,
            slots=tuple(_slot(number, numels, taken) for number in range(slots)),
        )

    def _page_numel(self, states: StepStates) -> int:
        """Return the elements of a flat in a page of these states, such that all pages of a flat are about equal."""
        most = self.page_bytes // states.aligned_bytes * SHARD_ALIGNMENT_NUMEL
        if not most:
            raise UserError(
                f"`{self.spec()}` has pages of {self.page_bytes} bytes, but {SHARD_ALIGNMENT_NUMEL} elements of "
                f"{listed(f'%{name}' for name in states.buffers)} have {states.aligned_bytes}: raise page_bytes "
                "(--page-bytes)."
            )
        count = -(-states.numel // most)
        return round_up(-(-states.numel // count), SHARD_ALIGNMENT_NUMEL)


# ----------------------------------------------------------------------------------------------- what is paged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paging:
    """The paged states, by the buffers of the states that a step names, and the buffers of each slot, one per dtype."""

    of_step: Mapping[tuple[str, ...], PagedStates]
    slots: tuple[tuple[Buffer, ...], ...]

    def of(self, op: _Step) -> PagedStates:
        """Return the paged states of a step."""
        return self.of_step[tuple(region.buffer for region in _regions(op))]


def _slot(number: int, numels: Mapping[DType, int], taken: set[str]) -> tuple[Buffer, ...]:
    """Return the buffers of a slot, with names that are not ``taken``."""
    buffers: list[Buffer] = []
    for dtype, numel in numels.items():
        name = f"page.{number}" if len(numels) == 1 else f"page.{number}.{dtype.value}"
        name = rewrite.claimed_name(name, taken)
        buffers.append(
            Buffer(name=name, dtype=dtype, numel=numel, space=Space.DEVICE, role=Role.PAGE)
        )
    return tuple(buffers)


def _is_paged_step(op: Op, section: Section) -> TypeGuard[_Step]:
    """Return whether an op of a section changes states of elements in a training step."""
    return section.name in STEP_SECTIONS and isinstance(op, _Step) and bool(op.states)


def _stepped_states(program: Program) -> Iterator[StepStates]:
    """Yield the states of each op that changes states of elements, in the order of the ops.

    Raises:
        UserError: if an op uses only a part of a state, or settings that depend on the places of its states.
    """
    for section in program.sections:
        for op in section.body:
            if _is_paged_step(op, section):
                yield _states(op, program)


def _regions(op: _Step) -> tuple[Region, ...]:
    """Return the states that a step changes, and the scales of their blocks where they have 8 bits."""
    return (*op.states, *(op.scales if isinstance(op, ops.OptimizerStep) else ()))


def _states(op: _Step, program: Program) -> StepStates:
    names = tuple(region.buffer for region in _regions(op))
    for region in _regions(op):
        if not rewrite.is_whole(region, program) or region.shard is not None:
            raise UserError(
                f"%{region.buffer} is updated in parts; `{PageOptimizer.name}` pages states that one op updates."
            )
    if isinstance(op, ops.Direction) and op.others:
        raise UserError(
            f"`{PageOptimizer.name}` cannot page %{names[0]}: {op.algorithm} finds the settings of the groups "
            f"{listed(s.group for s in op.settings)} by the places of its states, which a page does not have. Put the "
            "parameters of each group in units of their own, or keep the states on the device."
        )
    buffers = [program.buffer_by_name[name] for name in names]
    return StepStates(
        buffers=names,
        dtypes=tuple(buffer.dtype for buffer in buffers),
        numels=tuple(buffer.numel for buffer in buffers),
    )


# ------------------------------------------------------------------------------------------------------- the ops


def _with_pages(
    section: Section, paging: _Paging, homes: Mapping[str, tuple[Buffer, ...]]
) -> Section:
    """Return the section with its steps page by page, and its states in their new places at rest, ``homes``."""
    return replace(
        section,
        entry=_at_home(section.entry, homes),
        body=tuple(_paged(section, paging)),
        exit=_at_home(section.exit, homes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """A page of a step: its elements, and the places of each state's elements at rest and in the slot."""

    start: int
    stop: int
    homes: tuple[Region, ...]
    places: tuple[Region, ...]
    slot: tuple[Buffer, ...]

    def arrive(self) -> Iterator[Op]:
        """Yield the ops that copy the page to its slot."""
        for buffer in self.slot:
            if any(place.buffer == buffer.name for place in self.places):
                yield ops.Alloc(buffer=buffer.name, stream=COPY_IN)
        for home, place in zip(self.homes, self.places, strict=True):
            yield ops.ToDevice(source=home, destination=place, stream=COPY_IN)

    def depart(self) -> Iterator[Op]:
        """Yield the ops that copy the page home and free the slot."""
        for home, place in zip(self.homes, self.places, strict=True):
            yield ops.ToHost(source=place, destination=home, stream=COPY_OUT)
        for buffer in self.slot:
            if any(place.buffer == buffer.name for place in self.places):
                yield ops.Release(buffer=buffer.name, stream=COPY_OUT)


def _paged(section: Section, paging: _Paging) -> Iterator[Op]:
    """Yield the ops of a section, with its steps page by page; each slot is filled again as soon as it is free."""
    pages = list(_pages(section, paging))
    following, arriving = iter(pages), iter(pages)
    steps = (index for index, op in enumerate(section.body) if _is_paged_step(op, section))
    # In the update itself the first pages come in while the norm and the decision are computed.
    first = 0 if section.name == UPDATE else next(steps, 0)
    for index, op in enumerate(section.body):
        if index == first:
            for page in islice(arriving, len(paging.slots)):
                yield from page.arrive()
        if not _is_paged_step(op, section):
            yield op
            continue
        paged = paging.of(op)
        for page in islice(following, len(list(paged.pages()))):
            yield _on_part(op, page.start, page.stop, page.places)
            yield from page.depart()
            for later in islice(arriving, 1):
                yield from later.arrive()
        if paged.host_numel < paged.states.numel:
            resident = tuple(paged.resident_region(i) for i in range(len(_regions(op))))
            yield _on_part(op, paged.host_numel, paged.states.numel, resident)


def _pages(section: Section, paging: _Paging) -> Iterator[_Page]:
    """Yield the pages of a section in the order of their use; they use the slots in turn."""
    slots = cycle(paging.slots)
    for op in section.body:
        if not _is_paged_step(op, section):
            continue
        paged = paging.of(op)
        for start, stop in paged.pages():
            slot = next(slots)
            by_dtype = {buffer.dtype: buffer for buffer in slot}
            used: dict[DType, int] = {}
            homes: list[Region] = []
            places: list[Region] = []
            for i, dtype in enumerate(paged.states.dtypes):
                first, last = paged.states.elements(i, start, stop)
                home = Region(buffer=paged.states.buffers[i], offset=first, numel=last - first)
                homes.append(home)
                offset = used.get(dtype, 0)
                used[dtype] = offset + home.numel
                places.append(replace(home, buffer=by_dtype[dtype].name, offset=offset))
            yield _Page(start=start, stop=stop, homes=tuple(homes), places=tuple(places), slot=slot)


def _on_part(op: _Step, start: int, stop: int, states: tuple[Region, ...]) -> Op:
    """Return the step of elements ``[start, stop)``, whose states, and then scales, are in these regions."""
    grad = part_of(op.grad, start, stop)
    match op:
        case ops.Direction():
            direction = part_of(op.direction, start, stop)
            return replace(op, grad=grad, states=states, direction=direction)
        case ops.OptimizerStep():
            param, count = part_of(op.param, start, stop), len(op.states)
            return replace(op, param=param, grad=grad, states=states[:count], scales=states[count:])
        case _:
            assert_never(op)


def _at_home(state: State, homes: Mapping[str, tuple[Buffer, ...]]) -> State:
    """Return the state at a boundary, with holdings of optimizer states in their new buffers."""
    holdings: list[Holding] = []
    for holding in state.holdings:
        content = holding.content
        if holding.region.buffer not in homes or not isinstance(content, FlatContent):
            holdings.append(holding)
            continue
        for buffer in homes[holding.region.buffer]:
            assert isinstance(buffer.holds, FlatContent)
            held = replace(buffer.holds, version=content.version)
            holdings.append(replace(holding, region=whole(buffer), content=held))
    return replace(state, holdings=tuple(holdings))
