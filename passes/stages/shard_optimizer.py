"""ZeRO stage 1: each rank updates only its shard of every flat, and keeps master weights and moments only for it.

The all-reduce of a gradient becomes a reduce-scatter into the slice of this rank; the rest of the buffer has this
rank's own contributions, which no op reads. Master weights and optimizer states shrink to shards, and the optimizer
updates slices. Each flat's new parameters are gathered on a separate stream right after their update, during the update
of the next flat.

An optimizer that works on whole parameters computes directions slice by slice. They are gathered during the step of the
previous flat, and each rank computes the steps of the parameters that overlap its slice. Where it also needs the
parameters of the whole flat, or a sharded state of whole parameters, the same launch gathers these.

What ``shard-optimizer`` changes::

    + comm gather axis=dp
    - buffer %a.momentum_buffer : f32[512] device state = momentum_buffer a
    + buffer %a.momentum_buffer : f32[256] device state = momentum_buffer a @dp
      wait !1  on=reduce
    - all_reduce %a.grad -> %a.grad  comm=reduce stream=reduce
    + reduce_scatter %a.grad -> %a.grad[0:512]@dp  comm=reduce stream=reduce
    - exit %a.grad = grad a reduced=(dp) micro=all
    + exit %a.grad[0:512]@dp = grad a @dp reduced=(dp) micro=all
      section update {
    - optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
    + !0 = optimizer_step momentum param=%a.param[0:512]@dp grad=%a.grad[0:512]@dp states=(%a.momentum_buffer) …
    + wait !0  on=gather
    + all_gather %a.param[0:512]@dp -> %a.param  comm=gather stream=gather
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import DIRECTION, FlatContent
from zeroir.ir.layout import padded_numel
from zeroir.ir.mesh import GATHER, Communicator
from zeroir.ir.ops import Op
from zeroir.ir.optimizers.catalogue import OWN_STATES
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Flat, Program, Section, State
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched
from zeroir.passes.stages.all_reduce_gradients import AXIS

GATHER_COMM = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptimizer(Pass):
    """Update each parameter on the rank that owns it."""

    name: ClassVar[str] = "shard-optimizer"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.GRADIENTS_REDUCED, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.OPTIMIZER_SHARDED})
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with the optimizer sharded over the data-parallel axis."""
        size = program.mesh.size(AXIS)
        homes = rewrite.flat_of_buffer(program)
        wholes = _wholes(program, size)
        beside = {name: (program.buffer_by_name[name], buffer) for name, buffer in wholes.items()}
        program = rewrite.replace_buffers(program, beside)
        shards = _shards(program, homes)

        def rewritten(section: Section) -> Section:
            if section.name == LAST_MICRO_STEP:
                return _scatter_gradients(section)
            if section.name == UPDATE:
                return _update_shards(section, program, homes, shards, wholes)
            return section

        program = replace(
            rewrite.map_sections(program, rewritten),
            comms=(Communicator(name=GATHER_COMM, axis=AXIS), *program.comms),
        )
        changed = {
            name: (rewrite.sharded(program.buffer_by_name[name], AXIS, size),) for name in shards
        }
        for name, buffer in _sharded_states(program).items():
            padded = replace(buffer, numel=padded_numel(buffer.numel, size))
            changed[name] = (rewrite.sharded(padded, AXIS, size),)
        return rewrite.replace_buffers(program, changed)


def _shards(program: Program, homes: Mapping[str, Flat]) -> frozenset[str]:
    """Return the buffers that shrink: master weights, states, and the update's temporary buffers of the same elements.

    Directions are gathered in place, so their buffers are not sharded.
    """
    update = program.section_by_name[UPDATE].body
    temporaries = {op.buffer for op in update if isinstance(op, ops.Alloc)}
    temporaries -= {op.direction.buffer for op in update if isinstance(op, ops.Direction)}
    return frozenset(
        name
        for name in homes
        if name in temporaries or program.buffer_by_name[name].role in (Role.MASTER, Role.STATE)
    )


def _sharded_states(program: Program) -> Mapping[str, Buffer]:
    """Return the states of whole parameters that are large enough to shard."""
    return {
        buffer.name: buffer
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
        and (state := OWN_STATES.get(buffer.holds.quantity)) is not None
        and state.is_sharded
    }


def _wholes(program: Program, size: int) -> Mapping[str, Buffer]:
    """Return new buffers for the other operands of a whole flat that a step reads, by the buffers of its directions.

    The operands are the parameters, or a sharded state, which is padded for the ranks.
    """
    wholes: dict[str, Buffer] = {}
    for op in program.ops():
        if not isinstance(op, ops.OptimizerStep) or op.factors is None:
            continue
        is_sharded = op.factors.buffer in _sharded_states(program)
        wholes[op.grad.buffer] = Buffer(
            name=f"{op.grad.buffer.removesuffix(f'.{DIRECTION}')}.whole",
            dtype=program.buffer_by_name[op.param.buffer].dtype,
            numel=padded_numel(op.factors.numel, size) if is_sharded else op.grad.numel,
            space=Space.DEVICE,
            role=Role.STAGING,
        )
    return wholes


def _own_slices(state: State) -> State:
    """Return the state in which only this rank's slice of every complete gradient exists."""
    holdings = tuple(
        replace(holding, region=_slice(holding.region), content=replace(content, shard=AXIS))
        if (content := rewrite.complete_gradient(holding)) is not None
        else holding
        for holding in state.holdings
    )
    return replace(state, holdings=holdings)


def _scatter_gradients(section: Section) -> Section:
    gradients = rewrite.complete_gradients(section)

    def rewritten(op: Op) -> Op:
        if not (
            isinstance(op, ops.AllReduce) and all(p.source.buffer in gradients for p in op.pairs)
        ):
            return op
        return ops.ReduceScatter(
            pairs=tuple(ops.Pair(source=p.source, destination=_slice(p.source)) for p in op.pairs),
            comm=op.comm,
            stream=op.stream,
            reduction=op.reduction,
            event=op.event,
            wire_dtype=op.wire_dtype,
            staging=op.staging,
        )

    body = tuple(rewritten(op) for op in section.body)
    return replace(section, body=body, exit=_own_slices(section.exit))


def _update_shards(
    section: Section,
    program: Program,
    homes: Mapping[str, Flat],
    shards: frozenset[str],
    wholes: Mapping[str, Buffer],
) -> Section:
    size = program.mesh.size(AXIS)
    sharded = _sharded_states(program)

    def change(region: Region) -> Region:
        if region.buffer not in homes:
            return region
        if not rewrite.is_whole(region, program):
            raise UserError(
                f"%{region.buffer}[{region.offset}:{region.stop}] is updated apart from the rest of "
                f"its flat; `{ShardOptimizer.name}` needs flats whose parameters are all updated alike."
            )
        return rewrite.as_shard(region, size) if region.buffer in shards else _slice(region)

    def rewritten(op: Op) -> tuple[Op, ...]:
        match op:
            case ops.OptimizerStep() if op.algorithm.direction_dtype is not None:
                sliced = replace(op, param=change(op.param))
                whole = wholes.get(op.grad.buffer)
                if op.factors is not None and op.factors.buffer in sharded:
                    numel = padded_numel(op.factors.numel, size) // size
                    sliced = replace(sliced, factors=replace(op.factors, numel=numel))
                    return tuple(_gather_whole(sliced, whole, sliced.factors))
                return tuple(_gather_whole(sliced, whole, sliced.param))
            case ops.Cast() | ops.Direction() | ops.OptimizerStep() | ops.Average():
                return (rewrite.map_regions(op, change),)
            case ops.Fill() if op.destination.buffer in shards:
                return (rewrite.map_regions(op, change),)
            case _:
                return (op,)

    body = _gathered_ahead(chain.from_iterable(map(rewritten, section.body)), program)
    writers = SectionView(program, body).writers
    after: dict[int, list[Op]] = {}
    for name in rewrite.param_buffers(program):
        if name in writers:
            full = Region(buffer=name, offset=0, numel=program.buffer_by_name[name].numel)
            gather = ops.AllGather(
                pairs=(ops.Pair(source=_slice(full), destination=full),),
                comm=GATHER_COMM,
                stream=GATHER,
            )
            after.setdefault(_last_update(body, name, writers[name][-1]), []).append(gather)
    return replace(
        section, entry=_own_slices(section.entry), body=rewrite.insert(body, after=after)
    )


def _gather_whole(
    step: ops.OptimizerStep, whole: Buffer | None, source: Region | None
) -> Iterator[Op]:
    """Gather the directions of all ranks, and ``source`` where the step needs all of it, before a step on a slice."""
    pairs = [ops.Pair(source=_slice(step.grad), destination=step.grad)]
    if whole is None or source is None:
        yield ops.AllGather(pairs=tuple(pairs), comm=GATHER_COMM, stream=GATHER)
        yield step
        return
    region = Region(buffer=whole.name, offset=0, numel=whole.numel)
    pairs.append(ops.Pair(source=source, destination=region))
    yield ops.Alloc(buffer=whole.name, stream=GATHER)
    yield ops.AllGather(pairs=tuple(pairs), comm=GATHER_COMM, stream=GATHER)
    yield replace(step, whole=region)
    yield ops.Release(buffer=whole.name, stream=step.stream)


def _gathered_ahead(body: Iterable[Op], program: Program) -> tuple[Op, ...]:
    """Return the update with each step on whole parameters after the next gather of directions, which it overlaps."""
    ordered: list[Op] = []
    held: list[Op] = []
    touched = Touched(program)
    for op in body:
        is_step = isinstance(op, ops.OptimizerStep) and op.algorithm.direction_dtype is not None
        if not is_step and not touched.is_against(op):
            ordered.append(op)
            if isinstance(op, ops.AllGather):
                ordered += held
                held, touched = [], Touched(program)
            continue
        touched.add(op, len(held))
        held.append(op)
    return (*ordered, *held)


def _last_update(body: Sequence[Op], name: str, writer: int) -> int:
    """Return the last op that computes or averages the new parameters.

    ``writer`` is the last one that computes them.
    """
    averages = (
        index
        for index, op in enumerate(body)
        if isinstance(op, ops.Average) and op.param.buffer == name
    )
    return max((writer, *averages))


def _slice(region: Region) -> Region:
    return replace(region, shard=AXIS)
