"""Saving while training goes on: who waits for whom, on the CPU's streams and with stand-ins for CUDA's graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.runtime.support import initial_flats, prepared_rank, random_batches
from tests.support.lowering import proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.ir.mesh import COPY_OUT
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.execution.trace import Task, WatchOp
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.state import initialise_flats
from zeroir.torch_ops.batches import Batch

TIMEOUT_S = 30.0


def waiting(call: Callable[[], object]) -> threading.Thread:
    """A thread whose call does not end for now."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    return thread


def require_end(thread: threading.Thread) -> None:
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


class HeldCopies(ThreadStreams):
    """Threads of which that for the copies does nothing until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.failure_of_copies: Exception | None = None

    def bind(self, op: Op, run: Task, watch: WatchOp | None = None) -> Task:
        if getattr(op, "stream", None) != COPY_OUT:
            return super().bind(op, run, watch)

        def held() -> None:
            assert self.go.wait(TIMEOUT_S)
            if self.failure_of_copies is not None:
                raise self.failure_of_copies
            run()

        return super().bind(op, held, watch)


@contextmanager
def training(program: Program) -> Iterator[tuple[StepExecutor, RankMemory, HeldCopies]]:
    local_ranks, memory = prepared_rank(program)
    streams = HeldCopies()
    executor = StepExecutor(local_ranks, streams)
    initialise_flats(program, [memory], initial_flats(program))
    yield executor, memory, streams
    streams.go.set()
    executor.close()


def saving(micro_steps: int = 1) -> Program:
    return proved(mlp(precision="bf16", micro_steps=micro_steps), (*for_stage(2, 1), SaveState()))


def batches(steps: int) -> list[list[list[Batch]]]:
    return [[list(micro) for micro in ranks] for ranks in random_batches(steps, 1, 1)]


def state(memory: RankMemory, program: Program) -> dict[str, Tensor]:
    roles = (Role.MASTER, Role.STATE)
    return {b.name: memory.buffer(b.name).clone() for b in program.buffers if b.role in roles}


@pytest.mark.slow
def test_the_forward_runs_beside_the_copies_and_the_update_waits_for_them() -> None:
    program = saving(micro_steps=2)
    with training(program) as (executor, memory, streams):
        first, second = batches(2)
        executor.step(first)
        before = state(memory, program)
        (saved,) = executor.save_state()
        # The forward, the backward and the reductions need no copy to be done.
        executor.micro_steps(second, is_last=False)
        executor.micro_steps(second, is_last=True)

        def update() -> None:
            with torch.no_grad():
                executor.update()

        updating = waiting(update)
        for name, values in before.items():
            assert torch.equal(memory.buffer(name), values)
        streams.go.set()
        require_end(updating)
        saved.wait()
        for name, values in before.items():
            assert torch.equal(saved.tensors[name].tensor, values)
            assert not torch.equal(memory.buffer(name), values)


def test_another_thread_waits_for_the_copies() -> None:
    program = saving()
    with training(program) as (executor, memory, streams):
        executor.step(batches(1)[0])
        (saved,) = executor.save_state()
        writer = waiting(saved.wait)
        streams.go.set()
        require_end(writer)
        for name, values in state(memory, program).items():
            assert torch.equal(saved.tensors[name].tensor, values)


def test_a_save_begins_only_when_the_one_before_is_released() -> None:
    """Otherwise it would overwrite what a writer still reads."""
    program = saving()
    with training(program) as (executor, _, streams):
        streams.go.set()
        first, second = batches(2)
        executor.step(first)
        (saved,) = executor.save_state()
        saved.wait()
        before = {name: copy.tensor.clone() for name, copy in saved.tensors.items()}
        executor.step(second)

        def save_again() -> None:
            executor.save_state()[0].wait()

        again = waiting(save_again)
        for name, values in before.items():
            assert torch.equal(saved.tensors[name].tensor, values)
        saved.release()
        require_end(again)
        # The same memory serves every save.
        assert not torch.equal(saved.tensors["blocks.0.master"].tensor, before["blocks.0.master"])


def test_host_memory_is_allocated_by_the_first_save_alone() -> None:
    program = saving()
    with training(program) as (executor, memory, streams):
        streams.go.set()
        executor.step(batches(1)[0])
        memory.allocate()
        snapshots = {b.name for b in program.buffers if b.role is Role.SNAPSHOT}
        assert not snapshots & memory._tensors.keys()
        (saved,) = executor.save_state()
        assert snapshots <= memory._tensors.keys()
        places = {name: copy.tensor.data_ptr() for name, copy in saved.tensors.items()}
        saved.release()
        (saved,) = executor.save_state()
        assert places == {name: copy.tensor.data_ptr() for name, copy in saved.tensors.items()}
        saved.release()


def test_a_save_may_come_before_the_first_step() -> None:
    program = saving()
    with training(program) as (executor, memory, streams):
        streams.go.set()
        (saved,) = executor.save_state()
        saved.wait()
        for name, values in state(memory, program).items():
            assert torch.equal(saved.tensors[name].tensor, values)


def test_a_copy_that_fails_reaches_the_writer_and_the_next_step() -> None:
    program = saving()
    with training(program) as (executor, _, streams):
        first, second = batches(2)
        executor.step(first)
        streams.failure_of_copies = UserError("The device is lost.")
        (saved,) = executor.save_state()
        streams.go.set()
        with pytest.raises(UserError, match="The device is lost"):
            saved.wait()
        with pytest.raises(UserError, match="The device is lost"):
            executor.step(second)


def test_what_changes_parameters_without_an_op_waits_for_the_copies() -> None:
    program = saving()
    with training(program) as (executor, memory, streams):
        executor.step(batches(1)[0])
        before = state(memory, program)
        (saved,) = executor.save_state()
        threading.Timer(0.1, streams.go.set).start()
        executor.finish()
        memory.buffer("blocks.0.master").zero_()
        saved.wait()
        copied = saved.tensors["blocks.0.master"].tensor
        assert torch.equal(copied, before["blocks.0.master"])
