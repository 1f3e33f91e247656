"""Keep gradients in host memory: each is copied there as soon as it is reduced.

Of each flat the gradient at rest, or its sum over micro-steps in FP32, moves to host memory. On the device it lives in
a temporary buffer, from its first contribution or from its reduction until it is copied down, on the stream
``copy_out``, overlapping with the backward of other units. A micro-step's reduced gradient is added to the sum on the
host, on the stream ``optimizer``. The norm and the overflow flag are computed where the gradients are, and their
scalars are copied to the device before the ranks combine them; where some gradients rest on the device, the statistic
is passed from one space to the other in the order of its sources, so it is bitwise equal.

An update on the host (``offload-optimizer``) reads the gradients where they rest. For one on the device each gradient
is copied up before it. Without ``units`` the gradients of the flats that the host updates move, or of all flats where
it updates none.

At stages 0 and 1 the full gradient of each flat is a temporary buffer now, as at stage 2, and the bound on full
gradients makes the backward wait until the last but one is on the host. There the sums of several micro-steps are
reduced at the end, so they are copied to the device for that and back.

What ``offload-gradients`` changes::

    - buffer %a.grad : f32[256] device grad = grad a @dp micro=stale
    + buffer %a.grad : f32[256] host grad = grad a @dp micro=stale
    + buffer %a.grad.reduced : f32[256] device grad
      section last_micro_step {
    + alloc %a.grad.reduced  stream=reduce
    - reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + !9 = reduce_scatter %a.grad_full -> %a.grad.reduced  comm=reduce stream=reduce
    + wait !9  on=copy_out
    + !10 = to_host %a.grad.reduced -> %a.grad  stream=copy_out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.bounds import AheadBound, Bound, BoundKind, with_bound
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import GRAD, FlatContent, Micro
from zeroir.ir.mesh import COPY_OUT, OPTIMIZER, Executor
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import Flat, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.units import check_patterns, matching
from zeroir.passes.common.update_streams import UPDATE_IN, UPDATE_OUT, with_update_streams
from zeroir.passes.common.visits import HOST_TO_DEVICE, with_visits

_Statistic = ops.GradNorm | ops.CheckFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadGradients(Pass):
    """Keep the gradients of ``units`` in host memory; by default of the flats that the host updates, or of all."""

    name: ClassVar[str] = "offload-gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED, Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    units: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            check_patterns(self.units, self.name)

    def __call__(self, program: Program) -> Program:
        """Return the program with these gradients at home in host memory.

        Raises:
            UserError: if a pattern names no unit.
        """
        homes = _homes(program, self)
        if not homes:
            return program
        program = _Gradients(program, homes).run()
        executors = {stream.name: stream.executor for stream in program.streams}

        def is_at_home(op: Op) -> bool:
            is_of_host = executors.get(effects(op).stream) is Executor.HOST
            return is_of_host or isinstance(op, ops.Transfer)

        def is_used_up(op: Op, region: Region) -> bool:
            return isinstance(op, ops.Direction | ops.OptimizerStep) and region == op.grad

        return with_visits(
            program, list(homes), HOST_TO_DEVICE, is_at_home=is_at_home, is_used_up=is_used_up
        )


def _homes(program: Program, step: OffloadGradients) -> Mapping[str, Flat]:
    """Return the buffers of gradients that move, each with its flat."""
    flats = program.flat_by_name
    resting = {
        buffer.name: flats[buffer.holds.flat]
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
        and buffer.holds.quantity == GRAD
        and buffer.space is Space.DEVICE
    }
    if step.units is not None:
        units = matching(step.units, program, step.spec())
        return {name: flat for name, flat in resting.items() if flat.unit in units}
    updated = {
        holds.flat
        for op in program.ops()
        if isinstance(op, ops.OptimizerStep)
        if program.buffer_by_name[op.param.buffer].space is Space.HOST
        if isinstance(holds := program.buffer_by_name[op.param.buffer].holds, FlatContent)
    }
    return {name: flat for name, flat in resting.items() if not updated or flat.name in updated}


class _Gradients:
    """One run of the pass; the visits of gradients that are still used on the device are created afterwards.

    ``on_device`` are, for gradients that one section computes, their temporary buffers on the device: full ones where
    compute ops, or casts of their results, contributed to the buffer at rest (``full``), otherwise those into which
    they are reduced. ``sums`` are the gradients over several micro-steps, with the temporary buffers through which each
    micro-step's gradient is copied down. ``added`` are the buffers whose elements are added to sums; ``came_down`` are
    the temporary buffers to which gradients were copied for the update, and their present places at rest. ``slices``
    are the full buffers at rest of which a rank only needs its slice, with the axis of the slices.
    """

    def __init__(self, program: Program, homes: Mapping[str, Flat]) -> None:
        self.program = program
        self.homes = homes
        self._taken = set(program.buffer_by_name)
        self.contributed = rewrite.contributed_buffers(program)
        summed = {
            op.destination.buffer
            for op in program.ops()
            if isinstance(op, ops.Cast)
            and op.mode is Mode.ACCUMULATE
            and _is_stale(program.buffer_by_name[op.destination.buffer])
        }
        self.full = homes.keys() & (self.contributed.keys() | summed)
        self.on_device: dict[str, Buffer] = {}
        self.sums: dict[str, Buffer] = {}
        self.statistics: dict[Region, Buffer] = {}
        for name, flat in homes.items():
            if not _is_stale(program.buffer_by_name[name]):
                continue
            own = f"{flat.name}.grad_full" if name in self.full else f"{name}.reduced"
            self.on_device[name] = self._temporary(own, name)
        self.came_down = {
            op.destination.buffer: op.source
            for op in program.ops()
            if isinstance(op, ops.ToHost) and op.source.buffer in homes
        }
        self.added = {
            op.source.buffer
            for op in program.ops()
            if isinstance(op, ops.Cast) and self._is_sum(op)
        }
        reduced = {
            region.buffer: region.shard
            for op in program.ops()
            if isinstance(op, ops.Collective)
            for region in (pair.destination for pair in op.pairs)
            if region.buffer in self.full
        }
        self.slices = {name: axis for name, axis in reduced.items() if axis is not None}

    def run(self) -> Program:
        program = rewrite.map_sections(self.program, self._section)
        buffers: list[Buffer] = []
        for buffer in program.buffers:
            name = buffer.name
            if name in self.came_down:
                continue
            axis = self.slices.get(name)
            size = 1 if axis is None else program.mesh.size(axis)
            buffers.append(buffer if axis is None else rewrite.sharded(buffer, axis, size))
            buffers += [others[name] for others in (self.on_device, self.sums) if name in others]
        return replace(
            program,
            buffers=(*buffers, *self.statistics.values()),
            bounds=self._bounds(program.bounds),
            streams=with_update_streams(rewrite.with_streams(program.streams, {COPY_OUT})),
        )

    def _bounds(self, bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
        """Return the bounds, with limits on the gradients that wait for a copy to the host."""
        kinds = {bound.kind for bound in bounds}
        if BoundKind.FULL_GRADIENTS not in kinds:
            bounds = with_bound(bounds, AheadBound(kind=BoundKind.FULL_GRADIENTS, ahead=1))
        if (self.sums or self.statistics) and BoundKind.HOST_STAGING not in kinds:
            bounds = with_bound(bounds, AheadBound(kind=BoundKind.HOST_STAGING, ahead=1))
        return bounds

    def _temporary(self, name: str, like: str, space: Space = Space.DEVICE) -> Buffer:
        """Return a temporary buffer for the elements of another one."""
        name = rewrite.claimed_name(name, self._taken)
        role = Role.GRAD if space is Space.DEVICE else Role.STAGING
        buffer = self.program.buffer_by_name[like]
        return replace(buffer, name=name, space=space, role=role, holds=None)

    # ------------------------------------------------------------------------------------------------------ sections

    def _section(self, section: Section) -> Section:
        uses = {
            name: [index for index, op in enumerate(section.body) if self._fills(op, name)]
            for name in self.on_device
        }
        before: dict[int, list[Op]] = {}
        after: dict[int, list[Op]] = {}
        for name, indices in uses.items():
            if not indices:
                continue
            first, last = indices[0], indices[-1]
            before.setdefault(first, []).extend(self._begin(name, section.body[first]))
            # Other ops that follow the reduction do not wait for the copy.
            end = last
            while end + 1 < len(section.body) and isinstance(section.body[end + 1], ops.Release):
                end += 1
            after.setdefault(end, []).extend(self._end(name, section.body[last]))
        body: list[Op] = []
        for index, op in enumerate(section.body):
            body += before.get(index, ())
            body += self._op(op)
            body += after.get(index, ())
        return replace(
            section,
            entry=rewrite.map_state(section.entry, self._at_rest),
            body=tuple(body),
            exit=rewrite.map_state(section.exit, self._at_rest),
        )

    def _fills(self, op: Op, name: str) -> bool:
        """Return whether the op computes or reduces the gradient."""
        is_filling = isinstance(op, ops.Compute | ops.Fill | ops.Collective)
        is_filling |= isinstance(op, ops.Cast) and op.destination.buffer == name
        return is_filling and name in rewrite.used_buffers(op)

    def _begin(self, name: str, op: Op) -> Iterator[Op]:
        buffer = self.on_device[name].name
        stream = effects(op).stream
        yield ops.Alloc(buffer=buffer, stream=stream)
        is_cleared = isinstance(op, ops.Fill) and op.destination == whole(
            self.program.buffer_by_name[name]
        )
        if name in self.full and not is_cleared:
            yield from rewrite.gap_fills(self.homes[name], buffer, stream)

    def _end(self, name: str, op: Op) -> Iterator[Op]:
        """Copy a reduced gradient to the host.

        The bound on full gradients, or otherwise its stream, limits the buffer.
        """
        buffer = self.on_device[name]
        axis = self.slices.get(name)
        source = replace(whole(buffer), shard=axis)
        target = self._at_rest(replace(source, buffer=name))
        yield ops.ToHost(source=source, destination=target, stream=COPY_OUT)
        stream = COPY_OUT if name in self.full else effects(op).stream
        yield ops.Release(buffer=buffer.name, stream=stream)

    def _op(self, op: Op) -> Iterator[Op]:
        match op:
            case ops.Memory() if op.buffer in self.came_down:
                return
            case ops.ToHost() if op.destination.buffer in self.came_down:
                return
            case ops.Release() if op.buffer in self.added & self.contributed.keys():
                # The compute stream does not wait for the copy, only the bound on full gradients does.
                yield replace(op, stream=UPDATE_OUT)
            case ops.Cast() if self._is_sum(op):
                yield from self._add(op)
            case ops.Fill() if op.destination.buffer in self.homes.keys() - self.on_device.keys():
                yield replace(op, stream=OPTIMIZER)
            case ops.GradNorm() | ops.CheckFinite():
                yield from self._statistic(op)
            case ops.Compute() | ops.Fill() | ops.Collective():
                yield rewrite.map_regions(op, self._on_device)
            case ops.Cast() if op.destination.buffer in self.full:
                yield rewrite.map_regions(op, self._on_device)
            case _:
                yield rewrite.map_regions(op, self._at_rest)

    def _is_sum(self, op: ops.Cast) -> bool:
        is_added = op.mode is Mode.ACCUMULATE and op.destination.buffer in self.homes
        return is_added and op.destination.buffer not in self.full

    def _add(self, op: ops.Cast) -> Iterator[Op]:
        """Copy the gradient of a micro-step to the host, and add it there."""
        home = op.destination.buffer
        if home not in self.sums:
            source = op.source.buffer
            self.sums[home] = self._temporary(f"{source}.host", source, Space.HOST)
        buffer = self.sums[home]
        yield ops.Alloc(buffer=buffer.name, stream=UPDATE_OUT)
        yield ops.ToHost(source=op.source, destination=whole(buffer), stream=UPDATE_OUT)
        yield replace(op, source=whole(buffer), stream=OPTIMIZER)
        yield ops.Release(buffer=buffer.name, stream=OPTIMIZER)

    def _statistic(self, op: _Statistic) -> Iterator[Op]:
        """Compute the statistic of the sources in turn, each part in the memory of its sources."""
        parts = [
            (is_on_host, tuple(map(self._at_rest, sources)))
            for is_on_host, sources in groupby(op.sources, lambda r: r.buffer in self.homes)
        ]
        if not any(is_on_host for is_on_host, _ in parts):
            yield op
            return
        if op.destination not in self.statistics:
            name = f"{op.destination.buffer}.host"
            scalar = self._temporary(name, op.destination.buffer, Space.HOST)
            self.statistics[op.destination] = replace(scalar, numel=1)
        buffer = self.statistics[op.destination]
        mode = op.mode
        for is_on_host, sources in parts:
            part = replace(op, sources=sources, mode=mode)
            if is_on_host:
                yield ops.Alloc(buffer=buffer.name, stream=UPDATE_OUT)
                if mode is Mode.ACCUMULATE:
                    yield ops.ToHost(
                        source=op.destination, destination=whole(buffer), stream=UPDATE_OUT
                    )
                yield replace(part, destination=whole(buffer), stream=OPTIMIZER)
                yield ops.ToDevice(
                    source=whole(buffer), destination=op.destination, stream=UPDATE_IN
                )
                yield ops.Release(buffer=buffer.name, stream=UPDATE_IN)
            else:
                yield part
            mode = Mode.ACCUMULATE

    def _on_device(self, region: Region) -> Region:
        buffer = self.on_device.get(region.buffer)
        return region if buffer is None else replace(region, buffer=buffer.name)

    def _at_rest(self, region: Region) -> Region:
        """Return the new home of a region of a gradient at rest, or of a buffer to which it was copied."""
        region = self.came_down.get(region.buffer, region)
        axis = self.slices.get(region.buffer)
        return region if axis is None else rewrite.as_shard(region, self.program.mesh.size(axis))


def _is_stale(buffer: Buffer) -> bool:
    """Return whether one section computes the gradient of a buffer, of one micro-batch or as a sum over several."""
    return isinstance(buffer.holds, FlatContent) and buffer.holds.micro is Micro.STALE
