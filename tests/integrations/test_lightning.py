"""ZeroirStrategy does what Lightning's DDP does, and refuses in a sentence what a compiled step cannot do."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import zeroir
from tests.runtime.support import Ranks, require_success

# Imports of lightning take seconds, so tests that are left out make none.
pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.dist
def test_two_ranks_fit_as_ddp_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    module = "tests.integrations.lightning_workers"
    ranks = Ranks(2, tmp_path, module=module)
    require_success(ranks.wait(240))


def test_what_a_compiled_step_cannot_do_is_refused(tmp_path: Path) -> None:
    """A value that would be the same in every step, or that a program does not compute, is never logged or used."""
    from torch import Tensor

    from tests.integrations.lightning_workers import Batch, Net, loader, quiet_trainer
    from zeroir import UserError, ZeroirStrategy

    class LogsAnAccuracy(Net):
        def training_step(self, batch: Batch, *others: object) -> Tensor:
            loss = super().training_step(batch, *others)
            self.log("accuracy", loss.detach() * 2)
            return loss

    class ReadsTheEpoch(Net):
        def training_step(self, batch: Batch, *others: object) -> Tensor:
            return super().training_step(batch, *others) * (self.current_epoch + 1)

    class LogsANumber(Net):
        def validation_step(self, batch: Batch, *others: object) -> dict[str, Tensor]:
            self.log("answer", 42.0)
            return super().validation_step(batch, *others)

    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Clips(Net):
        def configure_gradient_clipping(self, *_: object) -> None:
            pass

    cases: list[tuple[type[Net], dict[str, Any], str]] = [
        (LogsAnAccuracy, {}, "training_step logs 'accuracy', which is not the loss"),
        (ReadsTheEpoch, {}, "training_step reads 'current_epoch' of the trainer"),
        (LogsANumber, {}, "validation_step logs 'answer', which is a float"),
        (Manual, {}, "manual optimization"),
        (Clips, {}, "leave configure_gradient_clipping out"),
        (Net, {"gradient_clip_algorithm": "value"}, "leave gradient_clip_algorithm out"),
        (Net, {"detect_anomaly": True}, "leave detect_anomaly out"),
        (Net, {"precision": "64-true"}, "precision is 64-true, but should be one of 32-true"),
    ]
    for kind, arguments, sentence in cases:
        trainer = quiet_trainer(ZeroirStrategy(), tmp_path, **arguments)
        data = loader(0, 8, 4, is_shuffled=False)
        with pytest.raises(UserError, match=re.escape(sentence)):
            trainer.fit(kind(), data, data)


IGNORED = {
    "world_size": 4,
    "micro_steps": 2,
    "schedule": "cosine",
    "optimizer": "sgd",
}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *(
            ({name: value}, f"{name}={value!r} of ZeroirStrategy has no effect")
            for name, value in IGNORED.items()
        ),
        (
            {"evaluate": zeroir.Evaluate(outputs=("loss",))},
            "outputs=('loss',) of ZeroirStrategy has no effect",
        ),
        ({"find_unused_parameters": True}, "There is no keyword find_unused_parameters="),
        ({"world_size": 1, "micro_steps": 1}, None),
    ],
)
def test_options_that_the_trainer_would_ignore_are_refused(
    tmp_path: Path, options: dict[str, Any], sentence: str | None
) -> None:
    from tests.integrations.lightning_workers import Net, loader, quiet_trainer
    from zeroir import UserError, ZeroirStrategy

    trainer = quiet_trainer(ZeroirStrategy(**options), tmp_path)
    data = loader(0, 8, 4, is_shuffled=False)
    if sentence is None:
        trainer.fit(Net(), data)
        return
    with pytest.raises(UserError, match=re.escape(sentence)):
        trainer.fit(Net(), data)


def test_a_checkpoint_that_replaces_another_leaves_no_older_state(tmp_path: Path) -> None:
    """A resume would take the state of the engine for that of the newer checkpoint."""
    from zeroir import ZeroirStrategy

    state = tmp_path / "last.ckpt.zeroir"
    state.mkdir()
    ZeroirStrategy().save_checkpoint({}, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").exists()
    assert not state.exists()
