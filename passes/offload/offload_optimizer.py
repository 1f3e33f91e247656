"""ZeRO-Offload: the optimizer's states rest in host memory, and the host's processors update them.

Of each flat the master weights, the optimizer's states and the averages move to host memory, and with them the ops that
change these: they run on the stream ``optimizer``. The gradient of a flat is copied down before its update, and its new
parameters are copied up after it, so each step copies 2 + 2 bytes per 16-bit parameter, not the 12 bytes of its FP32
states each way. A flat that trains in FP32 has no master weights: a second copy of its parameters rests on the host, is
updated there, and overwrites the one on the device. The scalars of the decision are copied down once.

Copies down and up have separate streams, so the gradient of the next flat is copied down and the parameters of the last
one up while the host updates a third. Their buffers in host memory are temporary, and a bound limits how many of them
are live. With ``overlap-update`` each flat is updated as soon as its gradient is reduced, during the backward; a copy
up then waits for the last op that reads the old parameters, the update itself does not.

``fraction`` limits the pass to flats with at least that part of the elements of the units' flats: those whose gradients
the backward completes first. The update of the last ones, which nothing would overlap, stays on the device.

What ``offload-optimizer`` changes::

    + bound host_staging ahead=1
    + buffer %a.param.host : f32[256] host param = param a @dp
    - buffer %a.momentum_buffer : f32[256] device state = momentum_buffer a @dp
    + buffer %a.momentum_buffer : f32[256] host state = momentum_buffer a @dp
    + buffer %a.grad.host : f32[256] host staging
      section update {
    + !1 = to_host %a.grad -> %a.grad.host  stream=update_out
    + wait !1  on=optimizer
    - optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
    + !2 = optimizer_step momentum param=%a.param.host grad=%a.grad.host states=(%a.momentum_buffer) …
    + wait !2  on=update_in
    + to_device %a.param.host -> %a.param  stream=update_in
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.bounds import AheadBound, BoundKind, with_bound
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import GRAD, MASTER, PARAM, FlatContent
from zeroir.ir.mesh import OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, Flat, Holding, Program, Section, State
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.units import check_patterns, matching
from zeroir.passes.common.update_streams import UPDATE_IN, UPDATE_OUT, with_update_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptimizer(Pass):
    """Keep the optimizer's states of these units, all by default, in host memory, and update them there."""

    name: ClassVar[str] = "offload-optimizer"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.GRADIENTS_REDUCED, Fact.UNSAVED, Fact.STATES_ON_DEVICE}
    )
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART, Fact.STATES_ON_DEVICE}
    )

    units: tuple[str, ...] | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            check_patterns(self.units, self.name)
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise UserError(
                f"The option `fraction` of `{self.name}` is above 0 and at most 1, not {self.fraction}."
            )

    def __call__(self, program: Program) -> Program:
        """Return the program with the update of these flats on the host.

        Raises:
            UserError: if a pattern names no unit, or an optimizer works on whole parameters.
        """
        flats = _chosen(program, self)
        return _Offload(program, flats).run() if flats else program


def _chosen(program: Program, step: OffloadOptimizer) -> Mapping[str, Flat]:
    """Return the flats to update on the host, by name, in the order in which the backward completes their gradients."""
    units = None if step.units is None else matching(step.units, program, step.spec())
    algorithms = {
        flat.name: op.algorithm
        for op in program.ops()
        if isinstance(op, ops.OptimizerStep)
        if (flat := _flat_of(op.param, program)) is not None
        if units is None or flat.unit in units
    }
    for name, algorithm in algorithms.items():
        if algorithm.direction_dtype is not None:
            raise UserError(
                f"`{step.name}` cannot offload {algorithm}, which updates the whole parameters of {name} from the "
                "shards of all ranks, and these meet on devices alone: name units with another optimizer."
            )
    completed: dict[str, int] = {}
    for index, op in enumerate(program.section_by_name[LAST_MICRO_STEP].body):
        for destination in op.destinations if isinstance(op, ops.Compute) else ():
            if destination is not None and destination.gradient is not None:
                home, _ = program.parameter_by_name[destination.gradient]
                completed[home.name] = index
    names = sorted(algorithms, key=lambda name: completed.get(name, -1))
    flats = [program.flat_by_name[name] for name in names]
    wanted_numel = sum(flat.padded_numel for flat in flats)
    if step.fraction is not None:
        wanted_numel = max(1, round(wanted_numel * step.fraction))
    chosen: dict[str, Flat] = {}
    numel = 0
    for flat in flats:
        if numel >= wanted_numel:
            break
        chosen[flat.name] = flat
        numel += flat.padded_numel
    return chosen


def _flat_of(region: Region, program: Program) -> Flat | None:
    """Return the flat with elements at rest in the region's buffer; None for a temporary one."""
    holds = program.buffer_by_name[region.buffer].holds
    return program.flat_by_name[holds.flat] if isinstance(holds, FlatContent) else None


class _Offload:
    """One run of the pass.

    By flat, ``copies`` are the second copies of FP32 parameters, or the temporary buffers through which 16-bit
    parameters pass, and ``gradients`` the temporary buffers through which gradients pass. ``widened`` are the temporary
    buffers of FP32 gradients, ``sums`` the gradients that the update of these flats clears.
    """

    def __init__(self, program: Program, flats: Mapping[str, Flat]) -> None:
        self.program = program
        self.flats = flats
        self.copies: dict[str, Buffer] = {}
        self.gradients: dict[str, Buffer] = {}
        self.scalars: dict[Region, Buffer] = {}
        self.widened: set[str] = set()
        self.sums: set[str] = set()
        self._taken = set(program.buffer_by_name)
        for op in program.ops():
            self._note(op)

    def run(self) -> Program:
        program = rewrite.map_sections(self.program, self._section)
        buffers: list[Buffer] = []
        for buffer in program.buffers:
            buffers += self._homes(buffer)
        for temporaries in (self.gradients, self.scalars):
            buffers += temporaries.values()
        buffers += [buffer for buffer in self.copies.values() if not buffer.is_persistent]
        # A 16-bit flat has two temporary buffers, the gradient's and the parameters', an FP32 flat one.
        ahead = 1 + any(not buffer.is_persistent for buffer in self.copies.values())
        bound = AheadBound(kind=BoundKind.HOST_STAGING, ahead=ahead)
        return replace(
            program,
            buffers=tuple(buffers),
            streams=with_update_streams(program.streams),
            bounds=with_bound(program.bounds, bound),
        )

    # -------------------------------------------------------------------------------------------------- what there is

    def _note(self, op: Op) -> None:
        """Record the buffers of an optimizer step, and name those that it needs on the host."""
        if not isinstance(op, ops.OptimizerStep) or (flat := self._own(op.param)) is None:
            return
        for region in (op.step, op.gradient_divisor, op.skip, *(s.lr for s in op.settings)):
            if region is not None and region not in self.scalars:
                buffer = self.program.buffer_by_name[region.buffer]
                self.scalars[region] = self._temporary(f"{region.buffer}.host", buffer, region)
        if self.program.buffer_by_name[op.grad.buffer].is_persistent:
            self.sums.add(op.grad.buffer)
            self.gradients[flat.name] = self._gradient(flat, op.grad)
        else:
            self.widened.add(op.grad.buffer)
        trained = self.program.buffer_by_name[op.param.buffer]
        assert isinstance(trained.holds, FlatContent)
        if trained.holds.quantity == PARAM:
            holds = rewrite.content_of(op.param, self.program)
            copy = self._temporary(f"{flat.name}.param.host", trained, op.param)
            self.copies[flat.name] = replace(copy, role=Role.PARAM, holds=holds)

    def _gradient(self, flat: Flat, region: Region) -> Buffer:
        buffer = self.program.buffer_by_name[region.buffer]
        return self._temporary(f"{flat.name}.grad.host", buffer, region)

    def _temporary(self, name: str, like: Buffer, region: Region) -> Buffer:
        """Return a temporary buffer in host memory for the elements of a region."""
        return Buffer(
            name=rewrite.claimed_name(name, self._taken),
            dtype=like.dtype,
            numel=region.local_numel(self.program.mesh),
            space=Space.HOST,
            role=Role.STAGING,
        )

    def _own(self, region: Region) -> Flat | None:
        """Return the flat of a region, if its update moves."""
        flat = _flat_of(region, self.program)
        return flat if flat is not None and flat.name in self.flats else None

    def _quantity(self, region: Region) -> str | None:
        holds = self.program.buffer_by_name[region.buffer].holds
        return holds.quantity if isinstance(holds, FlatContent) else None

    def _homes(self, buffer: Buffer) -> Iterator[Buffer]:
        """Yield the buffer in its new home, and before it the host's copy where there is one."""
        holds = buffer.holds
        if buffer.name in self.widened:
            yield replace(buffer, space=Space.HOST)
        elif isinstance(holds, FlatContent) and holds.flat in self.flats:
            copy = self.copies.get(holds.flat)
            if holds.quantity == PARAM and copy is not None and copy.is_persistent:
                yield copy
            is_on_device = holds.quantity in (PARAM, GRAD)
            yield buffer if is_on_device else replace(buffer, space=Space.HOST)
        else:
            yield buffer

    # ------------------------------------------------------------------------------------------------------ sections

    def _section(self, section: Section) -> Section:
        last_use = max(
            (index for index, op in enumerate(section.body) if self._is_scaled(op)), default=-1
        )
        body: list[Op] = []
        gathers: list[Op] = []
        stepped: set[str] = set()
        for index, op in enumerate(section.body):
            if isinstance(op, ops.Fill) and op.destination.buffer in self.sums & stepped:
                # A sum is cleared after its copy and on the copy's stream, so that no other stream waits for it.
                body.append(replace(op, stream=UPDATE_OUT))
                continue
            if last_use >= 0 and isinstance(op, ops.Gather) and self._is_of_new_parameters(op):
                gathers.append(op)
                continue
            body += self._op(op)
            if isinstance(op, ops.OptimizerStep):
                stepped.add(op.grad.buffer)
            if isinstance(op, ops.Decide) and last_use > index:
                body += self._down_scalars(op.stream)
            if index == last_use:
                body += [
                    ops.Release(buffer=b.name, stream=OPTIMIZER) for b in self.scalars.values()
                ]
        return replace(
            section,
            entry=self._with_copies(section.entry),
            # The thread that issues a collective waits until the previous copy up is issued: at the end this delays
            # nothing.
            body=(*body, *gathers),
            exit=self._with_copies(section.exit),
        )

    def _is_of_new_parameters(self, op: ops.Gather) -> bool:
        """Return whether the op gathers parameters at rest in place, all of them of flats that the host updates."""
        return all(
            self._own(pair.destination) is not None
            and self._quantity(pair.destination) == PARAM
            and pair.source.buffer == pair.destination.buffer
            for pair in op.pairs
        )

    def _is_scaled(self, op: Op) -> bool:
        """Return whether the op reads scalars of the decision on the host."""
        match op:
            case ops.OptimizerStep():
                return self._own(op.param) is not None
            case ops.Average():
                return self._own(op.average) is not None
            case _:
                return False

    def _down_scalars(self, stream: str) -> Iterator[Op]:
        """Yield copies of the scalars, on the stream that took the decision, so that no other copy waits for it."""
        for region, buffer in self.scalars.items():
            yield ops.Alloc(buffer=buffer.name, stream=stream)
            yield ops.ToHost(source=region, destination=whole(buffer), stream=stream)

    def _op(self, op: Op) -> Iterator[Op]:
        match op:
            case ops.Memory() if op.buffer in self.widened:
                yield replace(op, stream=OPTIMIZER)
            case ops.Cast() if op.destination.buffer in self.widened:
                yield from self._widen(op)
            case ops.OptimizerStep() if (flat := self._own(op.param)) is not None:
                yield from self._step(op, flat)
            case ops.Average() if (flat := self._own(op.average)) is not None:
                param = self._trained(op.param, flat)
                skip = None if op.skip is None else self._scalar(op.skip)
                yield replace(op, param=param, skip=skip, stream=OPTIMIZER)
            case ops.Cast() if (
                self._quantity(op.source) == MASTER and (flat := self._own(op.source)) is not None
            ):
                yield from self._narrow(op, flat)
            case _:
                yield op

    def _widen(self, op: ops.Cast) -> Iterator[Op]:
        """Copy a 16-bit gradient to the host before it is widened."""
        flat = _flat_of(op.source, self.program)
        assert flat is not None
        if flat.name not in self.gradients:
            self.gradients[flat.name] = self._gradient(flat, op.source)
        buffer = self.gradients[flat.name]
        yield from _down(op.source, buffer)
        yield replace(op, source=whole(buffer), stream=OPTIMIZER)
        yield ops.Release(buffer=buffer.name, stream=OPTIMIZER)

    def _step(self, op: ops.OptimizerStep, flat: Flat) -> Iterator[Op]:
        """Yield the step on the host.

        FP32 gradients are copied there before it, and FP32 parameters to the device after it.
        """
        gradient = None if op.grad.buffer in self.widened else self.gradients[flat.name]
        if gradient is not None:
            yield from _down(op.grad, gradient)
        trained = self._trained(op.param, flat)
        yield replace(
            op,
            param=trained,
            grad=op.grad if gradient is None else whole(gradient),
            step=self._scalar(op.step),
            gradient_divisor=self._scalar(op.gradient_divisor),
            skip=None if op.skip is None else self._scalar(op.skip),
            lr=self._scalar(op.lr),
            others=tuple(replace(other, lr=self._scalar(other.lr)) for other in op.others),
            stream=OPTIMIZER,
        )
        if gradient is not None:
            yield ops.Release(buffer=gradient.name, stream=OPTIMIZER)
        if trained != op.param:
            yield ops.ToDevice(source=trained, destination=op.param, stream=UPDATE_IN)

    def _narrow(self, op: ops.Cast, flat: Flat) -> Iterator[Op]:
        """Round master weights to 16 bits on the host, and then copy them to the device."""
        param = self.program.buffer_by_name[op.destination.buffer]
        if flat.name not in self.copies:
            name = f"{flat.name}.param.host"
            self.copies[flat.name] = self._temporary(name, param, op.destination)
        copy = self.copies[flat.name]
        yield ops.Alloc(buffer=copy.name, stream=OPTIMIZER)
        yield replace(op, destination=whole(copy), stream=OPTIMIZER)
        yield ops.ToDevice(source=whole(copy), destination=op.destination, stream=UPDATE_IN)
        yield ops.Release(buffer=copy.name, stream=UPDATE_IN)

    def _trained(self, param: Region, flat: Flat) -> Region:
        """Return the parameters that the host trains: the master weights, or its copy."""
        return whole(self.copies[flat.name]) if self._quantity(param) == PARAM else param

    def _scalar(self, region: Region) -> Region:
        return whole(self.scalars[region])

    def _with_copies(self, state: State) -> State:
        """Return the state in which the host's copies of parameters are as new as those on the device."""
        held: dict[str, Holding] = {}
        for holding in state.holdings:
            flat = self._own(holding.region)
            copy = None if flat is None else self.copies.get(flat.name)
            if copy is None or not isinstance(copy.holds, FlatContent):
                continue
            if isinstance(holding.content, FlatContent) and holding.content.quantity == PARAM:
                content = replace(copy.holds, version=holding.content.version)
                held[copy.name] = Holding(region=whole(copy), content=content)
        return replace(state, holdings=(*state.holdings, *held.values()))


def _down(source: Region, buffer: Buffer) -> Iterator[Op]:
    """Copy a region of the device to a temporary buffer of the host."""
    yield ops.Alloc(buffer=buffer.name, stream=UPDATE_OUT)
    yield ops.ToHost(source=source, destination=whole(buffer), stream=UPDATE_OUT)
