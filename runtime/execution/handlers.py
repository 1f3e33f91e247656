"""The handlers: what each op does to the buffers of the ranks of this process.

Each op is prepared once: its tensors and its kernel are looked up, its views created. A step calls the prepared ops.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Final, assert_never

from torch import Tensor

from zeroir.errors import InternalError, UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.instances import instance, segments_at_ends
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Mode
from zeroir.ir.program import Program
from zeroir.ir.segments.bindings import Binding, bindings
from zeroir.runtime.comm.base import CollectiveTensors, Comm, TensorPair
from zeroir.runtime.eight_bit.compiled_rounding import CompiledRounding
from zeroir.runtime.execution import numerics
from zeroir.runtime.execution.anomalies import Anomalies
from zeroir.runtime.execution.batch import Shape
from zeroir.runtime.execution.prepared_op import PreparedOp
from zeroir.runtime.kernels.base import Kernel, Kernels
from zeroir.runtime.kernels.declared import misdeclared
from zeroir.runtime.kernels.foreign import require_registered
from zeroir.runtime.kernels.other_devices import require_device
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.optimizers.preparation import prepare_update
from zeroir.torch_ops.types import TORCH_DTYPE

MOST_SHAPES: Final = 64
"""The number of shapes of micro-batches for which prepared ops are kept."""


@dataclass(slots=True, kw_only=True)
class LocalRanks:
    """The ranks of this process: their memories, and the backends that communicate and compute for them.

    ``memories`` has one element with a real backend, and one for every rank of the mesh in lockstep. ``rounding`` is
    the compiled code that rounds states of 8 bits on the CPU; where it is None torch's operators do. ``anomalies``
    looks at the results of segments.

    Raises:
        UserError: where the types that a segment declares differ from those that its operators produce, or this device
            has others than the one for which it was captured, or an operator of a library or the model is not
            registered.
    """

    program: Program
    memories: Sequence[RankMemory]
    comm: Comm
    kernels: Kernels
    rounding: CompiledRounding | None = None
    anomalies: Anomalies | None = None
    is_checked: bool = False
    _kernels: dict[tuple[str, tuple[Binding | None, ...]], Kernel] = field(default_factory=dict)
    _temporary: frozenset[str] = field(init=False)
    _instances: OrderedDict[Shape, LocalRanks] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._temporary = frozenset(b.name for b in self.program.buffers if not b.is_persistent)
        if self.is_checked:
            return
        require_registered(self.program)
        problem = misdeclared(segments_at_ends(self.program))
        if problem is not None:
            raise UserError(
                f"The program cannot run: {problem}. It is damaged, or made for another version of torch; compile it "
                "again."
            )
        require_device(self.program, self.memories[0].device)

    def at(self, shape: Shape) -> LocalRanks:
        """Return the same ranks with the program for batches whose dims have these values; recent ones are kept."""
        if not shape:
            return self
        ranks = self._instances.get(shape)
        if ranks is None:
            if self.kernels.compiles_dims and not self._instances:
                self.compile()
            values = dict(zip((dim.name for dim in self.program.dims), shape, strict=True))
            ranks = replace(
                self,
                program=instance(self.program, values),
                kernels=self.kernels.at(values),
                is_checked=True,
                _kernels={},
                _instances=OrderedDict(),
            )
            self._instances[shape] = ranks
        self._instances.move_to_end(shape)
        while len(self._instances) > MOST_SHAPES:
            self._instances.popitem(last=False)
        return ranks

    def compile(self) -> None:
        """Compile every segment that the program calls, unless each shape has kernels of its own."""
        if self.program.dims and not self.kernels.compiles_dims:
            return
        for op in self.program.ops():
            if isinstance(op, ops.Compute):
                self.kernel(op)
        self.kernels.finish()

    def kernel(self, op: ops.Compute) -> Kernel:
        """Return the kernel of an op of the program; ops with the same segment and bindings share it."""
        # The key is the segment's name, because its digest takes longer to compute; the backend compares digests.
        key = (op.segment, tuple(bindings(op)))
        kernel = self._kernels.get(key)
        if kernel is None:
            segment = self.program.segment_by_name[op.segment]
            kernel = self._kernels[key] = self.kernels.compile(segment, key[1])
        return kernel

    def prepare(self, op: ops.Op, by_rank: Sequence[tuple[LocalRanks, ops.Op]] = ()) -> PreparedOp:
        """Return a function that runs an op for every local rank. Streams order the ops, so a ``wait`` does nothing.

        ``by_rank`` is the same op for the shape of each rank's micro-batch, and the ranks at that shape; without it the
        op is the same for all. The function raises InternalError where the op uses a buffer that is not allocated at
        that time.
        """
        match op:
            case ops.Wait():
                return lambda: None
            case ops.Collective():
                collective = self.prepare_collective(op)

                def run() -> None:
                    collective.require_live()
                    communicate(op, collective.tensors, self.comm)

                return run
            case ops.Memory():
                prepared_ops = [_prepare_locally(op, memory, self) for memory in self.memories]
            case _:
                names = self._temporaries(op)
                prepared_ops = [
                    _checked(_prepare_locally(own, memory, ranks), memory, names)
                    for memory, (ranks, own) in zip(
                        self.memories, by_rank or repeat((self, op)), strict=False
                    )
                ]
        if len(prepared_ops) == 1:
            return prepared_ops[0]

        def run_on_every_rank() -> None:
            for prepared in prepared_ops:
                prepared()

        return run_on_every_rank

    def prepare_collective(self, op: ops.CollectiveOp) -> PreparedCollective:
        """Return a collective with the tensors of every local rank."""
        pairs = [
            [
                TensorPair(
                    source=memory.region(pair.source), destination=memory.region(pair.destination)
                )
                for pair in op.pairs
            ]
            for memory in self.memories
        ]
        tensors = CollectiveTensors(
            comm=op.comm,
            pairs=pairs,
            staging=[_region(memory, op.staging) for memory in self.memories],
            wire_dtype=None if op.wire_dtype is None else TORCH_DTYPE[op.wire_dtype],
        )
        return PreparedCollective(
            tensors=tensors,
            temporaries=self._temporaries(op),
            memories=self.memories,
        )

    def _temporaries(self, op: ops.Op) -> frozenset[str]:
        effect = effects(op)
        used = {r.buffer for r in (*effect.reads, *effect.writes, *effect.accumulates)}
        return self._temporary & used


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCollective:
    """A collective's tensors, and the temporary buffers that contain them."""

    tensors: CollectiveTensors
    temporaries: frozenset[str]
    memories: Sequence[RankMemory]

    def require_live(self) -> None:
        """Raise InternalError unless every rank has allocated these buffers."""
        for memory in self.memories:
            memory.require(self.temporaries)


def _checked(prepared: PreparedOp, memory: RankMemory, names: frozenset[str]) -> PreparedOp:
    """Return the op, preceded by a check that the buffers it uses are allocated."""
    if not names:
        return prepared

    def checked() -> None:
        memory.require(names)
        prepared()

    return checked


def communicate(op: ops.CollectiveOp, tensors: CollectiveTensors, comm: Comm) -> None:
    """Run a collective on the backend."""
    match op:
        case ops.Gather():
            comm.all_gather(tensors)
        case ops.ReduceScatter():
            comm.reduce_scatter(tensors, op.reduction)
        case ops.AllReduce():
            comm.all_reduce(tensors, op.reduction)
        case ops.Broadcast():
            comm.broadcast(tensors, op.root)
        case _:
            assert_never(op)


def _prepare_locally(
    op: ops.Op,
    memory: RankMemory,
    local_ranks: LocalRanks,
) -> PreparedOp:
    match op:
        case ops.Alloc():
            return partial(memory.alloc, op.buffer)
        case ops.Release():
            return partial(memory.release, op.buffer)
        case ops.Compute():
            kernel = local_ranks.kernel(op)
            if local_ranks.anomalies is not None:
                segment = local_ranks.program.segment_by_name[op.segment]
                kernel = local_ranks.anomalies.around(op, segment, kernel)
            return partial(
                kernel,
                [memory.view(argument.view) for argument in op.arguments],
                [None if d is None else memory.view(d.view) for d in op.destinations],
            )
        case ops.Cast():
            source, destination = memory.region(op.source), memory.region(op.destination)
            if op.mode is Mode.WRITE:
                return partial(destination.copy_, source, non_blocking=True)
            return partial(numerics.add, source, destination)
        case ops.Fill():
            return partial(memory.region(op.destination).fill_, op.value)
        case ops.Scale():
            return partial(numerics.scale, memory.region(op.region), memory.region(op.by))
        case ops.GradNorm() | ops.CheckFinite():
            is_norm = isinstance(op, ops.GradNorm)
            return partial(
                numerics.sum_of_squares if is_norm else numerics.has_overflow,
                [memory.region(source) for source in op.sources],
                memory.region(op.destination),
                is_added=op.mode is Mode.ACCUMULATE,
            )
        case ops.Guess():
            return partial(
                numerics.guess,
                step=memory.region(op.step),
                next_step=memory.region(op.next_step),
                gradient_divisor=memory.region(op.gradient_divisor),
                divisor=op.divisor,
                loss_scale=_region(memory, op.loss_scale),
                weight=_region(memory, op.weight),
            )
        case ops.Decide():
            return partial(
                numerics.decide,
                steps=[memory.region(count) for count in (op.step, *op.counts)],
                gradient_divisor=memory.region(op.gradient_divisor),
                divisor=op.divisor,
                overflow=_region(memory, op.overflow),
                norm=_region(memory, op.norm),
                loss_scale=_region(memory, op.loss_scale),
                skip=_region(memory, op.skip),
                max_norm=op.max_norm,
                weight=_region(memory, op.weight),
                guess=_region(memory, op.guess),
                redo=_region(memory, op.redo),
            )
        case ops.Direction() | ops.OptimizerStep() | ops.SpeculativeStep() | ops.CommitStep():
            return prepare_update(op, memory, local_ranks.program, local_ranks.rounding)
        case ops.Average():
            return partial(
                numerics.average,
                memory.region(op.param),
                memory.region(op.average),
                op.decay,
                _region(memory, op.skip),
            )
        case ops.UpdateScale():
            return partial(
                numerics.update_scale,
                memory.region(op.state),
                memory.region(op.skip),
                window=op.window,
                factor=op.factor,
                hysteresis=op.hysteresis,
                minimum=op.minimum,
                refill=op.refill,
                weight=_region(memory, op.weight),
            )
        case ops.Load():
            return memory.loading(op.source, op.destination)
        case ops.Store():
            return memory.storing(op.source, op.destination)
        case ops.Transfer():
            return partial(
                memory.region(op.destination).copy_, memory.region(op.source), non_blocking=True
            )
        case ops.Wait() | ops.Collective():
            raise InternalError(f"a rank does not run {ops.op_name(type(op))} by itself")
        case _:
            assert_never(op)


def _region(memory: RankMemory, region: Region | None) -> Tensor | None:
    return None if region is None else memory.region(region)
