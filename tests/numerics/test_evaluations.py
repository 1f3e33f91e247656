"""Evaluations equal eager PyTorch under ``eval()`` bit for bit, and leave no trace in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.runtime.support import Ranks, require_success
from tests.support.captures import captured
from tests.support.evaluating import model as source
from tests.support.lowering import applied
from zeroir.api.checks.check import check_model
from zeroir.config import CompileOptions, make_options
from zeroir.frontend.capture.captured_model import CapturedModel
from zeroir.frontend.lowering.tracing import program_of
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.program import Program
from zeroir.ir.text import print_program
from zeroir.passes.pipelines import for_options
from zeroir.runtime.engine.results import RankEvaluation
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = pytest.mark.slow

FILE = Path(source.__file__)
STEPS = 3


def options(stage: int, world_size: int, micro_steps: int = 1) -> CompileOptions:
    return make_options({"stage": stage, "world_size": world_size, "micro_steps": micro_steps})


@cache
def capture() -> CapturedModel:
    return captured(load_model_file(str(FILE)), "fp32", ())


def lowered(chosen: CompileOptions) -> Program:
    return applied(program_of(capture(), chosen), for_options(chosen))


def started(program: Program, schedule_seed: int = 0) -> Lockstep:
    lockstep = Lockstep(program, seed=5, schedule_seed=schedule_seed)
    lockstep.initialise(source.model, 5)
    return lockstep


def eager(lockstep: Lockstep, rank: int) -> nn.Module:
    """The model with what one virtual rank holds now, under ``eval()``."""
    module, values = source.model().eval(), lockstep.full_parameters()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])
        for name, buffer in module.named_buffers():
            # What training never reads has no buffer in the program.
            if (held := lockstep.buffers(rank).get(f"buffer.{name}")) is not None:
                buffer.copy_(held.view(buffer.shape))
    return module


def streams(world_size: int) -> list[Iterator[tuple[Tensor, Tensor]]]:
    return [source.batches(rank, world_size, 5) for rank in range(world_size)]


def leaves(value: object) -> list[Tensor]:
    return cast("list[Tensor]", pytree.tree_leaves(value))


def require_equal(lockstep: Lockstep, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Evaluate on every rank, and compare the loss and the outputs with eager PyTorch's."""
    for rank, found in enumerate(lockstep.evaluate(batches)):
        with torch.no_grad():
            loss, outputs = source.loss(eager(lockstep, rank), batches[rank])
        assert torch.equal(found.loss, loss)
        assert pytree.tree_structure(found.outputs) == pytree.tree_structure(outputs)
        for own, wanted in zip(leaves(found.outputs), leaves(outputs), strict=True):
            assert own.dtype is wanted.dtype
            assert torch.equal(own, wanted)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("stage", range(4))
def test_lockstep_equals_eager(stage: int, world_size: int) -> None:
    lockstep = started(lowered(options(stage, world_size)), schedule_seed=stage)
    batches = streams(world_size)
    for _ in range(STEPS):
        require_equal(lockstep, [next(stream) for stream in batches])
        lockstep.step([[next(stream)] for stream in batches])
    require_equal(lockstep, [next(stream) for stream in batches])


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_evaluations_change_nothing(stage: int, micro_steps: int) -> None:
    program = lowered(options(stage, 3, micro_steps))
    runs: list[tuple[list[float], list[Tensor]]] = []
    for is_evaluated in (False, True):
        lockstep, batches = started(program), streams(3)
        losses: list[float] = []
        for _ in range(STEPS):
            if is_evaluated:
                lockstep.evaluate([source.batch()] * 3)
                lockstep.evaluate([source.batch()] * 3)
            given = [list(islice(stream, micro_steps)) for stream in batches]
            losses += [float(result.loss) for result in lockstep.step(given)]
        state = [*lockstep.full_state().values()]
        held = [
            tensor
            for rank in range(3)
            for name, tensor in lockstep.buffers(rank).items()
            if name.startswith("buffer.")
        ]
        runs.append((losses, [tensor.clone() for tensor in (*state, *held)]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_later_evaluations_leave_earlier_outputs_alone() -> None:
    lockstep = started(lowered(options(0, 1)))
    first, second = islice(source.batches(0, 1, 9), 2)
    (evaluation,) = lockstep.evaluate([first])
    kept = [tensor.clone() for tensor in leaves(evaluation.outputs)]
    (other,) = lockstep.evaluate([second])
    assert not torch.equal(evaluation.loss, other.loss)
    assert all(map(torch.equal, leaves(evaluation.outputs), kept))


def test_the_check_compares_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options(2, 3)
    assert check_model(str(FILE), chosen, steps=2, seed=0).is_equal
    monkeypatch.setattr(Lockstep, "evaluate", _wrong)
    comparison = check_model(str(FILE), chosen, steps=2, seed=0)
    found = {(difference.step, difference.what) for difference in comparison.differences}
    assert found == {
        (step, f"the evaluated loss of rank {rank}") for step in (1, 2) for rank in range(3)
    }


def _wrong(lockstep: Lockstep, batches: Sequence[object]) -> list[RankEvaluation]:
    assert lockstep.program.eval_loss is not None
    return [RankEvaluation(loss=torch.zeros(()), outputs=None) for _ in batches]


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gloo_equals_lockstep(tmp_path: Path, world_size: int) -> None:
    program = tmp_path / "program.zir"
    program.write_text(print_program(program_of(capture(), options(0, world_size))))
    require_success(Ranks(world_size, tmp_path, "evaluations", str(FILE), str(program)).wait())
    for stage in range(4):
        lockstep, batches = started(lowered(options(stage, world_size))), streams(world_size)
        expected: list[Tensor] = []
        for _ in range(STEPS):
            found = lockstep.evaluate([next(stream) for stream in batches])
            expected += [found[0].loss, *leaves(found[0].outputs)]
            lockstep.step([[next(stream)] for stream in batches])
        saved = load_file(tmp_path / f"evaluations.{stage}.safetensors")
        assert len(saved) == len(expected)
        assert all(torch.equal(saved[str(at)], value) for at, value in enumerate(expected))
