"""The shipped example: its data, its contract as a model file, and its reference curve."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import gpt
from tools import reference_curve

CURVE = json.loads((Path(__file__).parents[1] / "data" / "gpt_reference_curve.json").read_text())


def test_ranks_share_out_one_global_batch() -> None:
    start = 7
    streams = [gpt.batches(rank, 3, seed=1, start_step=start) for rank in range(3)]
    whole = [torch.cat([next(stream)[0] for stream in streams]) for _ in range(2)]
    again = [
        next(itertools.islice(gpt.batches(rank, 3, seed=1), start + 1, None))[0]
        for rank in range(3)
    ]
    assert torch.equal(whole[1], torch.cat(again))
    assert not torch.equal(whole[0], whole[1])


def test_batches_have_the_shape_of_the_example_and_predict_the_next_byte() -> None:
    tokens, targets = next(gpt.batches(0, 1, seed=0))
    for real, example in zip((tokens, targets), gpt.batch(), strict=True):
        assert (real.shape, real.dtype) == (example.shape, example.dtype)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_modules_initialise_themselves_one_by_one() -> None:
    module = gpt.GPT(gpt.WIDTH, gpt.HEADS, gpt.LAYERS)
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    module.apply(gpt.init)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert module.head.weight is module.tokens.weight


def test_the_reference_learns_more_than_byte_frequencies() -> None:
    assert CURVE["unigram_entropy"] == pytest.approx(gpt.unigram_entropy(), abs=1e-5)
    last = CURVE["losses"][-10:]
    assert sum(last) / len(last) < CURVE["unigram_entropy"] - 1


@pytest.mark.slow
def test_the_reference_curve_is_what_pytorch_computes() -> None:
    settings = CURVE["settings"]
    losses, _ = reference_curve.train(
        ranks=settings["ranks"], steps=8, seed=settings["seed"], learning_rate=settings["lr"]
    )
    assert losses == pytest.approx(CURVE["losses"][:8], rel=1e-3)
