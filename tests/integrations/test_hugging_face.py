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

from tests.runtime.support import Ranks, require_success
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
    ranks = Ranks(3, tmp_path, module=module)
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
    """The last batch of an epoch has fewer rows; changes of the model between two trainings count."""
    from transformers import Trainer

    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    losses: list[list[float]] = []
    kinds: list[Callable[..., Trainer]] = [Trainer, ZeroirTrainer]
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


def test_batches_of_one_size_train_layer_by_layer(tmp_path: Path) -> None:
    """Such a program has no dims, so a piece of an evaluation with fewer rows has a program of its own."""
    from transformers import Trainer

    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    data = [{"input_ids": row} for row in torch.arange(1, 41).view(8, 5) % workers.VOCABULARY]
    by_layer = partial(ZeroirTrainer, zeroir_options={"micro_steps": MicroSteps(order="layer")})
    kinds: list[Callable[..., Trainer]] = [Trainer, by_layer]
    logs: list[list[float]] = []
    for number, kind in enumerate(kinds):
        trainer = kind(
            workers.model(),
            workers.arguments(tmp_path / str(number), num_train_epochs=1),
            data_collator=workers.collate,
            train_dataset=data,
            eval_dataset=data[:3],
        )
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        logs.append([*losses, trainer.evaluate()["eval_loss"]])
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def test_a_convolutional_network_trains_on_a_last_batch_with_fewer_rows(tmp_path: Path) -> None:
    """Its batch norm has the statistics of each batch's own rows; one program takes them all."""
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer

    from tests.integrations import any_length_workers, trainer_workers
    from zeroir import ZeroirTrainer
    from zeroir.integrations import engine_of_trainer

    generator = torch.Generator().manual_seed(4)
    data = [
        {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": index % 3}
        for index in range(7)
    ]
    trainers: list[Trainer] = []
    counted: list[object] = []
    for kind in (Trainer, ZeroirTrainer):
        torch.manual_seed(0)
        config = ResNetConfig(
            embedding_size=4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            layer_type="basic",
            id2label={0: "a", 1: "b", 2: "c"},
        )
        given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        trainer = kind(
            ResNetForImageClassification(config),
            trainer_workers.arguments(tmp_path / kind.__name__, save_strategy="no", **given),
            train_dataset=data,
            eval_dataset=data[:5],
        )
        with any_length_workers.programs_counted(engine_of_trainer, counted):
            trainer.train()
            trainer.evaluate()
        trainers.append(trainer)
    stock, own = trainers
    assert counted == ["inputs.pixel_values: 1<=rows<=4, 3, 32, 32; inputs.labels: rows"]
    trainer_workers.require_same_logs(own, stock)
    any_length_workers.require_close(trainer_workers.trained(own), trainer_workers.trained(stock))


def test_lengths_are_multiples_of_the_collators_and_shapes_that_are_given_win(
    tmp_path: Path,
) -> None:
    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    class Collator:
        pad_to_multiple_of = 4

        def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            return {
                name: torch.nn.functional.pad(
                    each, (0, -each.shape[1] % 4), value=-100 if name == "labels" else 0
                )
                for name, each in workers.collate(rows).items()
            }

    of_shapes = (
        "input_ids: rows<=2, 2<=length<=9; attention_mask: rows, length; labels: rows, length"
    )
    shapes: list[str | None] = []
    for collator, options in (
        (Collator(), {}),
        (workers.collate, {"shapes": of_shapes}),
    ):
        trainer = ZeroirTrainer(
            workers.model(),
            workers.arguments(tmp_path, max_steps=2, save_strategy="no"),
            data_collator=collator,
            train_dataset=workers.samples(7),
            zeroir_options=cast("CompileKeywords", options),
        )
        trainer.train()
        assert trainer._running is not None
        shapes.append(trainer._running.engine.program.options.texts.get("shapes"))
    of_collator, given = shapes
    assert of_collator is not None
    assert "inputs.input_ids: rows<=2, 4*length<=4;" in of_collator
    assert given is not None
    assert given.replace("inputs.", "") == of_shapes


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
                with pytest.raises(UserError, match=r"values of .* are in .* engine"):
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


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("kept_compilers")
def test_compiled_kernels_take_batches_of_all_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No segment is compiled twice; a program for each length would compile all of them again."""
    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path / "cache"))
    logs: list[list[float]] = []
    for is_compiled in (False, True):
        trainer = ZeroirTrainer(
            workers.model(),
            workers.arguments(tmp_path, max_steps=4, save_strategy="no", torch_compile=is_compiled),
            data_collator=workers.collate,
            train_dataset=workers.samples(16, longest=9),
        )
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert len(logs[0]) == 4
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
    assert 0 < len(list((tmp_path / "cache").rglob("kernel.so"))) < 16


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
