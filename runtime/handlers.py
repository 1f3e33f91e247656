"""What each op does to the buffers of the ranks that this process drives.

An op is prepared once: its tensors are looked up, its views made, its kernel found. A step calls what was prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.bindings import bindings
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent
from zeroir.ir.effects import effects
from zeroir.ir.ops import Mode
from zeroir.ir.program import Program
from zeroir.runtime import numerics, optim
from zeroir.runtime.comm.base import Comm, Launch, Piece
from zeroir.runtime.kernels.base import Kernel, Kernels
from zeroir.runtime.kernels.declared import misdeclared
from zeroir.runtime.state import flat_start
from zeroir.runtime.storage import Memory
from zeroir.runtime.tensors import TORCH_DTYPE

Step = Callable[[], object]
"""An op with everything about it settled that does not change from step to step."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """What ops act on: the memories of the local ranks, and who moves and computes for them.

    ``ranks`` has one element on a real backend, every rank of the mesh in lockstep.

    Raises:
        UserError: where a segment declares other types than its operators make.
    """

    program: Program
    ranks: Sequence[Memory]
    comm: Comm
    kernels: Kernels
    # By identity: hashing an op costs more than running it, and the program keeps its ops alive.
    _kernel_by_op: dict[int, Kernel] = field(default_factory=dict)
    _launch_by_op: dict[int, tuple[Launch, frozenset[str]]] = field(default_factory=dict)
    _temporary: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        problem = misdeclared(self.program.segments)
        if problem is not None:
            raise UserError(
                f"The program cannot run: {problem}. It is damaged, or made for another version of torch; compile it "
                "again."
            )
        self._temporary = frozenset(b.name for b in self.program.buffers if not b.is_persistent)

    def compile(self) -> None:
        """Compile every segment that the program calls, before the first step."""
        for op in self.program.ops():
            if isinstance(op, ops.Compute):
                self.kernel(op)
        self.kernels.finish()

    def kernel(self, op: ops.Compute) -> Kernel:
        """The kernel of one op of the program."""
        found = self._kernel_by_op.get(id(op))
        if found is None:
            segment = self.program.segment_by_name[op.segment]
            found = self.kernels.compile(segment, bindings(op))
            self._kernel_by_op[id(op)] = found
        return found

    def prepare(self, op: ops.Op) -> Step:
        """What carries out one op for every local rank. Order is the streams' affair: a ``wait`` does nothing here.

        It raises InternalError where the op uses a buffer that is not allocated by then.
        """
        match op:
            case ops.Wait():
                return lambda: None
            case ops.Collective():
                return lambda: communicate(op, self.launch(op), self.comm)
            case ops.Memory():
                steps = [_prepare_locally(op, memory, self) for memory in self.ranks]
            case _:
                names = self._temporaries(op)
                steps = [
                    _checked(_prepare_locally(op, memory, self), memory, names)
                    for memory in self.ranks
                ]
        if len(steps) == 1:
            return steps[0]

        def everywhere() -> None:
            for step in steps:
                step()

        return everywhere

    def launch(self, op: ops.CollectiveOp) -> Launch:
        """A collective with the tensors of every local rank; InternalError where one is not allocated."""
        found = self._launch_by_op.get(id(op))
        if found is None:
            found = self._launch_by_op[id(op)] = (_launch(op, self), self._temporaries(op))
        what, names = found
        for memory in self.ranks:
            memory.require(names)
        return what

    def _temporaries(self, op: ops.Op) -> frozenset[str]:
        found = effects(op)
        used = {r.buffer for r in (*found.reads, *found.writes, *found.accumulates)}
        return self._temporary & used


def _checked(step: Step, memory: Memory, names: frozenset[str]) -> Step:
    """The step, after the buffers that it uses are found to be allocated."""
    if not names:
        return step

    def checked() -> None:
        memory.require(names)
        step()

    return checked


def _launch(op: ops.CollectiveOp, machine: Machine) -> Launch:
    return Launch(
        comm=op.comm,
        pieces=[
            [
                Piece(
                    source=memory.region(pair.source), destination=memory.region(pair.destination)
                )
                for pair in op.pairs
            ]
            for memory in machine.ranks
        ],
        staging=[
            None if op.staging is None else memory.region(op.staging) for memory in machine.ranks
        ],
        wire_dtype=None if op.wire_dtype is None else TORCH_DTYPE[op.wire_dtype],
    )


def communicate(op: ops.CollectiveOp, what: Launch, comm: Comm) -> None:
    """Hand a collective to the backend."""
    match op:
        case ops.AllGather() | ops.Prefetch():
            comm.all_gather(what)
        case ops.ReduceScatter():
            comm.reduce_scatter(what, op.reduction)
        case ops.AllReduce():
            comm.all_reduce(what, op.reduction)
        case ops.Broadcast():
            comm.broadcast(what, op.root)
        case _:
            assert_never(op)


def _prepare_locally(
    op: ops.MemoryOp | ops.Compute | ops.ElementwiseOp | ops.UpdateOp | ops.TransferOp,
    memory: Memory,
    machine: Machine,
) -> Step:
    match op:
        case ops.Alloc():
            return partial(memory.alloc, op.buffer)
        case ops.Release():
            return partial(memory.release, op.buffer)
        case ops.Compute():
            return partial(
                machine.kernel(op),
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
            return partial(memory.region(op.region).mul_, memory.region(op.by))
        case ops.GradNorm():
            sources = [memory.region(source) for source in op.sources]
            return partial(numerics.sum_of_squares, sources, memory.region(op.destination))
        case ops.CheckFinite():
            sources = [memory.region(source) for source in op.sources]
            return partial(numerics.has_overflow, sources, memory.region(op.destination))
        case ops.Decide():
            return partial(
                numerics.decide,
                step=memory.region(op.step),
                gradient_divisor=memory.region(op.gradient_divisor),
                divisor=op.divisor,
                overflow=_region(memory, op.overflow),
                norm=_region(memory, op.norm),
                loss_scale=_region(memory, op.loss_scale),
                skip=_region(memory, op.skip),
                max_norm=op.max_norm,
            )
        case ops.OptimizerStep():
            operands = optim.Operands(
                param=memory.region(op.param),
                grad=memory.region(op.grad),
                states=[memory.region(state) for state in op.states],
                step=memory.region(op.step),
                lr=memory.region(op.lr),
                hyper=memory.region(op.hyper),
                divisor=memory.region(op.gradient_divisor),
                skip=_region(memory, op.skip),
                padding=_padding(op.param, memory, machine.program),
            )
            return partial(optim.update, op.algorithm, operands)
        case ops.UpdateScale():
            return partial(
                numerics.update_scale,
                memory.region(op.state),
                memory.region(op.skip),
                window=op.window,
                factor=op.factor,
                hysteresis=op.hysteresis,
                minimum=op.minimum,
            )
        case ops.Transfer():
            return partial(
                memory.region(op.destination).copy_, memory.region(op.source), non_blocking=True
            )
        case _:
            assert_never(op)


def _region(memory: Memory, region: Region | None) -> Tensor | None:
    return None if region is None else memory.region(region)


def _padding(region: Region, memory: Memory, program: Program) -> list[Tensor]:
    """The parts of a region of parameters that belong to no parameter, on this rank."""
    buffer = program.buffer_by_name[region.buffer]
    if not isinstance(buffer.holds, FlatContent):
        return []
    mesh = program.mesh
    first, stop = region.local_range(mesh, mesh.coordinate(memory.rank))
    start = flat_start(program, buffer, memory.rank)
    found: list[Tensor] = []
    free = first  # everything before is a parameter's, or found
    for slot in program.flat_by_name[buffer.holds.flat].slots:
        taken = max(slot.offset - start, first)
        if free < min(taken, stop):
            found.append(memory.buffer(buffer.name)[free : min(taken, stop)])
        free = max(free, slot.offset + slot.numel - start)
    if free < stop:
        found.append(memory.buffer(buffer.name)[free:stop])
    return found
