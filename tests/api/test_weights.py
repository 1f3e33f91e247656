"""Weights of batches in model files and for modules in hand, through the public functions."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroir
from tests.support.models import unlabelled
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError

MODEL = str(Path(unlabelled.__file__))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"stage": 0},
        {"stage": 3, "micro_steps": 2},
        {"stage": 2, "micro_steps": 3, "precision": "fp16"},
        {"stage": 3, "micro_steps": 3, "accumulate_locally": True, "precision": "bf16"},
        {"stage": 3, "world_size": 4, "mesh": "replicate=2,shard=2", "micro_steps": 2},
        {"stage": 1, "precision": "fp16", "loss_scale": 128.0},
        {"stage": 3, "clip": 0.1, "micro_steps": 2},
        {"stage": 3, "optimizer": "muon", "micro_steps": 2, "ema": 0.5},
        {"stage": 2, "optimizer": "adafactor"},
        {"stage": 2, "offload": "optimizer,gradients", "clip": 0.1, "speculate": True},
    ],
    ids=str,
)
def test_weighted_training_equals_eager_replicas(choices: dict[str, Any]) -> None:
    """Some batches have no label at all: their loss is NaN, their weight 0, and they count nothing."""
    options = make_options({"world_size": 3, **choices})
    comparison = check_model(MODEL, options, steps=3, seed=0)
    assert comparison.is_equal, str(comparison)


@pytest.mark.slow
def test_k_batches_are_one_batch_of_their_labels() -> None:
    """The gradient of 4 batches of 2 sequences is that of one batch of 8, within the rounding of sums."""
    stream = unlabelled.batches(0, 1, seed=5)
    pieces = [next(stream) for _ in range(4)]
    whole = tuple(torch.cat([piece[i] for piece in pieces]) for i in range(2))
    trained: list[dict[str, Tensor]] = []
    for batches in (pieces, [whole]):
        torch.manual_seed(0)
        compiled = zeroir.compile(
            unlabelled.model(),
            batches[0],
            weight=unlabelled.weight,
            micro_steps=2,
            world_size=1,
            optimizer="sgd",
            lr=1.0,
            evaluate=False,
        )
        engine = compiled.engine()
        result = engine.step(list(batches))
        assert result.weight == float(unlabelled.weight(whole))  # type: ignore[arg-type]
        trained.append(engine.full_parameters())
        trained[-1]["loss"] = torch.tensor(result.loss)
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_program_from_a_file_is_given_its_weights_again(tmp_path: Path) -> None:
    example = unlabelled.batch()
    compiled = zeroir.compile(
        unlabelled.model(),
        example,
        weight=unlabelled.weight,
        world_size=1,
        micro_steps=2,
        evaluate=False,
    )
    compiled.save(tmp_path / "small.zir")
    loaded = zeroir.load(tmp_path / "small.zir")
    with pytest.raises(UserError, match=r"give the engine the function weight\(batch\)"):
        loaded.engine(model=unlabelled.model()).step(example)
    engine = loaded.engine(model=unlabelled.model(), weight=unlabelled.weight)
    assert math.isfinite(engine.step([example, example]).loss)


@pytest.mark.slow
def test_a_program_for_one_batch_says_that_it_is_lowered_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="zeroir")
    torch.manual_seed(0)
    model = unlabelled.model()
    compiled = zeroir.compile(
        model, unlabelled.batch(), weight=unlabelled.weight, world_size=1, evaluate=False
    )
    other = zeroir.compile(
        model,
        unlabelled.batch(),
        weight=unlabelled.weight,
        world_size=1,
        micro_steps=2,
        evaluate=False,
    )
    engine = compiled.engine(keep_module=True)
    expected = other.engine(keep_module=True)
    stream = unlabelled.batches(1, 2, seed=1)
    for count in (1, 3, 2):
        batches = [next(stream) for _ in range(count)]
        assert engine.step(batches).loss == expected.step(batches).loss
    said = [record for record in caplog.records if "lowered again" in record.getMessage()]
    assert len(said) == 1
    for name, value in engine.full_parameters().items():
        assert torch.equal(value, expected.full_parameters()[name]), name
