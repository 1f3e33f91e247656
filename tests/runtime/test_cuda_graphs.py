"""Which sections can be CUDA graphs, and when they are captured and launched; with stand-ins for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
import torch

from tests.runtime.support import begun, initial_flats, lowered, prepared_rank, random_batches
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import GraphWarning
from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role, Space
from zeroir.ir.mesh import COMPUTE, COPY_IN, COPY_OUT, GATHER, HOST, OPTIMIZER
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    UPDATE,
    Pending,
    Program,
    Section,
    State,
)
from zeroir.passes.base import Pass
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.runtime.comm.job import Backend, Job, open_job
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.cuda_graphs import WARM_UP, SectionGraphs, why_not
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.state import initialise_flats
from zeroir.torch_ops.batches import Batch

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------- what can be a graph


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("more", [(), (OffloadActivations(smallest=0),), (SaveState(),)], ids=len)
@pytest.mark.parametrize("stage", range(4))
def test_every_section_but_a_save_can_be_a_graph(
    stage: int, more: tuple[Pass, ...], optimizer: str
) -> None:
    """Also those that move activations to the host, or wait for copies of a save."""
    logical = mlp(blocks=4, precision="fp16", clip=0.5, optimizer=optimizer, micro_steps=2)
    program = applied(logical, (*for_stage(stage, 4), *more))
    is_offloaded = any(
        isinstance(op, ops.ToHost) for op in program.section_by_name[MICRO_STEP].body
    )
    assert is_offloaded == any(isinstance(one, OffloadActivations) for one in more)
    for section in program.sections:
        for backend in (Backend.LOCAL, Backend.NCCL, Backend.FAKE):
            reason = why_not(program, section, backend)
            assert (reason is None) is (section.name != SAVE), reason


def section_of(*body: ops.Op, **states: State) -> Section:
    return Section(name=LAST_MICRO_STEP, body=body, **states)


def fill(stream: str = COMPUTE, event: str | None = None, buffer: str = "loss") -> ops.Fill:
    region = Region(buffer=buffer, offset=0, numel=1)
    return ops.Fill(destination=region, value=0.0, stream=stream, event=event)


def on_host(program: Program, name: str, role: Role | None = None) -> Program:
    """The program with a buffer in the host's memory."""
    return replace(
        program,
        buffers=tuple(
            replace(b, space=Space.HOST, role=role or b.role) if b.name == name else b
            for b in program.buffers
        ),
    )


def dampened(program: Program, momentum: float) -> Program:
    scalars = tuple(
        replace(s, values=(momentum, 0.5, 0.0, 0.0)) if s.buffer == "hyper" else s
        for s in program.scalars
    )
    return replace(program, scalars=scalars)


def test_a_section_that_needs_the_host_cannot_be_a_graph() -> None:
    program = mlp()
    (crossing,) = (State(pending=(Pending(event="0", stream=GATHER),)),)
    cases = {
        "it is empty": section_of(),
        "the host waits in it for !0": section_of(
            fill(event="0"), ops.Wait(waited="0", on=HOST), fill()
        ),
        "the host works in it, on stream optimizer": section_of(fill(OPTIMIZER)),
        "the disk works in it, on stream io": section_of(fill(), ops.Wait(waited="0", on="io")),
        "!0 is pending where it begins or ends": section_of(fill(GATHER, "0"), exit=crossing),
    }
    for reason, section in cases.items():
        assert why_not(program, section) == reason
        assert why_not(program, replace(section, body=(*section.body, fill()))) in (reason, None)
    entering = section_of(fill(), entry=crossing)
    assert why_not(program, entering) == "!0 is pending where it begins or ends"
    assert why_not(program, section_of(fill())) is None


def test_a_section_with_an_operator_that_reads_on_the_host_cannot_be_a_graph() -> None:
    program = mlp()
    first = program.segments[0]
    node = replace(first.nodes[0], op="zeroir.grouped_mm.default")
    reading = replace(first, nodes=(node, *first.nodes[1:]))
    program = replace(program, segments=(reading, *program.segments[1:]))
    calls = [op for op in program.ops() if isinstance(op, ops.Compute) and op.segment == first.name]
    reason = why_not(program, section_of(*calls))
    assert reason is not None
    assert reason.startswith("the operator zeroir.grouped_mm.default of segment @")
    assert why_not(mlp(), section_of(*calls)) is None


def test_memory_of_the_host_is_part_of_a_graph_only_where_the_device_copies_it() -> None:
    program = on_host(mlp(), "loss")
    reason = "%loss, which it uses, is in the memory of the host"
    assert why_not(program, section_of(fill())) == reason
    device, host = (Region(buffer=name, offset=0, numel=1) for name in ("step", "loss"))
    copies: tuple[ops.Op, ...] = (
        ops.Alloc(buffer="loss", stream=COPY_OUT),
        ops.ToHost(source=device, destination=host, stream=COPY_OUT),
        ops.ToDevice(source=host, destination=device, stream=COPY_IN),
    )
    assert why_not(program, section_of(*copies)) is None
    assert why_not(program, section_of(*copies, fill())) == reason
    # Snapshots are allocated at the first save, and a disk has no memory that stays.
    snapshot = on_host(mlp(), "loss", Role.SNAPSHOT)
    assert why_not(snapshot, section_of(*copies)) == reason
    on_disk = replace(program.buffer_by_name["loss"], space=Space.DISK)
    disk = replace(
        program, buffers=tuple(on_disk if b.name == "loss" else b for b in program.buffers)
    )
    assert why_not(disk, section_of(*copies)) == reason.replace("the host", "the disk")
    seeds = why_not(on_host(mlp(), "loss", Role.RNG), section_of(fill()))
    assert seeds == "the seeds of its dropout are in the memory of the host"
    # Hyper-parameters are there, too, but settled when the section is captured.
    (update,) = (s for s in mlp().sections if s.name == UPDATE)
    assert mlp().buffer_by_name["hyper"].space is Space.HOST
    assert why_not(mlp(), update) is None


@pytest.mark.parametrize("backend", [Backend.GLOO, Backend.PEER_MEMORY])
def test_collectives_through_the_host_cannot_be_part_of_a_graph(backend: Backend) -> None:
    program = lowered(mlp(), 3, 4)
    section = program.section_by_name[LAST_MICRO_STEP]
    assert why_not(program, section, backend) == f"{backend} moves data in the host's memory"
    # Without a collective it does not matter who would carry it.
    assert why_not(program, section_of(fill()), backend) is None


def test_dampened_momentum_asks_the_device_for_the_step() -> None:
    program = lowered(mlp(optimizer="momentum"), 0, 1)
    update = program.section_by_name[UPDATE]
    assert why_not(dampened(program, 0.9), update) == (
        "momentum with dampening asks the device for the step count"
    )
    assert why_not(dampened(program, 0.0), update) is None


# ------------------------------------------------------------------------------------- when they are captured


@dataclass
class Recorded:
    """A graph of nothing: launching it issues the section's ops."""

    issue: Callable[[], None]
    replays: int = 0
    is_reset: bool = False

    def replay(self) -> None:
        assert not self.is_reset
        self.replays += 1
        self.issue()

    def reset(self) -> None:
        self.is_reset = True


@dataclass
class Recording:
    """Captures without a device: the ops change what is live, as on one, and compute nothing."""

    memory: RankMemory
    graphs: list[Recorded] = field(default_factory=list)
    failure: Exception | None = None

    def capture(self, issue: Callable[[], None]) -> Recorded:
        if self.failure is not None:
            self.memory.settle(["h.0"])  # it stopped somewhere in the middle
            raise self.failure
        self.graphs.append(Recorded(issue))
        return self.graphs[-1]


@dataclass
class Training:
    """One rank on the CPU whose sections run as ``SectionGraphs`` says."""

    executor: StepExecutor
    graphs: SectionGraphs
    device: Recording
    memory: RankMemory

    def steps(self, batches: list[list[Batch]]) -> list[float]:
        return [float(self.executor.step([one])[0].loss) for one in batches]


@contextlib.contextmanager
def training(program: Program, job: Job | None = None) -> Iterator[Training]:
    job = job or open_job(program, None, CPU, timedelta(seconds=60))
    local_ranks, memory = prepared_rank(program, job.comm)
    device = Recording(memory)
    graphs = SectionGraphs(program, device, memory, job)
    # As on a device, handlers run in the thread that issues.
    inline = [stream.name for stream in program.streams]
    executor = StepExecutor(local_ranks, ThreadStreams(inline), run_section=graphs.run)
    initialise_flats(program, [memory], initial_flats(program))
    yield Training(executor, graphs, device, memory)
    graphs.close()
    executor.close()


def expected_losses(program: Program, batches: list[list[Batch]]) -> list[float]:
    engine = begun(Engine(program))
    losses = [engine.step(list(one)).loss for one in batches]
    engine.close()
    return losses


def batches_of(steps: int, micro_steps: int = 1) -> list[list[Batch]]:
    return [list(micro_batches) for (micro_batches,) in random_batches(steps, 1, micro_steps)]


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_every_section_is_issued_then_captured_once_then_launched(micro_steps: int) -> None:
    program = lowered(mlp(precision="fp16", micro_steps=micro_steps), 3, 1)
    batches = batches_of(WARM_UP + 3, micro_steps)
    with training(program) as run:
        assert run.steps(batches[:WARM_UP])
        warm = {MICRO_STEP} if micro_steps > 1 else set()
        assert run.graphs.captured == warm  # which ran more often than the others
        found = run.steps(batches[WARM_UP:])
        assert run.graphs.captured == {s.name for s in program.sections}
        assert len(run.device.graphs) == len(program.sections)
        launches = sum(graph.replays for graph in run.device.graphs)
        assert launches == (WARM_UP + 3) * (micro_steps + 1) - WARM_UP * len(program.sections)
        assert found == expected_losses(program, batches)[WARM_UP:]
    assert all(graph.is_reset for graph in run.device.graphs)


@pytest.mark.parametrize("overlap_update", [False, True])
def test_after_a_save_the_sections_that_wait_for_copies_run_op_by_op_once(
    overlap_update: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """As a graph the whole section would wait, and not just the ops that overwrite what is saved."""
    logical = mlp(micro_steps=2)
    passes = for_stage(2, 1, overlap_update=overlap_update)
    program = applied(logical, (*passes, SaveState()))
    waiting = LAST_MICRO_STEP if overlap_update else UPDATE
    batches = batches_of(WARM_UP + 6, 2)

    def launches(run: Training) -> dict[str, int]:
        return {
            name: captured.graph.replays
            for name, captured in run.graphs._captured.items()
            if isinstance(captured.graph, Recorded)
        }

    with training(program) as run:
        found = run.steps(batches[: WARM_UP + 2])
        before = launches(run)
        (saved,) = run.executor.save_state()
        found += run.steps(batches[WARM_UP + 2 : WARM_UP + 3])
        after = launches(run)
        assert after == {name: n + (name != waiting) for name, n in before.items()}
        found += run.steps(batches[WARM_UP + 3 :])
        assert launches(run) == {name: n + 3 for name, n in after.items()}
        saved.wait()
        assert found == expected_losses(program, batches)
    assert not [w for w in recwarn if issubclass(w.category, GraphWarning)]


def test_changed_hyper_parameters_are_captured_anew_and_a_learning_rate_is_not() -> None:
    program = lowered(mlp(), 1, 1)
    with training(program) as run:
        run.steps(batches_of(WARM_UP + 1))
        before = len(run.device.graphs)
        run.memory.buffer("lr").mul_(0.5)
        run.steps(batches_of(1))
        assert len(run.device.graphs) == before
        run.memory.buffer("hyper")[3] = 0.5
        run.steps(batches_of(2))
        assert len(run.device.graphs) == before + 1
        assert sum(graph.is_reset for graph in run.device.graphs) == 1


def test_while_hyper_parameters_change_nothing_is_captured() -> None:
    """As when a schedule cycles the momentum: capturing takes longer than issuing."""
    program = lowered(mlp(), 1, 1)
    with training(program) as run:
        run.steps(batches_of(WARM_UP + 1))
        before = len(run.device.graphs)
        kept = run.memory.buffer("hyper").tolist()
        for step in range(4):
            run.memory.buffer("hyper")[0] = 0.8 + 0.01 * step
            run.steps(batches_of(1))
            assert len(run.device.graphs) == before
        run.memory.buffer("hyper")[0] = kept[0]
        run.steps(batches_of(3))
        assert len(run.device.graphs) == before  # The first graph is of these.


def test_a_section_that_fails_while_it_is_captured_runs_op_by_op() -> None:
    program = lowered(mlp(), 3, 1)
    batches = batches_of(WARM_UP + 3)
    with training(program) as run:
        run.device.failure = RuntimeError("operation not permitted when stream is capturing\nmore")
        found = run.steps(batches[:WARM_UP])
        with pytest.warns(GraphWarning, match="without a CUDA graph") as caught:
            found += run.steps(batches[WARM_UP:])
        for name, one in zip((LAST_MICRO_STEP, UPDATE), caught, strict=True):
            assert f": {name}, because capturing it failed: operation not" in str(one.message)
            assert "more" not in str(one.message)
        assert not run.graphs.captured
        assert found == expected_losses(program, batches)


def test_no_rank_launches_a_graph_that_another_could_not_capture() -> None:
    """One that cannot brings the average of those who can below one."""
    program = lowered(mlp(), 3, 1)

    class Lonely(Job):
        def average(self, value: float) -> float:
            return value / 2

    alone = open_job(program, None, CPU, timedelta(seconds=60))
    job = Lonely(rank=0, backend=alone.backend, comm=alone.comm, is_alone=True, device=CPU)
    batches = batches_of(WARM_UP + 2)
    with (
        training(program, job) as run,
        pytest.warns(GraphWarning, match="the capture failed on another rank"),
    ):
        assert run.steps(batches) == expected_losses(program, batches)
    assert run.device.graphs
    assert all(graph.is_reset and not graph.replays for graph in run.device.graphs)


def test_sections_that_cannot_be_graphs_are_named_once() -> None:
    program = lowered(mlp(optimizer="momentum"), 0, 1)
    program = dampened(program, 0.9)
    batches = batches_of(WARM_UP + 2)
    naming = pytest.warns(GraphWarning, match=r"update, because momentum with dampening")
    with naming as caught, training(program) as one:
        assert one.steps(batches) == expected_losses(program, batches)
        assert one.graphs.captured == {LAST_MICRO_STEP}
    assert len(caught) == 1


def test_an_update_that_the_backward_does_already_is_missed_by_nobody() -> None:
    program = lowered(mlp(), 3, 1)
    update = program.section_by_name[UPDATE]
    program = replace(
        program, sections=tuple(replace(s, body=()) if s is update else s for s in program.sections)
    )
    assert why_not(program, program.section_by_name[UPDATE]) == "it is empty"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with training(program) as run:
            run.steps(batches_of(WARM_UP + 1))
            assert run.graphs.captured == {LAST_MICRO_STEP}


def test_a_device_without_graphs_says_so_and_trains() -> None:
    program = lowered(mlp(), 3, 1)
    with pytest.warns(GraphWarning, match="no CUDA graphs on the device cpu"):
        engine = Engine(program, EngineSettings(cuda_graphs=True))
    engine.initialise_flats(initial_flats(program))
    batches = batches_of(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [engine.step(list(one)).loss for one in batches]
    assert losses == expected_losses(program, batches)
    engine.close()
