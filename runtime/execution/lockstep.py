"""All ranks of a program in one process: the reference semantics of the IR.

Ops that no wait orders may run in any order, and here they do: each stream is a queue, and a seeded scheduler chooses
the queue whose head runs next. A collective takes two turns. Between them its destinations contain NaN, and the
scheduler chooses whether its sources are read in the first or the second. Undefined and released memory also contains
NaN, and using a released buffer is an error. So a program that lacks a wait gives wrong numbers, or an error, for some
seed, and a correct program gives the same numbers for every seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.mesh import HOST
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.memory.placement import places_to_run
from zeroir.runtime.checkpoint.checkpointer import Checkpointer, Running
from zeroir.runtime.checkpoint.loading import LoadedState
from zeroir.runtime.checkpoint.model_facts import ModelFacts
from zeroir.runtime.comm.base import CollectiveTensors, TensorPair
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, Backend, Job
from zeroir.runtime.comm.lockstep import LockstepComm
from zeroir.runtime.engine.live_optimizer import LiveOptimizer, SettingsOfRanks
from zeroir.runtime.engine.results import RankEvaluation, RankResult
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks, PreparedCollective, communicate
from zeroir.runtime.execution.streams import OpEvent
from zeroir.runtime.execution.trace import Task, WatchOp
from zeroir.runtime.kernels.choice import KernelBackend, open_kernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import poison
from zeroir.runtime.state import initial_values, state
from zeroir.runtime.state.host_snapshot import SavedState
from zeroir.runtime.state.initial_module import Factory
from zeroir.runtime.training.micro_batch_weights import WeightFunction
from zeroir.torch_ops.batches import Batch

CPU = torch.device("cpu")


class Lockstep:
    """All ranks of a program, stepped together. ``schedule_seed`` determines the order of unordered ops.

    Ops of ``late_streams`` run as late as waits allow.
    """

    def __init__(
        self,
        program: Program,
        *,
        seed: int = 0,
        schedule_seed: int = 0,
        late_streams: Collection[str] = (),
        kernels: KernelBackend = KernelBackend.EAGER,
        weight: WeightFunction | None = None,
        disk_folder: Path | None = None,
    ) -> None:
        self.program = program
        placed = places_to_run(program)
        self._memories = [
            RankMemory(program, rank, CPU, is_poisoned=True, placed=placed, disk_folder=disk_folder)
            for rank in range(program.mesh.world_size)
        ]
        self._local_ranks = LocalRanks(
            program=program,
            memories=self._memories,
            comm=LockstepComm(program),
            kernels=open_kernels(kernels, CPU),
        )
        generator = random.Random(schedule_seed)
        self._executor = StepExecutor(
            self._local_ranks,
            SeededStreams(self._local_ranks, generator, frozenset(late_streams)),
            seed=seed,
            weight=weight,
        )

    def initialise(self, factory: Factory, seed: int) -> None:
        """Initialise every rank's buffers from the user's module, as ``initial_values.initialise`` does."""
        initial_values.initialise(self.program, self._memories, factory, seed)
        self._poison_stale_gradients()

    def initialise_flats(self, values: Mapping[str, Tensor]) -> None:
        """Initialise every rank's buffers by name, as ``state.initialise_flats`` does."""
        state.initialise_flats(self.program, self._memories, values)
        self._poison_stale_gradients()

    def save(self, path: str) -> None:
        """Save the state of all ranks, as ``Engine.save`` does."""
        self._checkpoints.save(
            self._running,
            path,
            metrics={},
            shared=None,
            states=[None] * len(self._memories),
            wait=True,
            read_back=False,
        )

    def load(self, path: str) -> LoadedState:
        """Load a checkpoint on all ranks, as ``Engine.load`` does."""
        loaded = self._checkpoints.load(self._running, path, weights_only=False, has_values=False)
        self._poison_stale_gradients()
        return loaded

    @property
    def _running(self) -> Running:
        return Running(
            program=self.program,
            memories=self._memories,
            executor=self._executor,
            optimizer=self.optimizer if self.program.groups else None,
            facts=ModelFacts,
        )

    @cached_property
    def _job(self) -> Job:
        """The job of one process that has all ranks."""
        return Job(
            rank=0,
            backend=Backend.LOCAL,
            comm=self._local_ranks.comm,
            is_alone=True,
            device=CPU,
        )

    @cached_property
    def _checkpoints(self) -> Checkpointer:
        return Checkpointer(self._job, DEFAULT_TIMEOUT)

    @cached_property
    def optimizer(self) -> LiveOptimizer:
        """The settings of the optimizer groups of all ranks; changes apply from the next update on."""
        optimizer = LiveOptimizer(self.program, self._memories, self._executor.update)
        self._executor.settings = SettingsOfRanks(optimizer=optimizer, job=self._job)
        return optimizer

    def step(self, batches: Sequence[Sequence[Batch]]) -> list[RankResult]:
        """Run one training step on ``batches[rank][micro_step]``; return one result per rank."""
        return self._executor.step(batches)

    def micro_step(self, batches: Sequence[Batch], *, is_last: bool) -> list[Tensor]:
        """Run one micro-step on one batch per rank; return the loss of each, f32[]."""
        losses = self._executor.micro_steps([[batch] for batch in batches], is_last=is_last)
        return [loss[0] for loss in losses]

    def micro_steps(self, groups: Sequence[Sequence[Batch]], *, is_last: bool) -> list[Tensor]:
        """Run as many micro-steps as a section runs, on ``groups[rank][micro_step]``.

        Return the losses of each rank.
        """
        return self._executor.micro_steps(groups, is_last=is_last)

    def update(self) -> list[RankResult]:
        """Run the update after the last micro-step; return one result per rank."""
        return self._executor.update()

    def evaluate(self, batches: Sequence[Batch]) -> list[RankEvaluation]:
        """Evaluate one batch per rank by the ``evaluate`` section."""
        return self._executor.evaluate(batches)

    def save_state(self) -> list[SavedState]:
        """Copy the state of each rank to snapshots, as ``StepExecutor.save_state`` does."""
        return self._executor.save_state()

    def buffers(self, rank: int) -> Mapping[str, Tensor]:
        """Return the persistent buffers of one rank except its snapshots; only those on disk are copied."""
        memory = self._memories[rank]
        return {
            b.name: memory.read(b.name)
            for b in self.program.buffers
            if b.is_persistent and b.role is not Role.SNAPSHOT
        }

    def full_parameters(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return all parameters by name, unsharded, FP32 master weights where there are any; with ``ema`` the averages.

        Raises:
            UserError: with ``ema``, where the program keeps no averages.
        """
        self._executor.finish()
        comm = self._local_ranks.comm
        return state.full_parameters(self.program, self._memories, comm, ema=ema)

    def full_state(self) -> dict[tuple[str, str], Tensor]:
        """Return parameters, master weights and states by (flat, quantity), unsharded, without the padding at the end.

        Raises:
            InternalError: where ranks have different bits of the same elements, or padding is not zero.
        """
        self._executor.finish()
        return state.full_state(self.program, self._memories, self._local_ranks.comm)

    def _poison_stale_gradients(self) -> None:
        for buffer in self.program.buffers:
            content = buffer.holds
            if not isinstance(content, FlatContent) or content.micro is not Micro.STALE:
                continue
            flat = self.program.flat_by_name[content.flat]
            for memory in self._memories:
                start = state.flat_start(self.program, buffer, memory.rank)
                target = memory.buffer(buffer.name)
                for slot in flat.slots:
                    first, stop = slot.offset - start, slot.offset + slot.numel - start
                    poison(target[max(first, 0) : max(stop, 0)])


# ---------------------------------------------------------------------------------------------------- scheduler


@dataclass(slots=True, kw_only=True)
class _QueuedOp:
    """A queued op and the event that it signals or waits for; ``begun`` are the tensors of a collective in progress."""

    op: Op
    run: Task
    event: OpEvent
    collective: PreparedCollective | None = None
    begun: CollectiveTensors | None = None


class SeededStreams:
    """Streams as queues; a seeded random choice among the heads that are ready runs next."""

    def __init__(
        self,
        local_ranks: LocalRanks,
        generator: random.Random,
        late_streams: frozenset[str] = frozenset(),
    ) -> None:
        self._late_streams = late_streams
        self._local_ranks = local_ranks
        self._random = generator
        self._queues: dict[str, deque[_QueuedOp]] = {}
        self._events: dict[str, OpEvent] = {}

    def bind(self, op: Op, run: Task, watch: WatchOp | None = None) -> Task:
        """Return a task that enqueues the op, as ``Streams.bind`` does.

        Ops run when the host waits or a section ends.
        """
        task = run if watch is None else watch(run)
        collective: PreparedCollective | None = None
        if isinstance(op, ops.Collective):
            collective = self._local_ranks.prepare_collective(op)
        return lambda: self._submit(op, task, collective)

    def _submit(self, op: Op, run: Task, collective: PreparedCollective | None) -> None:
        match op:
            case ops.Wait():
                event = self._events[op.waited]
                if op.on == HOST:
                    self._run_until([event])
                else:
                    self._enqueue(op.on, _QueuedOp(op=op, run=run, event=event))
            case _:
                event = OpEvent()
                if op.event is not None:
                    self._events[op.event] = event
                item = _QueuedOp(op=op, run=run, event=event, collective=collective)
                self._enqueue(op.stream, item)

    def join(self, pending: Collection[str]) -> None:
        left_pending = {self._events[name] for name in pending if name in self._events}
        self._run_until(
            [
                item.event
                for queue in self._queues.values()
                for item in queue
                if item.event not in left_pending
            ]
        )

    def finish(self) -> None:
        self.join(())

    def signal(self, event: str) -> None:
        self._events[event] = OpEvent(is_done=True)

    def waiting_for(self, events: Collection[str]) -> Task:
        """Return a function that runs ops until ``events`` are done.

        Only the thread that issues the ops may call it.
        """
        self.join(self._events)  # all ops that are not pending, such as those of the compute stream
        signalled = [self._events[name] for name in events]
        return lambda: self._run_until(signalled)

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._queues.clear()

    def _enqueue(self, stream: str, item: _QueuedOp) -> None:
        self._queues.setdefault(stream, deque()).append(item)

    def _run_until(self, events: Sequence[OpEvent]) -> None:
        # Half of the time one stream runs as far as it can before the next; single choices would hardly ever do that.
        order = self._random.sample(list(self._queues), len(self._queues))
        is_greedy = self._random.random() < 0.5
        remaining = list(events)
        while True:
            while remaining and remaining[-1].is_done:
                remaining.pop()
            if not remaining:
                return
            ready = [name for name in order if self._is_ready(self._queues[name])]
            ready = [name for name in ready if name not in self._late_streams] or ready
            if not ready:
                waiting = [q[0].op for q in self._queues.values() if q]
                raise InternalError(f"streams wait for each other: {waiting}")
            self._advance(self._queues[ready[0] if is_greedy else self._random.choice(ready)])

    @staticmethod
    def _is_ready(queue: deque[_QueuedOp]) -> bool:
        if not queue:
            return False
        head = queue[0]
        return not isinstance(head.op, ops.Wait) or head.event.is_done

    def _advance(self, queue: deque[_QueuedOp]) -> None:
        item = queue[0]
        match item.op:
            case ops.Wait():
                queue.popleft()
                return
            case ops.Collective():
                assert item.collective is not None
                item.collective.require_live()  # in both turns
                if item.begun is None:
                    item.begun = self._begin(item.collective.tensors)
                    return
                communicate(item.op, item.begun, self._local_ranks.comm)
            case _:
                item.run()
        queue.popleft()
        item.event.is_done = True

    def _begin(self, tensors: CollectiveTensors) -> CollectiveTensors:
        """Read a collective's sources, or leave that to the second turn, and fill the destinations with NaN."""
        is_early = self._random.random() < 0.5
        pairs = [
            [
                TensorPair(
                    source=pair.source.clone() if is_early or _is_shared(pair) else pair.source,
                    destination=pair.destination,
                )
                for pair in rank_pairs
            ]
            for rank_pairs in tensors.pairs
        ]
        for rank_pairs in tensors.pairs:
            for pair in rank_pairs:
                poison(pair.destination)
        for staging in tensors.staging:
            if staging is not None:
                poison(staging)
        return replace(tensors, pairs=pairs)


def _is_shared(pair: TensorPair) -> bool:
    """Return whether source and destination share storage."""
    return pair.source.untyped_storage().data_ptr() == pair.destination.untyped_storage().data_ptr()
