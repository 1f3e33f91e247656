"""Hybrid sharding: several groups of ranks train as one, each holding all shards once; gradients are summed across.

The program for the ranks of one axis becomes a program for ``replicas`` such groups: the mesh ``dp=4`` becomes
``replicate=2 shard=4``. Parameters are sharded and gathered only over ``shard``, which is usually inside one machine.
Between groups, one all-reduce adds each rank's shard of a gradient, once it is complete. With several micro-steps, the
finished sum is reduced, once per step and in FP32. At stage 0 every rank keeps the whole gradient; the all-reduce over
``shard`` becomes a reduce-scatter before and an all-gather after the all-reduce between groups, so only shards cross.
Collectives over the two axes share ranks, so all of them are in one order. Gathers that are issued ahead come first,
because a compute op waits for them, while the sums may take until the update.

Every sum adds in FP32 in rank order and rounds once to the gradient's dtype: over ``shard`` first, then over
``replicate``. So a 16-bit gradient of one micro-step is rounded once for each axis, at every stage; sending FP32
between groups would double the bytes on the slower link.

Each rank checks its slices of every gradient, which are equal in all groups: the norm is summed only over ``shard``,
the loss and the overflow flag over both axes. The optimizer's divisor is multiplied by ``replicas``.

What ``replicate-shards{replicas=2}`` changes::

    - mesh dp=2
    + mesh replicate=2 shard=2
    - comm reduce axis=dp
    + comm reduce axis=shard
    + comm across axis=replicate
    - buffer %a.grad : f32[256] device grad = grad a @dp micro=stale
    + buffer %a.grad : f32[256] device grad = grad a @shard micro=stale
      reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + all_reduce %a.grad -> %a.grad  comm=across stream=reduce
    - exit %a.grad = grad a @dp reduced=(dp) micro=all
    + exit %a.grad = grad a @shard reduced=(replicate, shard) micro=all
      all_reduce %loss -> %loss  comm=reduce stream=reduce
    + all_reduce %loss -> %loss  comm=across stream=reduce
    - decide step=%step gradient_divisor=%divisor divisor=2  stream=compute
    + decide step=%step gradient_divisor=%divisor divisor=4  stream=compute
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role
from zeroir.ir.contents import GRAD, Content, FlatContent
from zeroir.ir.mesh import REPLICATE_AXIS, SHARD_AXIS, Axis, Communicator, Mesh
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import LAST_MICRO_STEP, Holding, Program, Section, State
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched
from zeroir.passes.stages.all_reduce_gradients import AXIS

ACROSS_COMM = "across"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateShards(Pass):
    """Let ``replicas`` groups of ranks hold the same shards and sum their gradients."""

    name: ClassVar[str] = "replicate-shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED, Fact.ONE_AXIS})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_AXIS})

    replicas: int

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UserError(
                f"The option `replicas` of `{self.name}` is a number of groups of ranks, at least 1, "
                f"not {self.replicas}."
            )

    def __call__(self, program: Program) -> Program:
        """Return the program on ``replicas`` times as many ranks."""
        size = program.mesh.size(AXIS)
        axes = (Axis(name=REPLICATE_AXIS, size=self.replicas), Axis(name=SHARD_AXIS, size=size))
        program = replace(_renamed(program), mesh=Mesh(axes=axes))
        if self.replicas == 1:
            return program
        across = Communicator(name=ACROSS_COMM, axis=REPLICATE_AXIS)
        program = replace(program, comms=(*program.comms, across))
        return rewrite.map_sections(program, lambda section: self._rewrite(section, program))

    def _rewrite(self, section: Section, program: Program) -> Section:
        complete = _completed(section, program)
        norms = {op.destination for op in section.body if isinstance(op, ops.GradNorm)}
        body = _Body(program)
        for index, op in enumerate(section.body):
            match op:
                case ops.AllReduce() if index in complete:
                    first, *rest = _in_slices(op)
                    body.add(first)
                    body.hold(rest)
                case ops.AllReduce() if _is_of_scalars(op, program):
                    body.add(op)
                    regions = [pair.destination for pair in op.pairs]
                    for across in _across([r for r in regions if r not in norms], op.stream):
                        body.add(across)
                case ops.Decide():
                    body.add(rewrite.on_more_ranks(op, self.replicas, program))
                case ops.ReduceScatter() | ops.Cast() if index in complete:
                    body.add(op)
                    body.hold(_across(complete[index], op.stream))
                case _:
                    body.add(op)
        return replace(
            section,
            entry=_summed_across(section.entry),
            body=body.finished(),
            exit=_summed_across(section.exit),
        )


class _Body:
    """The ops of a section as it grows. Held ops, and the ops that must follow them, go before the next compute op.

    Collectives over different axes run in one order. So a gather that the compute op needs is placed before the sums
    across groups, for which no op waits before the update.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._body: list[Op] = []
        self._held: list[Op] = []
        self._touched = Touched(program)

    def add(self, op: Op) -> None:
        """Add the next op."""
        if isinstance(op, ops.Compute):
            self._release()
        if self._touched.is_against(op):
            self.hold([op])
        else:
            self._body.append(op)

    def hold(self, held: Iterable[Op]) -> None:
        """Hold ops back. Sums of gradients that one bucket completed become one launch."""
        for op in held:
            self._touched.add(op, len(self._held))
            merged = _merged(self._held[-1], op, self._program) if self._held else None
            if merged is None:
                self._held.append(op)
            else:
                self._held[-1] = merged

    def finished(self) -> tuple[Op, ...]:
        """Return all ops."""
        self._release()
        return tuple(self._body)

    def _release(self) -> None:
        self._body += self._held
        self._held = []
        self._touched = Touched(self._program)


def _completed(section: Section, program: Program) -> dict[int, list[Region]]:
    """Return the ops that complete a gradient of the step, as this rank's shard or in full, and its regions."""
    if section.name != LAST_MICRO_STEP:
        return {}
    last: dict[str, tuple[int, Region]] = {}
    for index, op in enumerate(section.body):
        regions: Sequence[Region] = ()
        match op:
            case ops.ReduceScatter() | ops.AllReduce():
                regions = [pair.destination for pair in op.pairs]
            case ops.Cast(mode=Mode.ACCUMULATE):
                regions = [op.destination]
            case _:
                continue
        for region in regions:
            holds = program.buffer_by_name[region.buffer].holds
            if isinstance(holds, FlatContent) and holds.quantity == GRAD:
                last[region.buffer] = (index, region)
    completed: dict[int, list[Region]] = {}
    for index, region in last.values():
        completed.setdefault(index, []).append(region)
    return completed


def _is_of_scalars(op: ops.AllReduce, program: Program) -> bool:
    return all(program.buffer_by_name[p.destination.buffer].role is Role.SCALAR for p in op.pairs)


def _across(regions: Sequence[Region], stream: str) -> Iterator[Op]:
    if regions:
        pairs = tuple(ops.Pair(source=region, destination=region) for region in regions)
        yield ops.AllReduce(pairs=pairs, comm=ACROSS_COMM, stream=stream)


def _merged(first: Op, second: Op, program: Program) -> ops.AllReduce | None:
    """Return two sums across groups as one launch, if they have one dtype."""
    if not (isinstance(first, ops.AllReduce) and isinstance(second, ops.AllReduce)):
        return None
    pairs = (*first.pairs, *second.pairs)
    dtypes = {program.buffer_by_name[pair.source.buffer].dtype for pair in pairs}
    is_alike = replace(second, pairs=first.pairs) == first and len(dtypes) == 1
    return replace(first, pairs=pairs) if is_alike else None


def _in_slices(op: ops.AllReduce) -> Iterator[Op]:
    """Yield an all-reduce within the group as reduce-scatter and all-gather; in between, slices are summed across."""
    wholes = [pair.destination for pair in op.pairs]
    slices = [replace(region, shard=SHARD_AXIS) for region in wholes]
    yield ops.ReduceScatter(
        pairs=tuple(
            ops.Pair(source=pair.source, destination=own)
            for pair, own in zip(op.pairs, slices, strict=True)
        ),
        comm=op.comm,
        stream=op.stream,
        reduction=op.reduction,
        wire_dtype=op.wire_dtype,
        staging=op.staging,
    )
    yield from _across(slices, op.stream)
    yield ops.AllGather(
        pairs=tuple(
            ops.Pair(source=own, destination=region)
            for own, region in zip(slices, wholes, strict=True)
        ),
        comm=op.comm,
        stream=op.stream,
        event=op.event,
    )


def _summed_across(state: State) -> State:
    """Return the state with its complete gradients also summed over the groups."""

    def changed(holding: Holding) -> Holding:
        content = rewrite.complete_gradient(holding)
        if content is None:
            return holding
        return replace(
            holding, content=replace(content, reduced=(REPLICATE_AXIS, *content.reduced))
        )

    return replace(state, holdings=tuple(changed(holding) for holding in state.holdings))


# -------------------------------------------------------------------------------------------------------- renaming


def _renamed(program: Program) -> Program:
    """Return the program with the name that its axis has among two axes."""

    def section(old: Section) -> Section:
        return replace(
            old,
            entry=_renamed_state(old.entry),
            body=tuple(rewrite.map_regions(op, _renamed_region) for op in old.body),
            exit=_renamed_state(old.exit),
        )

    return replace(
        rewrite.map_sections(program, section),
        comms=tuple(replace(comm, axis=_renamed_axis(comm.axis)) for comm in program.comms),
        buffers=tuple(
            replace(buffer, holds=None if buffer.holds is None else _renamed_content(buffer.holds))
            for buffer in program.buffers
        ),
    )


def _renamed_axis(axis: str) -> str:
    return SHARD_AXIS if axis == AXIS else axis


def _renamed_region(region: Region) -> Region:
    return region if region.shard is None else replace(region, shard=_renamed_axis(region.shard))


def _renamed_content(content: Content) -> Content:
    if not isinstance(content, FlatContent):
        return content
    shard = None if content.shard is None else _renamed_axis(content.shard)
    return replace(content, shard=shard, reduced=tuple(map(_renamed_axis, content.reduced)))


def _renamed_state(state: State) -> State:
    holdings = tuple(
        replace(h, region=_renamed_region(h.region), content=_renamed_content(h.content))
        for h in state.holdings
    )
    return replace(state, holdings=holdings)
