"""Let a step of a logical program accumulate the gradients of any number of micro-steps.

A logical program is made for one micro-step. Here each of its gradients becomes a temporary buffer, which a micro-step
adds to an FP32 sum; the update reads the sums and clears them. So do the losses and the weights of the micro-batches,
each 1 unless the program takes weights: the update divides by the sum of the weights, which is on the device, so one
program serves every number of micro-steps.

What changes::

    + section micro_step { … }
    + cast %batch_weight -> += %weight_sum  stream=compute
    + alloc %a.grad  stream=compute
    + fill %a.grad = 0.0  stream=compute
      !1 = compute @a.backward(…) -> (grad w: %a.grad[0:128])  unit=a stream=compute
    + cast %a.grad -> += %a.grad_sum  stream=compute
    + release %a.grad  stream=compute
      section update {
    + cast %weight_sum -> %weight  stream=compute
    + cast %loss -> %summed_loss  stream=compute
    - decide step=%step gradient_divisor=%divisor divisor=1  stream=compute
    + decide step=%step gradient_divisor=%divisor divisor=1 weight=%weight  stream=compute
    - optimizer_step sgd param=%a.param grad=%a.grad …
    + optimizer_step sgd param=%a.param grad=%a.grad_sum …
    + fill %a.grad_sum = 0.0  stream=compute
    + fill %weight_sum = 0.0  stream=compute
    + fill %loss = 0.0  stream=compute
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from zeroir.errors import InternalError
from zeroir.frontend.lowering.micro_batch_weights import (
    BATCH_LOSS,
    BATCH_WEIGHT,
    WEIGHT,
    cast,
    first,
    one_number,
    with_batch_loss,
)
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import FlatContent, Micro, WeightContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Flat,
    Holding,
    Program,
    ScalarBinding,
    Section,
    State,
)
from zeroir.ir.reports import Quantity, with_report

_SUMMED_LOSS = "summed_loss"
"""The sum of the losses of the step; the update clears the buffer in which they are added."""
_WEIGHT_SUM = "weight_sum"
"""The sum of the weights of the micro-steps so far."""


def accumulate(program: Program) -> Program:
    """Return the program for any number of micro-steps; it must be a logical one for one micro-step."""
    if program.loss is None or MICRO_STEP in program.section_by_name:
        raise InternalError(
            "only a logical program for one micro-step, with a loss, can accumulate"
        )
    return _Accumulator.of(program).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accumulator:
    """One run.

    ``flats`` maps each buffer to which calls write gradients to its flat. ``sums`` maps every buffer from which the
    update reads such a gradient, or a widened copy of it, to the buffer of the FP32 sum.
    """

    program: Program
    loss: str
    flats: Mapping[str, Flat]
    sums: Mapping[str, str]

    @classmethod
    def of(cls, program: Program) -> _Accumulator:
        assert program.loss is not None
        flats: dict[str, Flat] = {}
        for op in program.section_by_name[LAST_MICRO_STEP].body:
            for destination in op.destinations if isinstance(op, ops.Compute) else ():
                if destination is not None and destination.gradient is not None:
                    flat, _ = program.parameter_by_name[destination.gradient]
                    flats[destination.view.region.buffer] = flat
        sums = {name: f"{flat.name}.grad_sum" for name, flat in flats.items()}
        for op in program.section_by_name[UPDATE].body:
            if isinstance(op, ops.Cast) and op.source.buffer in flats:
                sums[op.destination.buffer] = sums[op.source.buffer]
        return cls(program=program, loss=program.loss, flats=flats, sums=sums)

    def run(self) -> Program:
        sections: list[Section] = []
        for section in self.program.sections:
            if section.name == LAST_MICRO_STEP:
                body = tuple(self._micro_step(section.body))
                sections.append(Section(name=MICRO_STEP, body=body))
                sections.append(replace(section, body=body, exit=self._complete(section.exit)))
            elif section.name == UPDATE:
                body = tuple(self._update(section.body))
                sections.append(replace(section, entry=self._complete(section.entry), body=body))
            else:
                sections.append(section)
        bindings = self.program.scalars
        if self.program.weight is None:
            bindings = (*bindings, ScalarBinding(buffer=BATCH_WEIGHT, values=(1.0,)))
        reports = with_report(self.program.reports, Quantity.BATCH_LOSS, BATCH_LOSS)
        return replace(
            self.program,
            buffers=tuple(self._buffers()),
            scalars=bindings,
            sections=tuple(sections),
            reports=with_report(reports, Quantity.SUMMED_LOSS, _SUMMED_LOSS),
        )

    def _buffers(self) -> Iterator[Buffer]:
        for buffer in self.program.buffers:
            if buffer.name in self.flats:
                yield replace(buffer, holds=None)
                yield Buffer(
                    name=self.sums[buffer.name],
                    dtype=DType.F32,
                    numel=buffer.numel,
                    space=Space.DEVICE,
                    role=Role.GRAD,
                    holds=FlatContent(
                        quantity="grad", flat=self.flats[buffer.name].name, micro=Micro.PAST
                    ),
                )
            elif buffer.name not in self.sums:
                yield buffer
        if self.program.weight is None:
            yield one_number(BATCH_WEIGHT, WeightContent(micro=Micro.CURRENT))
            yield one_number(WEIGHT, WeightContent(micro=Micro.STALE))
            yield one_number(BATCH_LOSS)
        yield one_number(_SUMMED_LOSS)
        yield one_number(_WEIGHT_SUM, WeightContent(micro=Micro.PAST))

    # ------------------------------------------------------------------------------------------------- micro-steps

    def _micro_step(self, body: Iterable[Op]) -> Iterator[Op]:
        ops_of_body = tuple(body)
        begun: set[str] = set()
        last = {
            name: index for index, op in enumerate(ops_of_body) for name in self._contributed(op)
        }
        finished: list[str] = []
        yield cast(BATCH_WEIGHT, _WEIGHT_SUM, Mode.ACCUMULATE)
        for index, op in enumerate(ops_of_body):
            if not isinstance(op, ops.Release):
                yield from self._finish(finished)
                finished.clear()
            for name in self._contributed(op):
                if name not in begun:
                    begun.add(name)
                    yield ops.Alloc(buffer=name, stream=COMPUTE)
                    yield ops.Fill(destination=self._whole(name), value=0.0, stream=COMPUTE)
                if last[name] == index and name not in finished:
                    finished.append(name)
            yield from self._op(op)
        yield from self._finish(finished)

    def _contributed(self, op: Op) -> Iterator[str]:
        """Yield the buffers to which the op writes gradients."""
        for destination in op.destinations if isinstance(op, ops.Compute) else ():
            if destination is not None and destination.gradient is not None:
                yield destination.view.region.buffer

    def _op(self, op: Op) -> Iterator[Op]:
        """Yield the op, with losses added; in a weighted program the op that starts the micro-step adds the weights."""
        match op:
            case ops.Cast() if op.destination.buffer == self.loss:
                yield replace(op, mode=Mode.ACCUMULATE)
            case ops.Cast() if op.destination.buffer == WEIGHT:
                return
            case ops.Compute() if (call := with_batch_loss(op, self.loss)) is not None:
                yield call
                yield cast(BATCH_LOSS, self.loss, Mode.ACCUMULATE)
            case _:
                yield op

    def _finish(self, names: Iterable[str]) -> Iterator[Op]:
        """Yield ops that add complete gradients to the sums, and release them."""
        for name in names:
            gradient = self._whole(name)
            total = replace(gradient, buffer=self.sums[name])
            yield ops.Cast(source=gradient, destination=total, mode=Mode.ACCUMULATE, stream=COMPUTE)
            yield ops.Release(buffer=name, stream=COMPUTE)

    def _whole(self, name: str) -> Region:
        return Region(buffer=name, offset=0, numel=self.program.buffer_by_name[name].numel)

    # ------------------------------------------------------------------------------------------------------ update

    def _update(self, body: Iterable[Op]) -> Iterator[Op]:
        """Yield the update on the sums.

        Each sum is cleared after the ops of its flat, before the next optimizer step.
        """
        used: list[Region] = []
        for op in body:
            if isinstance(op, ops.Direction | ops.OptimizerStep | ops.UpdateScale):
                yield from _clear(used)
            match op:
                case ops.Alloc() | ops.Release() if op.buffer in self.sums:
                    pass
                case ops.Cast() if op.source.buffer in self.flats:
                    pass  # A sum is FP32 already.
                case ops.CheckFinite() | ops.GradNorm():
                    yield replace(op, sources=tuple(self._summed(s) for s in op.sources))
                case ops.Decide():
                    yield cast(_WEIGHT_SUM, WEIGHT)
                    yield cast(self.loss, _SUMMED_LOSS)
                    yield replace(op, weight=first(WEIGHT))
                case ops.Direction() | ops.OptimizerStep() if op.grad.buffer in self.sums:
                    used.append(self._summed(op.grad))
                    yield replace(op, grad=used[-1])
                case _:
                    yield op
        yield from _clear([*used, first(_WEIGHT_SUM), first(self.loss)])

    def _summed(self, region: Region) -> Region:
        return replace(region, buffer=self.sums.get(region.buffer, region.buffer))

    def _complete(self, state: State) -> State:
        """Return the state in which the sums are complete, instead of the gradients of one micro-step."""
        holdings = [
            replace(holding, region=self._summed(holding.region))
            for holding in state.holdings
            if not isinstance(holding.content, WeightContent)
        ]
        weight = Holding(region=first(_WEIGHT_SUM), content=WeightContent(micro=Micro.ALL))
        return replace(state, holdings=(*holdings, weight))


def _clear(regions: list[Region]) -> Iterator[Op]:
    """Yield ops that fill the regions with zeros, and clear the list."""
    for region in regions:
        yield ops.Fill(destination=region, value=0.0, stream=COMPUTE)
    regions.clear()
