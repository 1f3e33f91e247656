"""The whole device path of the runtime on devices that are not there: no schedule changes a bit, and faults show."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.simulated_cuda import Communicator, DeadlockError, SimulatedCuda, queues
from tests.support.simulated_cuda.lockstep import OnDevice
from tests.support.simulated_cuda.queues import AT_ONCE
from tests.support.simulated_cuda.ranks import train_ranks
from tests.support.subjects import NAMES, is_equal, subject
from zeroir.ir.ops import Reduction
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.lockstep import Lockstep

CUDA = torch.device("cuda", 0)
SEEDS = tuple(range(4))
"""One for each manner of a schedule."""
OTHER_ARITHMETIC = frozenset(
    {
        "stage 2, whole parameters",
        "captured, stage 2",
        "captured, muon",
        "captured, shampoo",
        "gathering, stage 3",
    }
)
"""Those whose optimizers, or sums, round otherwise on a device; without a schedule they agree within that."""
CHEAP = (
    "stage 1 in buckets",
    "stage 3, overlapped",
    "stage 3, updated on the host",
    "stage 3, speculative, averaged",
    "stage 3, paged",
)


def trained(name: str, seed: int) -> list[Tensor]:
    made = subject(name)
    driver = SimulatedCuda(seed)
    with driver.running(), torch.no_grad():
        run = OnDevice(driver, made.scheduled, weight=made.weight)
        found = [value.cpu() for value in made.train_on(run)]
        run.streams.close()
    return found


@cache
def expected(name: str) -> list[Tensor]:
    """What lockstep computes; where a device rounds otherwise, what the device does without any overlap."""
    in_lockstep = subject(name).train(subject(name).scheduled, 0)
    if name not in OTHER_ARITHMETIC:
        return in_lockstep
    at_once = trained(name, AT_ONCE)
    for one, other in zip(at_once, in_lockstep, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3, equal_nan=True)
    return at_once


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in NAMES]
)
def test_no_schedule_of_a_device_changes_a_bit(name: str) -> None:
    """Steps, evaluations and saves of every kind of program, by the streams, events and threads of CUDA runs."""
    for manner in SEEDS:
        # Each program starves another stream.
        found = trained(name, manner + len(SEEDS) * NAMES.index(name))
        assert len(found) == len(expected(name))
        assert all(map(is_equal, found, expected(name)))


@pytest.mark.parametrize("seed", [AT_ONCE, *SEEDS])
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [*(pytest.param(*run, marks=pytest.mark.slow) for run in ((0, 2), (2, 3), (3, 4))), (3, 2)],
)
def test_ranks_that_communicate_by_nccls_code_train_as_lockstep(
    stage: int, world_size: int, seed: int
) -> None:
    program = lowered(mlp(blocks=3, clip=1.0, micro_steps=2, precision="bf16"), stage, world_size)
    batches = random_batches(2, world_size, 2)
    lockstep = Lockstep(program)
    lockstep.initialise_flats(initial_flats(program))
    losses = [[result.loss for result in lockstep.step(of_ranks)] for of_ranks in batches]
    driver = SimulatedCuda(seed, world_size)
    with driver.running():
        found = train_ranks(driver, program, initial_flats(program), batches)
    names = [buffer.name for buffer in program.buffers if buffer.is_persistent]
    for rank, values in enumerate(found):
        own = [torch.as_tensor(of_step[rank]) for of_step in losses]
        own += [lockstep.buffers(rank)[name] for name in names]
        assert all(map(is_equal, values, own))


def engine_run(
    seed: int, folder: Path, *, cuda_graphs: bool
) -> tuple[list[Tensor], SimulatedCuda, frozenset[str]]:
    """Losses and states of an engine that saves a checkpoint, goes on, and loads it again."""
    passes = (*for_stage(3, 1, overlap_update=False), SaveState())
    program = applied(mlp(blocks=2, clip=1.0, micro_steps=2, precision="fp16"), passes)
    batches = [of_ranks[0] for of_ranks in random_batches(6, 1, 2)]
    driver = SimulatedCuda(seed)
    with driver.running(), warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(program, EngineSettings(cuda_graphs=cuda_graphs), device=CUDA)
        engine.initialise_flats(initial_flats(program))
        found: list[Tensor] = []
        for number, batch in enumerate(batches):
            found.append(torch.tensor(engine.step(list(batch)).loss))
            if number == 3:
                engine.save(str(folder / "run"), wait=False)
        found += [values.cpu() for values in engine.full_state().values()]
        engine.load(str(folder / "run"))
        found.append(torch.tensor(engine.step(list(batches[4])).loss))
        graphs = engine.rank_program.opened.graphs
        captured = frozenset() if graphs is None else graphs.captured
        engine.close()
    return found, driver, captured


@pytest.mark.parametrize(
    ("seed", "cuda_graphs"),
    [
        (1, True),
        *(pytest.param(*run, marks=pytest.mark.slow) for run in ((0, False), (2, True), (3, True))),
    ],
)
def test_an_engine_saves_loads_and_launches_graphs(
    seed: int, cuda_graphs: bool, tmp_path: Path
) -> None:
    at_once, _, _ = engine_run(AT_ONCE, tmp_path / "at once", cuda_graphs=False)
    found, _, captured = engine_run(seed, tmp_path / "seeded", cuda_graphs=cuda_graphs)
    assert captured == (frozenset({MICRO_STEP, LAST_MICRO_STEP, UPDATE}) if cuda_graphs else set())
    assert all(map(is_equal, found, at_once))
    assert found[4].equal(found[-1])  # the step after the checkpoint, and after it was loaded


def test_engines_that_may_run_at_once_share_no_memory_of_graphs() -> None:
    """Two engines of one process, as of a generator and its critic, may be on different streams."""
    program = subject("stage 0").scheduled
    driver = SimulatedCuda(AT_ONCE)
    with driver.running():
        for streams in (CudaStreams(program, CUDA), CudaStreams(program, CUDA)):
            for _ in range(2):
                streams.capture(lambda: None)
            streams.close()
    assert driver.pools == 2


def test_a_step_asks_the_device_once() -> None:
    """The host waits for the loss, and for nothing else."""
    program = lowered(mlp(blocks=2, precision="bf16"), 3, 1)
    batches = [of_ranks[0] for of_ranks in random_batches(3, 1)]
    driver = SimulatedCuda(0)
    with driver.running():
        engine = Engine(program, EngineSettings(self_check=False), device=CUDA)
        engine.initialise_flats(initial_flats(program))
        engine.step(list(batches[0]))
        driver.waits.clear()
        for batch in batches[1:]:
            float(engine.step(list(batch)).loss)
        assert driver.waits == {"aten::_local_scalar_dense": 2}
        engine.close()


# ------------------------------------------------------------------------------------- the device itself


def in_all(seeds: int, run: Callable[[SimulatedCuda], bool]) -> list[bool]:
    found: list[bool] = []
    for seed in range(seeds):
        driver = SimulatedCuda(seed)
        with driver.running():
            found.append(run(driver))
    return found


@pytest.mark.parametrize("waits", [False, True])
def test_what_another_stream_has_not_computed_yet_is_not_there(waits: bool) -> None:
    def run(driver: SimulatedCuda) -> bool:
        one, other = driver.new_stream(CUDA), driver.new_stream(CUDA)
        with driver.on(one):
            values = torch.ones(4, device=CUDA) * 2
        if waits:
            other.wait_event(one.record_event())
        with driver.on(other):
            doubled = values + values
            return doubled.tolist() == [4.0] * 4

    found = in_all(20, run)
    assert all(found) if waits else not all(found)


@pytest.mark.parametrize("waits", [False, True])
def test_freed_memory_is_overwritten_by_its_stream_alone(waits: bool) -> None:
    """As a caching allocator gives it to later work of the stream that allocated it."""

    def run(driver: SimulatedCuda) -> bool:
        one, other = driver.new_stream(CUDA), driver.new_stream(CUDA)
        with driver.on(one):
            values = torch.full((4,), 3.0, device=CUDA)
        other.wait_event(one.record_event())
        with driver.on(other):
            kept = values.clone()
        if waits:
            one.wait_event(other.record_event())
        del values
        with driver.on(other):
            return kept.tolist() == [3.0] * 4

    found = in_all(20, run)
    assert all(found) if waits else not all(found)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pinned_memory_is_read_when_the_copy_runs_and_other_memory_at_once(is_pinned: bool) -> None:
    def run(driver: SimulatedCuda) -> bool:
        host = driver.pinned_empty(4, torch.float32, CUDA) if is_pinned else torch.empty(4)
        host.fill_(1.0)
        target = torch.zeros(4, device=CUDA)
        target.copy_(host, non_blocking=True)
        host.fill_(2.0)
        return target.tolist() == [1.0] * 4

    found = in_all(20, run)
    assert not all(found) if is_pinned else all(found)


def test_a_capture_refuses_what_cuda_refuses() -> None:
    driver = SimulatedCuda(0)
    with driver.running():
        stream, other = driver.new_stream(CUDA), driver.new_stream(CUDA)
        before = other.record_event()
        with driver.on(stream):
            values = torch.ones(2, device=CUDA)
            for forbidden in (
                values.tolist,
                lambda: driver.synchronize(CUDA),
                lambda: stream.wait_event(before),
            ):
                capture = driver.new_graph_pool().begin_capture(stream)
                with pytest.raises(RuntimeError, match="captur"):
                    forbidden()
                with pytest.raises(RuntimeError, match="previous error"):
                    capture.end()
            capture = driver.new_graph_pool().begin_capture(stream)
            other.wait_event(stream.record_event())
            with driver.on(other):
                values.add_(1)
            with pytest.raises(RuntimeError, match="unjoined work"):
                capture.end()
            assert values.tolist() == [1.0, 1.0]  # nothing of it ran


def test_a_graph_runs_again_on_the_same_memory() -> None:
    for seed in SEEDS:
        driver = SimulatedCuda(seed)
        with driver.running():
            stream, other = driver.new_stream(CUDA), driver.new_stream(CUDA)
            with driver.on(stream):
                values = torch.ones(2, device=CUDA)
                capture = driver.new_graph_pool().begin_capture(stream)
                other.wait_event(stream.record_event())
                with driver.on(other):
                    values.mul_(2)
                stream.wait_event(other.record_event())
                values.add_(1)
                graph = capture.end()
                graph.replay()
                graph.replay()
                assert values.tolist() == [7.0, 7.0]


def test_ranks_that_ask_for_different_collectives_are_told() -> None:
    driver = SimulatedCuda(AT_ONCE, devices=2)
    with driver.running():
        world = Communicator(driver, "world", (0, 1))
        values = [torch.ones(4, device=torch.device("cuda", rank)) for rank in range(2)]
        world.of(0).all_reduce(values[0], Reduction.SUM)
        world.of(1).broadcast(values[1], 0)
        with pytest.raises(RuntimeError, match="different collectives of world"):
            values[0].tolist()


def test_a_collective_that_a_rank_leaves_out_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "PATIENCE_S", 0.2)
    driver = SimulatedCuda(0, devices=2)
    with driver.running():
        world = Communicator(driver, "world", (0, 1))
        values = torch.ones(4, device=CUDA)
        world.of(0).all_reduce(values, Reduction.SUM)
        with pytest.raises(DeadlockError, match="all_reduce of world"):
            values.tolist()


def test_devices_and_the_host_do_not_mix_in_one_operator() -> None:
    driver = SimulatedCuda(0)
    with driver.running():
        values = torch.ones(4, device=CUDA)
        with pytest.raises(RuntimeError, match="same device"):
            values + torch.ones(4)
        assert (values + torch.tensor(2.0)).tolist() == [3.0] * 4


def test_offloaded_updates_run_beside_the_device() -> None:
    program = applied(mlp(blocks=2), (*for_stage(1, 1), OffloadOptimizer()))
    batches = [of_ranks[0] for of_ranks in random_batches(3, 1)]
    losses: list[list[float]] = []
    for seed in (AT_ONCE, *SEEDS):
        driver = SimulatedCuda(seed)
        with driver.running():
            engine = Engine(program, device=CUDA)
            engine.initialise_flats(initial_flats(program))
            losses.append([engine.step(list(batch)).loss for batch in batches])
            engine.close()
    assert all(found == losses[0] for found in losses)
