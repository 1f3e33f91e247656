"""Data parallelism, ZeRO stage 0: every rank holds all states, and gradients are summed over the ranks.

The program becomes one for ``dp`` ranks: flats are padded so that every rank has an equal slice. Each flat's gradient
is all-reduced in place on a separate stream as soon as its last contributor has run, so that the all-reduce overlaps
the rest of the backward. In the update, each rank tests its own slice of every gradient for overflow and computes its
norm; before the decision, one all-reduce of scalars combines these results, the loss and, where micro-batches have
weights, their sum over all ranks. Without such results the weights have a separate all-reduce, which can be early.
Without weights the optimizer's divisor is multiplied by ``dp``: gradients are summed, and only the optimizer step
averages them.

What ``all-reduce-gradients{dp=2}`` changes::

    - mesh dp=1
    + mesh dp=2
    + comm reduce axis=dp
    - flat a : f32[256] unit=a trainable {
    + flat a : f32[512] unit=a trainable {
    + !1 = compute @a.backward(%dh, %x, w: %a.param[0:128]) -> (grad w: %a.grad[0:128])  unit=a stream=compute
    + wait !1  on=reduce
    + all_reduce %a.grad -> %a.grad  comm=reduce stream=reduce
    - exit %a.grad = grad a micro=all
    + exit %a.grad = grad a reduced=(dp) micro=all
      section update {
    + all_reduce %loss -> %loss  comm=reduce stream=reduce
    - decide step=%step gradient_divisor=%divisor divisor=1  stream=compute
    + decide step=%step gradient_divisor=%divisor divisor=2  stream=compute
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.buffers import Region, whole
from zeroir.ir.mesh import DATA_AXIS, REDUCE, Axis, Communicator
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program, Section, State
from zeroir.ir.reports import Quantity
from zeroir.passes.base import Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.resize import resize

AXIS = DATA_AXIS
REDUCE_COMM = "reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceGradients(Pass):
    """Sum gradients over ``dp`` ranks."""

    name: ClassVar[str] = "all-reduce-gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED})
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})

    dp: int

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise UserError(
                f"The option `dp` of `{self.name}` is a number of ranks, at least 1, not {self.dp}."
            )

    def __call__(self, program: Program) -> Program:
        """Return the program on ``dp`` ranks.

        Raises:
            UserError: if the model depends on another number of ranks.
        """
        for comm in program.comms:
            if comm.ranks not in (None, self.dp):
                raise UserError(
                    f"The model asks for the number of ranks or gathers values of all of them, and was compiled for "
                    f"{comm.ranks}: compile it again for {self.dp}. A mesh of two axes is not possible."
                )
        program = replace(
            resize(program, Axis(name=AXIS, size=self.dp)),
            comms=(
                Communicator(name=REDUCE_COMM, axis=AXIS),
                *(replace(comm, ranks=None) for comm in program.comms),
            ),
        )
        return rewrite.map_sections(program, lambda section: self._rewrite(section, program))

    def _rewrite(self, section: Section, program: Program) -> Section:
        if section.name == LAST_MICRO_STEP:
            return _reduce_gradients(section, program)
        if section.name == UPDATE:
            return self._reduce_scalars(section, program)
        return section

    def _reduce_scalars(self, section: Section, program: Program) -> Section:
        partial: list[Region] = []
        body: list[Op] = []
        for op in section.body:
            match op:
                case ops.CheckFinite() | ops.GradNorm():
                    partial.append(op.destination)
                    body.append(
                        replace(op, sources=tuple(replace(s, shard=AXIS) for s in op.sources))
                    )
                case ops.Decide():
                    if op.weight is not None and program.weight is not None:
                        if partial:
                            partial.append(op.weight)
                        else:
                            body.append(_all_reduce(op.weight))
                    loss = program.report_of.get(Quantity.SUMMED_LOSS)
                    if loss is not None:
                        partial.append(whole(program.buffer_by_name[loss.buffer]))
                    if partial:
                        body.append(_all_reduce(*partial))
                    body.append(rewrite.on_more_ranks(op, self.dp, program))
                case _:
                    body.append(op)
        return replace(section, entry=_reduced(section.entry), body=tuple(body))


def _reduce_gradients(section: Section, program: Program) -> Section:
    writers = SectionView(program, section.body).writers
    after: dict[int, list[Op]] = {}
    for buffer in rewrite.complete_gradients(section):
        numel = program.buffer_by_name[buffer].numel
        region = Region(buffer=buffer, offset=0, numel=numel)
        after.setdefault(writers[buffer][-1], []).append(_all_reduce(region))
    body = rewrite.insert(section.body, after=after)
    return replace(section, body=body, exit=_reduced(section.exit))


def _all_reduce(*regions: Region) -> ops.AllReduce:
    pairs = tuple(ops.Pair(source=region, destination=region) for region in regions)
    return ops.AllReduce(pairs=pairs, comm=REDUCE_COMM, stream=REDUCE)


def _reduced(state: State) -> State:
    """Return the state with its complete gradients summed over the ranks."""
    holdings = tuple(
        replace(holding, content=replace(content, reduced=(AXIS,)))
        if (content := rewrite.complete_gradient(holding)) is not None
        else holding
        for holding in state.holdings
    )
    return replace(state, holdings=holdings)
