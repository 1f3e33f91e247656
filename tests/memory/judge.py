"""A training step on one rank of a pretended world, and what torch's allocator says of every op of it.

Collectives run as gloo's do, but for the sending and receiving: messages keep the values that their memory had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.memory.library import library_calls, without_scratch
from tests.support.allocations import left_bytes
from zeroir.ir import ops
from zeroir.ir.analysis.labels import labels
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Program
from zeroir.ir.segments.bindings import bindings
from zeroir.runtime.comm import gloo
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.comm.local import LocalComm
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.kernels.eager import EagerKernels
from zeroir.runtime.memory.allocations import AllocatorEvent, allocations, by_range, peak_bytes
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state import state
from zeroir.runtime.state.initial_values import initialise
from zeroir.torch_ops.batches import Batch
from zeroir.workspace.op_scratch import SCALAR_BYTES, scratch_bytes
from zeroir.workspace.segments import Workspace, eager_workspace

CPU = torch.device("cpu")
SCALAR_OPS = (ops.CheckFinite, ops.Guess, ops.Decide, ops.UpdateScale, ops.Scale)
"""Ops of which only a bound is declared, a few bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an op declares, what it took, without the scratch memory of libraries and with it, and what it left."""

    op: ops.Op
    label: str
    declared: Workspace
    counted_bytes: int
    peak_bytes: int
    left_bytes: int

    @property
    def is_right(self) -> bool:
        if self.left_bytes:
            return False
        if isinstance(self.op, ops.Collective):
            # What its backend takes is in no budget.
            return True
        if self.peak_bytes > self.declared.most_bytes:
            return False
        if isinstance(self.op, SCALAR_OPS):
            return True
        algorithm = self.op.algorithm if isinstance(self.op, ops.OptimizerStep) else None
        if algorithm is not None and algorithm.direction_dtype is not None:
            return True  # A bound, too: its products are a library's.
        is_ours = algorithm is Algorithm.LION or (
            isinstance(self.op, ops.OptimizerStep) and bool(self.op.scales)
        )
        if is_ours or isinstance(self.op, ops.Average | ops.Direction):
            # Numbers that scale tensors are scalars of the host.
            return 0 <= self.declared.counted_bytes - self.counted_bytes <= SCALAR_BYTES
        return self.counted_bytes == self.declared.counted_bytes

    def __str__(self) -> str:
        return (
            f"{self.label} declares {self.declared.counted_bytes} bytes and at most {self.declared.most_bytes}, took"
            f" {self.counted_bytes} and {self.peak_bytes}, and left {self.left_bytes} under torch {torch.__version__}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Every op of a step, and what was allocated by none: for the inputs' seeds and the step's results."""

    verdicts: Sequence[Verdict]
    others: Sequence[AllocatorEvent]

    @property
    def wrong(self) -> list[str]:
        return [str(one) for one in self.verdicts if not one.is_right]


def judge(
    program: Program,
    batches: Sequence[Batch],
    *,
    model: nn.Module | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
    rank: int = 0,
) -> Judged:
    """Carry out two steps of a rank, each with an evaluation, on one thread; the second pair is judged."""
    with stepping(
        program, batches, model=model, initial=initial, rank=rank, is_evaluated=True
    ) as step:
        events = allocations(step)
    names = labels(program)
    by_label = {names[position]: op for position, op in program.positioned_ops()}
    found = by_range(events, by_label)
    verdicts = [
        _verdict(program, op, label, found.get(label, ())) for label, op in by_label.items()
    ]
    return Judged(verdicts=verdicts, others=found.get("", ()))


@contextmanager
def stepping(
    program: Program,
    batches: Sequence[Batch],
    *,
    model: nn.Module | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
    rank: int = 0,
    is_evaluated: bool = False,
) -> Iterator[Callable[[], object]]:
    """What takes a step of a rank on one thread, after a first one; an evaluation follows if ``is_evaluated``."""
    memory = RankMemory(program, rank, CPU)
    local_ranks = LocalRanks(
        program=program, memories=[memory], comm=_comm(program, rank), kernels=EagerKernels(CPU)
    )
    local_ranks.compile()
    if model is not None:
        initialise(program, [memory], lambda: model, 0)
    if initial is not None:
        state.initialise_flats(program, [memory], initial)
    executor = StepExecutor(
        local_ranks, ThreadStreams(inline=[stream.name for stream in program.streams])
    )

    def step() -> None:
        executor.step([batches])
        if is_evaluated and program.eval_loss is not None:
            executor.evaluate(batches[:1])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.object(gloo, "_exchange", _zeros),
            mock.patch.object(dist, "broadcast", _nothing),
        ):
            step()
            yield step
    finally:
        torch.set_num_threads(threads)
        executor.close()


def _verdict(program: Program, op: ops.Op, label: str, events: Sequence[AllocatorEvent]) -> Verdict:
    calls = (
        library_calls(program.segment_by_name[op.segment]) if isinstance(op, ops.Compute) else ()
    )
    return Verdict(
        op=op,
        label=label,
        declared=_declared(program, op),
        counted_bytes=peak_bytes(without_scratch(events, calls)),
        peak_bytes=peak_bytes(events),
        left_bytes=left_bytes(events),
    )


def _declared(program: Program, op: ops.Op) -> Workspace:
    """What this op needs; of calls of one segment that bind its outputs differently, the program declares the most."""
    declared = scratch_bytes(program, op)
    if not isinstance(op, ops.Compute):
        return Workspace(counted_bytes=declared, most_bytes=declared)
    own = eager_workspace(program.segment_by_name[op.segment], bindings(op))
    assert own.most_bytes <= declared
    return own


def _comm(program: Program, rank: int) -> Comm:
    if program.mesh.world_size == 1:
        return LocalComm()
    coordinate = program.mesh.coordinate(rank)
    groups = {
        comm.name: _group(coordinate[comm.axis], program.mesh.size(comm.axis))
        for comm in program.comms
    }
    return gloo.GlooComm(groups)


def _group(rank: int, size: int) -> dist.ProcessGroup:
    """A group that nobody else is in, so that it needs no store."""
    make: Callable[[int, int], dist.ProcessGroup] = dist.ProcessGroup  # type: ignore[assignment]
    return make(rank, size)


def _zeros(_: object, incoming: Sequence[Sequence[torch.Tensor]], links: gloo._Links) -> None:
    """Receive zeros from the other ranks, which nobody is: kernels may not take any number that lies in memory."""
    near = () if links.near is None else links.near.peers
    for tensors in incoming:
        for peer in (*near, *links.far):
            tensors[peer].zero_()


def _nothing(*_: object, **__: object) -> None:
    pass
