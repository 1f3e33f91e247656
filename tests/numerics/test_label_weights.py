"""Ranks with different numbers of labels train as one process with all labels, without being told how to weigh them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import zeroir
from tests.numerics import label_weight_workers as workers
from tests.numerics.label_weight_workers import (
    MICRO_STEPS,
    RANKS,
    STEPS,
    VOCABULARY,
    batch_of,
    counted,
)
from tests.runtime.support import Ranks, require_success
from zeroir.api.checks.check import check_model
from zeroir.config import make_options

pytestmark = [pytest.mark.slow]


def of_one_process(*, has_dims: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return parameters and losses of plain SGD in FP64 on all labels of a step at once."""
    module = workers.module().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses: list[float] = []
    for step in range(STEPS):
        logits: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        for rank, micro_step in product(range(RANKS), range(MICRO_STEPS)):
            tokens, own = batch_of(rank, step, micro_step, has_dims=has_dims)
            hidden = module.embed(tokens)  # type: ignore[operator]
            for block in module.blocks:  # type: ignore[union-attr]
                hidden = torch.relu(block(hidden)) + hidden
            logits.append(module.head(hidden)[:, :-1].reshape(-1, VOCABULARY))  # type: ignore[operator]
            labels.append(own[:, 1:].reshape(-1))
        loss = F.cross_entropy(torch.cat(logits), torch.cat(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return dict(module.state_dict()), losses


@pytest.mark.dist
@pytest.mark.parametrize("has_dims", [False, True], ids=["one shape", "dims"])
def test_three_ranks_train_as_one_process_with_all_labels(tmp_path: Path, has_dims: bool) -> None:
    ranks = Ranks(
        RANKS,
        tmp_path,
        module="tests.numerics.label_weight_workers",
        environment={"HAS_DIMS": str(int(has_dims))},
    )
    require_success(ranks.wait())
    found = load_file(tmp_path / "trained.safetensors")
    losses = found.pop("losses")
    parameters, expected = of_one_process(has_dims=has_dims)
    torch.testing.assert_close(losses.double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


MODEL = """
from torch.export import Dim
from tests.numerics.label_weight_workers import MICRO_STEPS, RANKS, Model, batch_of, counted

def model():
    return Model(smoothing=0.1)

def batch():
    return batch_of(0, 0, 0, has_dims={has_dims})

def batches(rank, world_size, seed, start_step=0):
    for number in range(10_000):
        yield batch_of(rank, number // MICRO_STEPS, number % MICRO_STEPS, has_dims={has_dims})
"""
SHAPES = """
def shapes():
    return ((Dim("rows", max=4), Dim("length", max=16)),) * 2
"""
WEIGHT = """
def weight(batch):
    return counted(batch)
"""


@pytest.mark.parametrize("has_dims", [False, True], ids=["one shape", "dims"])
def test_the_bits_are_those_of_replicas_with_the_same_weights_given(
    tmp_path: Path, has_dims: bool
) -> None:
    text = MODEL.format(has_dims=has_dims) + (SHAPES if has_dims else "")
    (tmp_path / "given.py").write_text(text + WEIGHT)
    (tmp_path / "derived.py").write_text(text)
    for precision in ("fp32", "bf16"):
        choices = {"world_size": RANKS, "micro_steps": MICRO_STEPS, "precision": precision}
        options = make_options(choices)
        given, derived = (
            check_model(str(tmp_path / name), options, steps=STEPS, seed=0)
            for name in ("given.py", "derived.py")
        )
        assert given.is_equal, given
        assert derived.is_equal, derived
        assert given.losses == derived.losses


def test_the_weight_of_the_only_batch_of_a_step_rounds_nothing() -> None:
    batches = [batch_of(1, step, 0, has_dims=False) for step in range(6)]
    losses: list[list[float]] = []
    for mean_over in ("elements", "batches"):
        engine = zeroir.compile(
            workers.module(),
            batches[0],
            loss=lambda net, batch: net(*batch),
            optimizer="sgd",
            lr=0.5,
            micro_steps=zeroir.MicroSteps(mean_over=mean_over),
        ).engine()
        results = [engine.step(batch) for batch in batches]
        losses.append([result.loss for result in results])
        engine.close()
        if mean_over == "elements":
            assert [result.weight for result in results] == [*map(counted, batches)]
    assert losses[0] == losses[1]
