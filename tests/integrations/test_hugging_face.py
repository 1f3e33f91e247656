"""ZeroirTrainer does what Hugging Face's Trainer does, and refuses in a sentence what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

from tests.runtime.support import COMPILING_SOURCES, Ranks, require_success
from zeroir.config.steps import MicroSteps
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.api.keywords import CompileKeywords

# Imports of transformers take seconds, so tests that are left out make none.
pytestmark = [
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6"),
]


@pytest.mark.dist
def test_three_ranks_train_as_ddp_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    module = "tests.integrations.trainer_workers"
    ranks = Ranks(3, tmp_path, module=module, sources=COMPILING_SOURCES)
    require_success(ranks.wait(240))


@pytest.mark.parametrize(
    "given",
    [{"auto_find_batch_size": True}, {"save_only_model": True, "load_best_model_at_end": True}],
    ids=["batch-size", "best-model"],
)
def test_arguments_that_an_engine_cannot_follow_are_refused(
    given: dict[str, object], tmp_path: Path
) -> None:
    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    saving = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    with pytest.raises(UserError, match=next(iter(given))):
        ZeroirTrainer(workers.model(), workers.arguments(tmp_path, **saving, **given))


def test_a_rank_alone_trains_with_the_users_optimizer_and_schedule(tmp_path: Path) -> None:
    """Rows are added to the last batch of an epoch; changes of the model between two trainings count.

    So it is where the micro-batches of a step run layer by layer.
    """
    from transformers import Trainer

    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    losses: list[list[float]] = []
    by_layer = partial(ZeroirTrainer, zeroir_options={"micro_steps": MicroSteps(order="layer")})
    kinds: list[Callable[..., Trainer]] = [Trainer, ZeroirTrainer, by_layer]
    for number, kind in enumerate(kinds):
        model = workers.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parts = [LambdaLR(optimizer, lambda _: 0.5), ExponentialLR(optimizer, 0.1)]
        schedule = SequentialLR(optimizer, parts, [1])
        given = {"lr_scheduler_type": "constant", "num_train_epochs": 1}
        trainer = kind(
            model,
            workers.arguments(tmp_path / str(number), **given),
            data_collator=workers.collate,
            train_dataset=workers.samples(7, longest=5),
            eval_dataset=workers.samples(5, longest=5),
            optimizers=(optimizer, schedule),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        rates = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
        changed = trainer.evaluate()["eval_loss"]
        # Predictions need a program with outputs, compiled as for training although the model evaluates.
        labelled = trainer.predict(cast("Any", workers.samples(2, longest=4)))
        predicted = torch.as_tensor(labelled.predictions)
        assert predicted.shape == (2, 4, workers.VOCABULARY)
        mass = float(predicted.abs().sum())
        ids = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
        unlabelled = cast("Any", [{"input_ids": row} for row in ids["input_ids"]])
        trainer.data_collator = lambda rows: {
            "input_ids": torch.stack([r["input_ids"] for r in rows])
        }
        predicted = torch.as_tensor(trainer.predict(unlabelled).predictions)
        assert predicted.shape == (2, 4, workers.VOCABULARY)
        total = float(predicted.abs().sum())
        losses.append([before, evaluated, changed, mass, total, *logged, *rates])
    expected, *actual = losses
    for own in actual:
        assert own == pytest.approx(expected, rel=1e-4)
    assert expected[1] != pytest.approx(expected[2], rel=1e-3)


def test_a_model_without_its_values_and_an_optimizer_of_the_compiler_are_refused(
    tmp_path: Path,
) -> None:
    """A callback that computes with the model of the trainer reads what to do; so does one that generates."""
    from transformers import TrainerCallback

    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    ids = torch.ones(2, 4, dtype=torch.long)
    refused: list[str] = []

    class Computes(TrainerCallback):
        def on_step_end(self, *_: object, **given: object) -> None:
            model = cast("Any", given["model"])
            for call in (model, partial(model.generate, max_new_tokens=2)):
                with pytest.raises(UserError, match=r"with trainer\.gathered\(\) as model"):
                    call(input_ids=ids)
                refused.append(str(call))

    trainer = ZeroirTrainer(
        workers.model(),
        workers.arguments(tmp_path, max_steps=1, save_strategy="no"),
        data_collator=workers.collate,
        train_dataset=workers.samples(4, longest=4),
        callbacks=[Computes()],
    )
    trainer.train()
    assert len(refused) == 2
    assert workers.trained(trainer)(input_ids=ids).logits.isfinite().all()

    for given, sentence in (
        ({"optimizer": "sgd"}, "optimizer='sgd' of zeroir_options has no effect"),
        ({"world_size": 4}, "world_size=4 of zeroir_options has no effect"),
        ({"micro_steps": 4}, "micro_steps=4 of zeroir_options has no effect"),
        ({"stages": 3}, "There is no keyword stages="),
        ("adam", "zeroir_options is 'adam', but should be a dict"),
    ):
        with pytest.raises(UserError, match=sentence):
            ZeroirTrainer(workers.model(), zeroir_options=cast("CompileKeywords", given))


@pytest.mark.parametrize(
    "given",
    [
        {"bf16_full_eval": True},
        {"ddp_find_unused_parameters": True},
        {"torch_compile": True, "torch_compile_mode": "max-autotune"},
        {"torch_compile_backend": "eager"},
        {"torch_empty_cache_steps": 5},
        {"debug": "underflow_overflow"},
    ],
    ids=lambda given: [*given][-1],
)
def test_arguments_that_would_be_ignored_are_refused(
    tmp_path: Path, given: dict[str, object]
) -> None:
    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    name = [*given][-1]
    with pytest.raises(UserError, match=rf"{name}=.* of TrainingArguments has no effect with an"):
        ZeroirTrainer(workers.model(), workers.arguments(tmp_path, **given))
    ZeroirTrainer(workers.model(), workers.arguments(tmp_path, torch_compile=True, use_cpu=True))


def test_an_epoch_that_does_not_end_with_a_group_is_refused_at_once(tmp_path: Path) -> None:
    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    trainer = ZeroirTrainer(
        workers.model(),
        workers.arguments(tmp_path),
        data_collator=workers.collate,
        train_dataset=workers.samples(6, longest=5),
        zeroir_options={"micro_steps": MicroSteps(order="layer")},
    )
    with pytest.raises(UserError, match=r"last step of an epoch has 1 batch, but .* groups of 2"):
        trainer.train()
