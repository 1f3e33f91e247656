"""Batches of other shapes in each step and on each rank give the bits of eager PyTorch at these shapes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

import zeroir
from examples import any_length, gpt
from tests.support.models import any_size
from zeroir.api.checks.check import check_model
from zeroir.api.checks.drawn_batches import batch_of_sizes, drawn_sizes
from zeroir.config import make_options
from zeroir.errors import UserError

CASES: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0, "world_size": 2},
    "stage 2 with micro-steps in bf16": {
        "stage": 2, "world_size": 3, "precision": "bf16", "micro_steps": 3, "clip": 1.0,
    },
    "stage 3 in fp16, recomputed": {"stage": 3, "world_size": 4, "precision": "fp16", "recompute": "*"},
    "everything offloaded": {
        "stage": 3, "world_size": 2, "precision": "bf16", "offload": "optimizer,parameters,gradients",
    },
    "hybrid, speculative": {
        "stage": 2, "mesh": "replicate=2,shard=2", "offload": "optimizer,gradients", "clip": 1.0, "speculate": True,
    },
    "paged": {"stage": 3, "world_size": 2, "precision": "bf16", "page_optimizer": "16KiB", "page_bytes": "4KiB"},
    "8-bit states, moving averages": {"stage": 1, "world_size": 2, "optimizer_bits": 8, "ema": 0.9},
    "unit by unit, recomputed": {
        "stage": 3, "world_size": 3, "micro_steps": 3, "order": "layer", "recompute": "*", "clip": 1.0,
    },
    "groups unit by unit, everything offloaded": {
        "stage": 3, "world_size": 2, "micro_steps": 4, "order": "layer=2", "precision": "bf16",
        "offload": "optimizer,parameters,gradients",
    },
    "unit by unit, whole gradients": {"stage": 0, "world_size": 2, "micro_steps": 2, "order": "layer"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_shape_gives_the_bits_of_eager_pytorch(name: str) -> None:
    result = check_model(any_length.__file__, make_options(CASES[name]), steps=5, seed=3)
    assert result.is_equal, result
    assert len(set(result.losses)) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"stage": 0}, {"stage": 3}, {"stage": 3, "micro_steps": 3, "order": "layer"}],
)
def test_sizes_after_strides_and_padding_give_the_bits_of_eager_pytorch(
    options: dict[str, object],
) -> None:
    chosen = make_options({"world_size": 2, **options})
    result = check_model(any_size.__file__, chosen, steps=4, seed=5)
    assert result.is_equal, result


@pytest.mark.slow
def test_one_step_of_each_rank_s_own_shape() -> None:
    result = check_model(
        any_length.__file__, make_options({"stage": 3, "world_size": 2}), steps=2, seed=1
    )
    assert result.is_equal, result


@pytest.mark.slow
def test_sizes_are_drawn_without_batches_or_where_asked(tmp_path: Path) -> None:
    options = make_options({"stage": 2, "world_size": 2, "micro_steps": 2})
    asked = check_model(any_length.__file__, options, steps=2, seed=3, draw_shapes=True)
    assert asked.is_equal, asked
    assert {(2, 1), (64, 6), (2, 6), (64, 1)} < set(asked.drawn)
    assert str(asked).splitlines()[1].startswith("Drawn sizes of length × rows: 2 × 1, ")
    text = Path(any_length.__file__).read_text()
    (tmp_path / "model.py").write_text(text[: text.index("def batches(")])
    alone = check_model(str(tmp_path / "model.py"), options, steps=1, seed=3)
    assert alone.is_equal, alone
    assert alone.drawn == asked.drawn[: len(alone.drawn)]
    assert not check_model(any_length.__file__, options, steps=1, seed=3).drawn
    # Batches of the file have up to 64 words.
    shapes = "input_ids: rows<=3, 2<=length<=20; labels: rows, length"
    given = make_options({"stage": 2, "world_size": 2, "shapes": shapes})
    smaller = check_model(any_length.__file__, given, steps=1, seed=3)
    assert smaller.is_equal, smaller
    assert smaller.drawn == ((2, 1), (20, 3))
    with pytest.raises(UserError, match="--draw-shapes is for a program with dims"):
        check_model(gpt.__file__, options, steps=1, seed=3, draw_shapes=True)


@pytest.mark.slow
def test_drawn_batches_have_the_values_of_the_example() -> None:
    program = zeroir.compile(any_length.__file__, world_size=2).program
    tokens = torch.randint(any_length.VOCABULARY, (3, 12))
    example = {"input_ids": tokens, "labels": tokens}
    chance = torch.Generator().manual_seed(0)
    for sizes in islice(drawn_sizes(program, 0, seed=1), 6):
        drawn = batch_of_sizes(program, example, sizes, chance)
        assert isinstance(drawn, dict)
        assert tuple(drawn["input_ids"].shape) == (sizes["rows"], sizes["length"])
        assert torch.equal(drawn["input_ids"], drawn["labels"])
        assert set(drawn["input_ids"].flatten().tolist()) <= set(tokens.flatten().tolist())
    empty = {"input_ids": tokens[:, :0], "labels": tokens}
    with pytest.raises(UserError, match="its 'input_ids' has no elements to repeat"):
        batch_of_sizes(program, empty, {"rows": 2, "length": 4}, chance)
