"""What each op does to the buffers of the ranks that this process drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from torch import Tensor

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Mode
from zeroir.ir.program import Program
from zeroir.runtime import numerics, optim
from zeroir.runtime.comm.base import Comm, Launch, Piece
from zeroir.runtime.kernels.base import Binding, Kernel, Kernels
from zeroir.runtime.storage import Memory
from zeroir.runtime.tensors import TORCH_DTYPE


@dataclass(slots=True, kw_only=True)
class Machine:
    """What ops act on: the memories of the local ranks, and who moves and computes for them.

    ``ranks`` has one element on a real backend, every rank of the mesh in lockstep.
    """

    program: Program
    ranks: Sequence[Memory]
    comm: Comm
    kernels: Kernels
    _kernel_by_op: dict[int, Kernel] = field(default_factory=dict)

    def compile(self) -> None:
        """Compile every segment that the program calls, before the first step."""
        for op in self.program.ops():
            if isinstance(op, ops.Compute):
                self.kernel(op)

    def kernel(self, op: ops.Compute) -> Kernel:
        """The kernel of one op of the program."""
        # By identity: hashing an op costs more than running it, and the program keeps its ops alive.
        found = self._kernel_by_op.get(id(op))
        if found is None:
            segment = self.program.segment_by_name[op.segment]
            found = self.kernels.compile(segment, bindings(op))
            self._kernel_by_op[id(op)] = found
        return found


def handle(op: ops.Op, machine: Machine) -> None:
    """Carry out one op for every local rank. Order is the streams' affair: a ``wait`` does nothing here."""
    match op:
        case ops.Wait():
            pass
        case (
            ops.AllGather()
            | ops.Prefetch()
            | ops.ReduceScatter()
            | ops.AllReduce()
            | ops.Broadcast()
        ):
            communicate(op, launch(op, machine), machine.comm)
        case _:
            for memory in machine.ranks:
                _handle_locally(op, memory, machine)


def launch(op: ops.Collective, machine: Machine) -> Launch:
    """A collective with the tensors of every local rank."""
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


def communicate(op: ops.Collective, what: Launch, comm: Comm) -> None:
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


def bindings(op: ops.Compute) -> list[Binding | None]:
    """How each output of a call meets its destination."""
    touched = [argument.view.region.buffer for argument in op.arguments]
    touched += [d.view.region.buffer for d in op.destinations if d is not None]
    found: list[Binding | None] = []
    for destination in op.destinations:
        if destination is None:
            found.append(None)
            continue
        view = destination.view
        is_shared = touched.count(view.region.buffer) > 1 and any(
            _overlap(view.region, other)
            for other in [
                *(argument.view.region for argument in op.arguments),
                *(d.view.region for d in op.destinations if d and d is not destination),
            ]
        )
        found.append(Binding(mode=destination.mode, stride=view.stride, is_exclusive=not is_shared))
    return found


def _overlap(a: Region, b: Region) -> bool:
    """Whether two regions may share an element; slices of a mesh axis count with what they are cut from."""
    return a.buffer == b.buffer and a.offset < b.stop and b.offset < a.stop


def _handle_locally(
    op: ops.Memory | ops.Compute | ops.Cast | ops.Fill | ops.Scale | ops.Update | ops.Transfer,
    memory: Memory,
    machine: Machine,
) -> None:
    match op:
        case ops.Alloc():
            memory.alloc(op.buffer, op.stream)
        case ops.Release():
            memory.release(op.buffer, op.stream)
        case ops.Compute():
            machine.kernel(op)(
                [memory.view(argument.view) for argument in op.arguments],
                [None if d is None else memory.view(d.view) for d in op.destinations],
            )
        case ops.Cast():
            source, destination = memory.region(op.source), memory.region(op.destination)
            if op.mode is Mode.WRITE:
                destination.copy_(source, non_blocking=True)
            else:
                destination.add_(_narrowed(source, destination))
        case ops.Fill():
            memory.region(op.destination).fill_(op.value)
        case ops.Scale():
            memory.region(op.region).mul_(memory.region(op.by))
        case ops.GradNorm():
            sources = [memory.region(source) for source in op.sources]
            numerics.sum_of_squares(sources, memory.region(op.destination))
        case ops.CheckFinite():
            sources = [memory.region(source) for source in op.sources]
            numerics.has_overflow(sources, memory.region(op.destination))
        case ops.Decide():
            numerics.decide(
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
            )
            optim.update(op.algorithm, operands)
        case ops.UpdateScale():
            numerics.update_scale(
                memory.region(op.state),
                memory.region(op.skip),
                window=op.window,
                factor=op.factor,
                hysteresis=op.hysteresis,
                minimum=op.minimum,
            )
        case ops.ToHost() | ops.ToDevice() | ops.Load() | ops.Store():
            memory.region(op.destination).copy_(memory.region(op.source), non_blocking=True)
        case _:
            assert_never(op)


def _narrowed(source: Tensor, destination: Tensor) -> Tensor:
    """The source in the destination's dtype if that is narrower, because adding happens in the destination's."""
    is_wider = source.dtype.itemsize > destination.dtype.itemsize
    return source.to(destination.dtype) if is_wider else source


def _region(memory: Memory, region: Region | None) -> Tensor | None:
    return None if region is None else memory.region(region)
