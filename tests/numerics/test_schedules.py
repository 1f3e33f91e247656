"""Programs under a learning-rate schedule compute as torch.optim does with the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.test_config_file import MODEL
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError

ONE_CYCLE = "OneCycle{cycle_min_lr=0.001,cycle_max_lr=0.01,cycle_first_step_size=3}"
# Scales above 2^15 overflow in fp16, so the first three steps are skipped.
OVERFLOWS = {"precision": "fp16", "initial_loss_scale": 2.0**18, "loss_scale_hysteresis": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "cosine{warmup=2}"},
        {"schedule": ONE_CYCLE, "stage": 1},
        {"schedule": "WarmupDecayLR{warmup_num_steps=2}", "optimizer": "sgd", "stage": 2},
        {"schedule": "linear", "group": "*.bias:weight_decay=0,lr=0.01", "optimizer": "adam"},
        {"schedule": "WarmupLR{warmup_num_steps=3}", **OVERFLOWS},
    ],
)
def test_every_step_has_its_settings(tmp_path: Path, options: dict[str, object]) -> None:
    """The learning rate falls or rises in every step, so that one step with another's would differ."""
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    both = [
        check_model(
            str(path), make_options({"world_size": 2, "lr": 0.05, **values}), steps=6, seed=3
        )
        for values in (options, {**options, "schedule": None})
    ]
    assert all(comparison.is_equal for comparison in both)
    assert both[0].losses != both[1].losses


def test_a_setting_that_leaves_its_range_is_one_sentence(tmp_path: Path) -> None:
    """The first beta grows without bound after the cycle."""
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    schedule = (
        "OneCycle{cycle_min_lr=0.001,cycle_max_lr=0.01,cycle_first_step_size=1,decay_step_size=1,"
        "decay_mom_rate=0.5}"
    )
    options = make_options({"world_size": 1, "schedule": schedule})
    with pytest.raises(UserError, match="beta"):
        check_model(str(path), options, steps=6, seed=3)
