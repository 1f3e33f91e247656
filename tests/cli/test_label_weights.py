"""``zeroir run`` on three ranks with different numbers of labels: the means of losses of steps and of evaluations."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.cli.conftest import Zeroir
from tests.numerics.label_weight_workers import RANKS, VOCABULARY, Model, batch_of
from tests.support.zygote import run_forked

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODEL = """
from tests.numerics.label_weight_workers import batch_of
from tests.numerics.label_weight_workers import Model as model

def batch():
    return batch_of(0, 0, 0, has_dims=False)

def batches(rank, world_size, seed, start_step=0):
    for step in range(start_step, 100):
        yield batch_of(rank, step, 0, has_dims=False)

def eval_batches(rank, world_size, seed):
    for micro_step in (0, 1):
        yield batch_of(rank, {evaluated}, micro_step, has_dims=False)
"""


def means(model: Model, step: int, micro_steps: int) -> dict[str, float]:
    """Return the mean over all labels of a step's batches, and that of the batches' losses."""
    losses: list[torch.Tensor] = []
    for rank, micro_step in product(range(RANKS), range(micro_steps)):
        tokens, labels = batch_of(rank, step, micro_step, has_dims=False)
        with torch.no_grad():
            hidden = model.embed(tokens)
            for block in model.blocks:
                hidden = torch.relu(block(hidden)) + hidden
            logits = model.head(hidden)[:, :-1].reshape(-1, VOCABULARY)
        each = F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="none")
        losses.append(each[labels[:, 1:].reshape(-1) != -100])
    return {
        "elements": torch.cat(losses).mean().item(),
        "batches": torch.stack([each.mean() for each in losses]).mean().item(),
    }


# One batch of step 7 has no labels, and its loss is NaN.
@pytest.mark.parametrize(("mean_over", "step"), [("elements", 7), ("batches", 8)])
def test_labels_count_alike_by_default_and_batches_on_request(
    zeroir: Zeroir, tmp_path: Path, mean_over: str, step: int
) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(evaluated=step))
    asked = () if mean_over == "elements" else ("--mean-over", mean_over)
    # No step changes the parameters.
    compiling = ("--world-size", RANKS, "--lr", 0, "-o", tmp_path / "model.zir")
    answer = zeroir("compile", tmp_path / "model.py", *map(str, compiling), *asked)
    assert answer.exit_code == 0, answer.err
    running = ["--nproc", str(RANKS), "--steps", "2", "--log-every", "1", "--eval-every", "2"]
    running += ["--model", "model.py", "--seed", "3", "--json"]
    made = run_forked("zeroir", ["run", "model.zir", *running], tmp_path, {"OMP_NUM_THREADS": "1"})
    assert made.returncode == 0, made.stderr
    lines = [json.loads(line) for line in made.stdout.splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    (evaluated,) = [line["eval_loss"] for line in lines if "eval_loss" in line]
    torch.manual_seed(3)
    model = Model()
    of_steps, of_evaluation = (
        [means(model, number, 1) for number in range(2)],
        means(model, step, 2),
    )
    assert losses == pytest.approx([found[mean_over] for found in of_steps], rel=1e-5)
    assert evaluated == pytest.approx(of_evaluation[mean_over], rel=1e-5)
    # Otherwise the test would not tell them apart.
    for found in (*of_steps, of_evaluation):
        assert found["elements"] != pytest.approx(found["batches"], abs=1e-3)
