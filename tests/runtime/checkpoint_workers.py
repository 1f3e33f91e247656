"""One rank that saves and loads checkpoints: ``python -m tests.runtime.checkpoint_workers SCENARIO [ARGUMENT]``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.runtime.support import begun, join, lowered, random_batches, write_run
from tests.support.lowering import applied
from tests.support.programs import mlp
from tests.support.resident import peak_resident_bytes
from zeroir.checkpoint.local_storage import LocalStorage
from zeroir.errors import UserError, ZeroirError
from zeroir.ir.program import Program
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

FOLDER = Path(os.environ["TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEED = 11


def program_of(case: str) -> Program:
    """The program of a case such as ``fp16.2``, precision and stage, or ``fp16.2.2`` with two replicas."""
    precision, stage, *replicas = case.split(".")
    logical = mlp(dim=40, precision=precision, clip=0.5, ema=0.9, micro_steps=2)
    program = lowered(logical, int(stage), WORLD_SIZE, *map(int, replicas))
    return applied(program, (SaveState(),))


def write_state(engine: Engine, name: str, losses: list[float]) -> None:
    """Let rank 0 write the whole state and the losses, behind which stands the loss scale."""
    write_run(engine, [*losses, engine.loss_scale], name)


def save(cases: str, steps: int = 3) -> None:
    """A few steps of each case, a checkpoint, and as many steps again."""
    for case in cases.split(","):
        engine = begun(Engine(program_of(case), EngineSettings(seed=SEED)))
        batches = random_batches(2 * steps, WORLD_SIZE, micro_steps=2)
        losses = [engine.step(ranks[RANK]).loss for ranks in batches[:steps]]
        engine.optimizer.param_groups[0]["lr"] = 0.02
        engine.save(
            FOLDER / case, shared={"epoch": 3}, state={"rank": RANK, "draws": torch.arange(2)}
        )
        write_state(engine, f"{case}.saved", losses)
        state = engine.state_dict(rank0_only=True)
        if RANK != 0:
            assert state == {}
        parameters = engine.full_parameters()
        for name, values in engine.state_dict().items():
            assert torch.equal(values, parameters[name])
            assert RANK != 0 or torch.equal(values, state[name])
        engine.load_state_dict(parameters)
        losses += [engine.step(ranks[RANK]).loss for ranks in batches[steps:]]
        write_state(engine, f"{case}.after", losses)
        engine.close()


def load(folder: str, saved: str, cases: str) -> None:
    """Load the checkpoint of each case of other ranks for a case of these, and take two steps."""
    for source, case in zip(saved.split(","), cases.split(","), strict=True):
        engine = Engine(program_of(case))
        loaded = engine.load(Path(folder) / source)
        assert loaded.step == engine.step_count == 3
        assert loaded.shared == {"epoch": 3}
        assert engine.optimizer.param_groups[0]["lr"] == 0.02
        for rank in range(loaded.manifest.origin.world_size):
            state = loaded.state_of(rank)
            assert isinstance(state, dict)
            assert state["rank"] == rank
            assert state["draws"].tolist() == [0, 1]
        write_state(engine, f"{source}.to.{case}", [])
        batches = random_batches(2, WORLD_SIZE, micro_steps=2, seed=5)
        losses = [engine.step(ranks[RANK]).loss for ranks in batches]
        write_state(engine, f"{source}.to.{case}.after", losses)
        engine.close()


def resumes(folder: str, cases: str) -> None:
    """Go on with the checkpoint of each case three times, one step each, every time with a new engine."""
    for case in cases.split(","):
        path = Path(folder) / case
        losses: list[float] = []
        batches = random_batches(6, WORLD_SIZE, micro_steps=2)
        for step in range(3, 6):
            engine = Engine(program_of(case))
            engine.load(path)
            losses.append(engine.step(batches[step][RANK]).loss)
            path = FOLDER / f"{case}.{step}"
            engine.save(path, wait=step == 4).wait()
            if step == 5:
                write_state(engine, f"{case}.resumed", losses)
            engine.close()


def within(*cases: str) -> None:
    """Each case is left within a step and continued."""
    for case in cases:
        _within(case)


def _within(case: str) -> None:
    """Save after a micro-step; new engines finish the step with the same program, and begin it anew with another."""
    engine = begun(Engine(program_of(case)))
    steps = random_batches(3, WORLD_SIZE, micro_steps=3)
    engine.step(steps[0][RANK])
    first, second, third = steps[1][RANK]
    engine.micro_step(first, is_last=False)
    engine.micro_step(second)
    with pytest.raises(UserError, match="is_last=False"):
        engine.save(FOLDER / "unknown")
    engine.micro_step(third)
    losses = [engine.update().loss, engine.step(steps[2][RANK]).loss]
    write_state(engine, f"{case}.whole", losses)
    engine.close()

    engine = begun(Engine(program_of(case)))
    engine.step(steps[0][RANK])
    engine.micro_step(first, is_last=False)
    engine.micro_step(second, is_last=False)
    engine.save(FOLDER / f"{case}.within", wait=False)
    engine.close()

    engine = Engine(program_of(case))
    loaded = engine.load(FOLDER / f"{case}.within")
    assert (loaded.micro_steps, loaded.step, loaded.notes) == (2, 1, ())
    engine.micro_step(third)
    losses = [engine.update().loss, engine.step(steps[2][RANK]).loss]
    write_state(engine, f"{case}.continued", losses)
    engine.close()


def failing(where: str) -> None:
    """The disk of one rank fails in the background; every rank learns of it, and the next save works."""
    engine = begun(Engine(program_of("fp32.2")))
    batches = random_batches(3, WORLD_SIZE, micro_steps=2)
    engine.step(batches[0][RANK])

    def full(*_: object, **__: object) -> object:
        raise UserError("the disk is full")

    with ExitStack() as patches:
        if RANK == 1:
            patches.enter_context(patch.object(LocalStorage, "create", full))
        pending = engine.save(FOLDER / "failed", wait=False)
        while not pending.is_done:
            time.sleep(0.01)
    if where == "step":
        try:
            engine.step(batches[1][RANK])
        except UserError as error:
            sys.stdout.write(str(error))
            sys.stdout.flush()
        engine.step(batches[1][RANK])
        engine.save(FOLDER / "next")
    if where != "exit":
        engine.close()


def lost() -> None:
    """Rank 1 ends while it writes; the others say so, and the next job finds no half of a checkpoint."""
    engine = begun(Engine(program_of("fp32.2")))

    def end(*_: object, **__: object) -> object:
        os._exit(9)

    with ExitStack() as patches:
        if RANK == 1:
            patches.enter_context(patch.object(LocalStorage, "create", end))
        engine.save(FOLDER / "half")


def large(precision: str) -> Program:
    """A program of 800 MB of weights and moments in all."""
    return lowered(mlp(blocks=16, dim=2048, precision=precision), 3, WORLD_SIZE)


def save_large() -> None:
    """Save the large program."""
    engine = begun(Engine(large("fp32")))
    engine.save(FOLDER.parent / "large")
    engine.close()


def load_large(precision: str) -> None:
    """Print by how much a load raises the peak of this process, and the bytes of the buffers that it fills."""
    engine = Engine(large(precision))
    before = peak_resident_bytes()
    engine.load(FOLDER.parent / "large")
    after = peak_resident_bytes()
    persistent = sum(buffer.size_bytes for buffer in engine.program.buffers if buffer.is_persistent)
    sys.stdout.write(f"{after - before} {persistent}")
    sys.stdout.flush()
    engine.close()


def main() -> None:
    scenario, *args = sys.argv[1:]
    join()
    code = 0
    scenarios: dict[str, Callable[..., None]] = {
        function.__name__.replace("_", "-"): function
        for function in (save, load, resumes, within, failing, lost, save_large, load_large)
    }
    try:
        scenarios[scenario](*args)
    except ZeroirError as error:
        sys.stderr.write(str(error))
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
