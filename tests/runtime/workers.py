"""One rank of a job that a test starts: ``python -m tests.runtime.workers SCENARIO [ARGUMENT]``."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import islice, product
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zeroir
from examples import any_length
from tests.runtime.constructors import CONSTRUCTORS, DIM, Mlp
from tests.runtime.support import begun, join, lowered, random_batches, write_run
from tests.runtime.workers_cases import (
    CASES,
    CODED,
    MODEL_STEPS,
    STEPS,
    micro_batches,
    one_cycle,
    varied,
    weight_of_values,
)
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.errors import ZeroirError
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.text import parse
from zeroir.passes.pipelines import for_options
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.comm.rank_zero_values import RankZeroValues
from zeroir.runtime.data.training_data import RankOfData, TrainingData
from zeroir.runtime.distributed import rendezvous
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state import initial_values
from zeroir.runtime.training import train
from zeroir.runtime.training.training_state import TrainingState

FOLDER = Path(os.environ["TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def save_run(engine: Engine, losses: list[float], name: str) -> None:
    """End a run: rank 0 writes its losses and states."""
    write_run(engine, losses, name)
    engine.close()


def stages(precisions: str, backend: str) -> None:
    """Some AdamW steps at every stage; rank 0 writes losses and states."""
    for name in precisions.split(","):
        precision, clip = CASES[name]
        logical = mlp(precision=precision, clip=clip, has_codes=name in CODED)
        batches = random_batches(STEPS, WORLD_SIZE)
        for stage in range(4):
            engine = begun(
                Engine(
                    lowered(logical, stage, WORLD_SIZE), EngineSettings(backend=Backend(backend))
                )
            )
            save_run(engine, [engine.step(step[RANK]).loss for step in batches], f"{name}.{stage}")


def kernels() -> None:
    """The losses of a few steps with every kernel backend, from one cache, and what was imported of the compiler."""
    program = lowered(mlp(clip=0.5), 3, WORLD_SIZE)
    batches = random_batches(MODEL_STEPS, WORLD_SIZE)
    found: dict[str, list[float] | list[str]] = {}
    for backend in KernelBackend:
        engine = begun(Engine(program, EngineSettings(kernels=backend)))
        found[backend] = [engine.step(step[RANK]).loss for step in batches]
        engine.close()
    compiler = ("torch._inductor", "torch._dynamo")
    found["compiler"] = [name for name in sys.modules if name.startswith(compiler)]
    (FOLDER / f"kernels.{RANK}.json").write_text(json.dumps(found))


def sized_kernels() -> None:
    """The losses of a few steps of batches of each rank's own sizes with every kernel backend."""
    program = zeroir.compile(any_length.__file__, stage=3, world_size=WORLD_SIZE).program
    found: dict[str, list[float]] = {}
    for backend in KernelBackend:
        engine = Engine(program, EngineSettings(kernels=backend, self_check=True))
        engine.initialise(any_length.model, 0)
        batches = islice(any_length.batches(RANK, WORLD_SIZE, seed=3), MODEL_STEPS)
        found[backend] = [engine.step(batch).loss for batch in batches]
        engine.close()
    (FOLDER / f"sized.{RANK}.json").write_text(json.dumps(found))


def hybrid(replicas: str, name: str) -> None:
    """A few steps in groups of ranks at the lowest and the highest stage; rank 0 writes losses and states."""
    precision, clip = CASES[name]
    logical = mlp(precision=precision, clip=clip)
    batches = random_batches(MODEL_STEPS, WORLD_SIZE)
    for stage in (0, 3):
        engine = begun(Engine(lowered(logical, stage, WORLD_SIZE, int(replicas))))
        save_run(engine, [engine.step(step[RANK]).loss for step in batches], f"{stage}")


def micro_steps(*precisions: str) -> None:
    """A few steps of one to three micro-steps at every stage, weighted; rank 0 writes losses and states.

    Every other step is taken one by one.
    """
    steps = micro_batches(WORLD_SIZE)
    for precision, stage in product(precisions, range(4)):
        logical = mlp(precision=precision, clip=0.5, micro_steps=2, is_weighted=True)
        engine = begun(
            Engine(lowered(logical, stage, WORLD_SIZE), EngineSettings(weight=weight_of_values))
        )
        losses: list[float] = []
        for number, step in enumerate(steps):
            if number % 2:
                for batch in step[RANK]:
                    engine.micro_step(batch)
                result = engine.update()
            else:
                result = engine.step(step[RANK])
            losses.append(result.loss)
            assert math.isfinite(result.mean_loss)
        save_run(engine, losses, f"{precision}.{stage}")


def model_stages(path: str, program: str) -> None:
    """A few steps of a model file, whose program is in a file, at every stage; rank 0 writes losses and states."""
    model_file, logical = load_model_file(path), parse(Path(program).read_text())
    for stage in range(4):
        engine = Engine(lowered(logical, stage, WORLD_SIZE), EngineSettings(seed=3))
        engine.initialise(model_file.model, 3)
        losses = [
            engine.step(varied(model_file.batch(), step, RANK)).loss for step in range(MODEL_STEPS)
        ]
        save_run(engine, losses, f"{stage}")


def evaluations(path: str, program: str) -> None:
    """Evaluations before each of three steps of a model file, at every stage; rank 0 writes losses and outputs.

    The program of one device is in a file.
    """
    source, logical = load_model_file(path), parse(Path(program).read_text())
    for stage in range(4):
        options = make_options({"stage": stage, "world_size": WORLD_SIZE})
        engine = Engine(applied(logical, for_options(options)), EngineSettings(seed=5))
        engine.initialise(source.model, 5)
        assert source.batches is not None
        batches = iter(source.batches(RANK, WORLD_SIZE, 5))
        found: list[Tensor] = []
        for _ in range(3):
            evaluation = engine.evaluate(next(batches))
            found += [evaluation.rank.loss, *pytree.tree_leaves(evaluation.outputs)]
            engine.step(next(batches))
        engine.close()
        if RANK == 0:
            tensors = {str(at): tensor.contiguous() for at, tensor in enumerate(found)}
            save_file(tensors, FOLDER / f"evaluations.{stage}.safetensors")


def initialise(name: str) -> None:
    """At every stage all ranks hold what plain PyTorch makes, though only some build it: that is printed."""
    built = 0

    def factory() -> nn.Module:
        nonlocal built
        built += 1
        return CONSTRUCTORS[name]()

    torch.manual_seed(7)
    expected = dict(CONSTRUCTORS[name]().named_parameters())
    for stage in range(4):
        engine = Engine(lowered(mlp(dim=DIM, precision="bf16"), stage, WORLD_SIZE))
        with patch.object(initial_values, "MESSAGE_BYTES", 10_000):
            engine.initialise(factory, 7)
        for parameter, value in engine.full_parameters().items():
            assert torch.equal(value, expected[parameter].detach().float()), parameter
        engine.close()
    print(f"built {built} times")


def bad_starts() -> None:
    """Print how a job ends whose messages are damaged on their way to rank 1, and one whose rank 0 cannot build."""
    program = lowered(mlp(dim=DIM), 2, WORLD_SIZE)
    engine = Engine(program)
    sound = RankZeroValues(rank=RANK, device=engine.device)
    memory = RankMemory(program, RANK, engine.device)
    for from_rank_zero, factory in (
        (_FaultyRankZeroValues(rank=RANK, device=engine.device), CONSTRUCTORS["plain"]),
        (sound, partial(Mlp, dim=DIM, blocks=2)),
    ):
        try:
            initial_values.initialise(program, [memory], factory, 0, from_rank_zero)
        except ZeroirError as error:
            print(f"{type(error).__name__}: {error}")
    engine.close()


class _FaultyRankZeroValues(RankZeroValues):
    """A from_rank_zero that damages one bit of each long message on its way to rank 1."""

    def send(self, message: Tensor) -> None:
        super().send(message)
        if RANK == 1 and message.dtype == torch.uint8 and message.numel() > 1000:
            message[5] ^= 1


def build_slowly(seconds: str) -> None:
    """Build a model for longer than a collective waits."""

    def factory() -> nn.Module:
        time.sleep(float(seconds))
        return Mlp()

    program = lowered(mlp(), 3, WORLD_SIZE)
    from_rank_zero = RankZeroValues(rank=RANK, device=torch.device("cpu"), interval_s=0.5)
    initial_values.initialise(
        program, [RankMemory(program, RANK, torch.device("cpu"))], factory, 0, from_rank_zero
    )


def steps_for_ever(delay_s: str, backend: str) -> None:
    """Train until something ends it; a file tells the test that the rank is under way."""
    program = lowered(mlp(), 3, WORLD_SIZE)
    engine = begun(
        Engine(program, EngineSettings(backend=Backend(backend), timeout=timedelta(seconds=60)))
    )
    (batches,) = random_batches(1, WORLD_SIZE)
    count = 0
    while True:
        engine.step(batches[RANK])
        count += 1
        if count == 3:
            (FOLDER / f"under-way.{RANK}").touch()
        time.sleep(float(delay_s))


def other_program() -> None:
    """Rank 1 has another program than the rest."""
    logical = mlp(dim=16 if RANK == 1 else 8)
    Engine(lowered(logical, 3, WORLD_SIZE))


def nan_loss() -> None:
    """A batch of rank 1 alone holds what no model can take."""
    engine = begun(Engine(lowered(mlp(), 2, WORLD_SIZE)))
    batches = [step[RANK][0] for step in random_batches(5, WORLD_SIZE)]
    if RANK == 1:
        batches[2] = {"x": torch.full((4, 6), float("nan"))}
    rank = RankOfData(rank=RANK, world_size=WORLD_SIZE, seed=0)
    data = TrainingData(lambda *_: batches, rank)
    training = TrainingState(engine=engine, data=data, scheduler=None, seed=0)
    train.train(training, steps=5, report=lambda _: None)


def other_settings() -> None:
    """Rank 1 lowers its learning rate after the second step, alone."""
    engine = begun(Engine(lowered(mlp(), 2, WORLD_SIZE)))
    for step, batches in enumerate(random_batches(5, WORLD_SIZE)):
        if RANK == 1 and step == 2:
            engine.optimizer.param_groups[0]["lr"] = 0.001
        engine.step(batches[RANK])


def scheduled_settings() -> None:
    """Steps whose learning rate and betas a scheduler of torch changes; rank 0 writes losses and states."""
    engine = begun(Engine(lowered(mlp(), 3, WORLD_SIZE)))
    scheduler = one_cycle(engine.optimizer)
    losses: list[float] = []
    for batches in random_batches(MODEL_STEPS, WORLD_SIZE):
        losses.append(engine.step(batches[RANK]).loss)
        scheduler.step()
    save_run(engine, losses, "scheduled")


SCENARIOS: dict[str, Callable[..., None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(
            stages,
            hybrid,
            kernels,
            sized_kernels,
            micro_steps,
            model_stages,
            evaluations,
            initialise,
            bad_starts,
        ),
        *(
            build_slowly,
            steps_for_ever,
            other_program,
            nan_loss,
            scheduled_settings,
            other_settings,
        ),
    )
}


def main() -> None:
    scenario, *args = sys.argv[1:]
    join(timeout_s=float(os.environ.get("TEST_TIMEOUT_S", "60")))
    code = 0
    try:
        try:
            SCENARIOS[scenario](*args)
        except ZeroirError as error:
            print(f"Error: {error}", file=sys.stderr)
            code = error.exit_code
    except KeyboardInterrupt:  # It may come while the sentence of an error is printed, too.
        print("Interrupted.", file=sys.stderr)
        code = 130
    if code:
        train.abandon_job(code)
    rendezvous.leave_job()


if __name__ == "__main__":
    main()
