"""Keep parameters in host memory, and copy them to the device where ops use them.

The flats of the units that ``units`` names, by default of all, have their home in host memory. Where parameters are
sharded, each gather has its shard on the device for as long as it reads it. Otherwise the flat, or the used part of it,
is on the device for each run of uses, as with a gather. The transfers to the device run one use ahead, on the stream
``copy_in``, overlapping with the computation; the bound ``device_staging ahead=0`` keeps at most two uses' parameters
there. The update changes the parameters during a visit, and ``copy_out`` takes them home; where it runs beside the
backward, the bound allows the parameters of one more use.

Where the update computes new parameters in host memory and copies them to the device (see ``offload-optimizer``), the
copy to the device is omitted, and the parameters are written to their home. The buffers of modules stay on the device.

What ``offload-parameters`` changes::

    + bound device_staging ahead=0
    - buffer %a.param : f32[256] device param = param a @dp
    + buffer %a.param : f32[256] host param = param a @dp
    + buffer %a.param.device : f32[256] device staging
      section last_micro_step {
    + alloc %a.param.device  stream=copy_in
    + !0 = to_device %a.param -> %a.param.device  stream=copy_in
    - !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
    + !2 = all_gather %a.param.device -> %a.full  comm=gather stream=gather
    + release %a.param.device  stream=gather
      section update {
    + !2 = optimizer_step momentum param=%a.param.device grad=%a.grad states=(%a.momentum_buffer) …
    + wait !2  on=copy_out
    + to_host %a.param.device -> %a.param  stream=copy_out
    + release %a.param.device  stream=copy_out
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Space, part_of, whole
from zeroir.ir.mesh import Executor
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section, State
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.units import check_patterns, matching
from zeroir.passes.common.visits import HOST_TO_DEVICE, with_visits


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParameters(Pass):
    """Keep the parameters of ``units``, by default of all, in host memory."""

    name: ClassVar[str] = "offload-parameters"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    units: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            check_patterns(self.units, self.name)

    def __call__(self, program: Program) -> Program:
        """Return the program with the parameters at home in host memory."""
        units = None if self.units is None else matching(self.units, program, "--offload-units")
        homes = [
            name
            for name, flat in rewrite.param_buffers(program).items()
            if program.buffer_by_name[name].space is Space.DEVICE
            and (units is None or flat.unit in units)
        ]
        program = _updated_at_home(program, homes)
        on_host = {s.name for s in program.streams if s.executor is not Executor.DEVICE}
        return with_visits(
            program, homes, HOST_TO_DEVICE, is_at_home=lambda op: effects(op).stream in on_host
        )


# ------------------------------------------------------------------------------------------- an update on the host


def _updated_at_home(program: Program, homes: Collection[str]) -> Program:
    """Return the program whose host computes new parameters in their home instead of in separate buffers.

    The host's buffers from which parameters are copied to the device are removed, and so are these copies.
    """
    beside = _beside(program, homes)
    if not beside:
        return program

    def change(region: Region) -> Region:
        if region.buffer not in beside:
            return region
        home = beside[region.buffer]
        is_all = region == whole(program.buffer_by_name[region.buffer])
        return home if is_all else part_of(home, region.offset, region.stop)

    def without(state: State) -> State:
        holdings = tuple(h for h in state.holdings if h.region.buffer not in beside)
        live = tuple(name for name in state.live if name not in beside)
        return replace(state, live=live, holdings=holdings)

    def rewritten(section: Section) -> Section:
        body = (
            rewrite.map_regions(op, change)
            for op in section.body
            if not _is_of(op, beside) and not _is_copy_up(op, beside)
        )
        return replace(
            section, entry=without(section.entry), body=tuple(body), exit=without(section.exit)
        )

    program = rewrite.map_sections(program, rewritten)
    return rewrite.replace_buffers(program, dict.fromkeys(beside, ()))


def _is_of(op: Op, beside: Collection[str]) -> bool:
    return isinstance(op, ops.Memory) and op.buffer in beside


def _is_copy_up(op: Op, beside: Collection[str]) -> bool:
    return isinstance(op, ops.ToDevice) and op.source.buffer in beside


def _beside(program: Program, homes: Collection[str]) -> Mapping[str, Region]:
    """Return the host's buffers of new parameters, each with the region of a home that it could be."""
    copied_to: dict[str, set[Region]] = {}
    for op in program.ops():
        if isinstance(op, ops.ToDevice):
            copied_to.setdefault(op.source.buffer, set()).add(
                op.destination
                if op.source == whole(program.buffer_by_name[op.source.buffer])
                else op.source
            )
    sliced = {
        region.buffer
        for op in program.ops()
        for region in _regions(op)
        if region.shard is not None or region.part is not None
    }
    beside: dict[str, Region] = {}
    for name, regions in copied_to.items():
        (region, *others) = regions
        if others or region.buffer not in homes or name in sliced:
            continue
        if _is_alike(program.buffer_by_name[name], region, program):
            beside[name] = region
    late = {name for section in program.sections for name in _copied_late(section.body, beside)}
    return {name: region for name, region in beside.items() if name not in late}


def _regions(op: Op) -> tuple[Region, ...]:
    effect = effects(op)
    return (*effect.reads, *effect.writes, *effect.accumulates)


def _is_alike(buffer: Buffer, region: Region, program: Program) -> bool:
    """Return whether a buffer has the resting content of a region of a home, or is temporary."""
    if buffer.holds is None:
        return True
    return buffer.holds == rewrite.content_of(region, program)


def _copied_late(body: Sequence[Op], beside: Mapping[str, Region]) -> Set[str]:
    """Return the buffers whose home an op accesses between a change of the buffer and its copy to the home."""
    by_home: dict[str, list[str]] = {}
    for name, home in beside.items():
        by_home.setdefault(home.buffer, []).append(name)
    newer: set[str] = set()
    late: set[str] = set()
    for op in body:
        effect = effects(op)
        changed = (*effect.writes, *effect.accumulates)
        if isinstance(op, ops.ToDevice):
            newer.discard(op.source.buffer)
        for region in (*effect.reads, *changed):
            late.update(
                name
                for name in by_home.get(region.buffer, ())
                if name in newer and region.overlaps(beside[name])
            )
        newer.update(region.buffer for region in changed if region.buffer in beside)
    return late | newer
