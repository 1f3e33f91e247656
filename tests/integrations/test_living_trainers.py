"""What callbacks and hooks of trainers change between steps counts, as in the trainers without zeroir."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

beta = 0.0


def penalty(logits: Tensor) -> Tensor:
    return beta * logits.square().mean()


def compilations(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "compiled again" in record.message]


@pytest.mark.parametrize("own", ["a function", "a method"])
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_callback_of_hugging_faces_trainer_anneals_a_number(
    own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer, TrainerCallback

    from tests.integrations import trainer_workers as workers
    from zeroir import ZeroirTrainer

    class Anneals(TrainerCallback):
        def on_step_begin(self, *others: object, **_: object) -> None:
            step = others[1].global_step  # type: ignore[attr-defined]
            globals()["beta"] = 0.1 * step
            trainer.gamma = 0.1 * step

    def of_outputs(outputs: Any, labels: Tensor, **_: object) -> Tensor:  # noqa: ANN401
        logits = outputs["logits"]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + penalty(logits)

    def compute_loss(self: Any, model: Any, inputs: Any, **others: Any) -> object:  # noqa: ANN401
        outputs = model(**inputs)
        loss = outputs["loss"] + self.gamma * outputs["logits"].square().mean()
        return (loss, outputs) if others.get("return_outputs") else loss

    logs: list[list[float]] = []
    for number, kind in enumerate((Trainer, ZeroirTrainer)):
        globals()["beta"] = 0.0
        named: dict[str, object] = {"gamma": 0.0, "compute_loss": compute_loss}
        as_method = type("OwnLoss", (kind,), {**named, "__module__": __name__})
        make: Callable[..., Any] = as_method if own == "a method" else kind
        given = {"compute_loss_func": of_outputs} if own == "a function" else {}
        trainer = make(
            workers.model(),
            workers.arguments(tmp_path / str(number), num_train_epochs=1, save_strategy="no"),
            data_collator=workers.collate,
            train_dataset=workers.samples(24, longest=5),
            callbacks=[Anneals()],
            **given,
        )
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    expected, found = logs
    assert found == pytest.approx(expected, rel=1e-4)
    (said,) = compilations(caplog)
    assert said.endswith("and follows it from now on.")


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_hook_of_lightnings_module_anneals_a_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import lightning.pytorch as lightning

    from tests.integrations.lightning_workers import Batch, Net, loader, quiet_trainer
    from zeroir import ZeroirStrategy

    class Anneals(Net):
        gamma = 0.0

        def on_train_batch_start(self, _: object, number: int) -> None:
            self.gamma = 0.1 * number
            globals()["beta"] = 0.2 * number

        def training_step(self, batch: Batch, *_: object) -> Tensor:
            x, y = batch
            logits = self.layers(x)
            loss: Tensor = nn.functional.cross_entropy(logits, y) + penalty(logits)
            loss = loss + self.gamma * logits.abs().mean()
            self.log("loss", loss)
            return loss

    rows: list[list[dict[str, float]]] = []
    for strategy in ("auto", ZeroirStrategy()):
        globals()["beta"] = 0.0
        lightning.seed_everything(1, verbose=False)
        module = Anneals()
        trainer = quiet_trainer(strategy, tmp_path, max_steps=6, use_distributed_sampler=False)
        trainer.fit(module, loader(0, 32, 4, is_shuffled=False))
        rows.append([row for row in module.rows if "loss" in row])
    expected, found = rows
    assert len(found) == len(expected) == 6
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    (said,) = compilations(caplog)
    assert said.endswith("and follows it from now on.")


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_loop_of_accelerate_anneals_a_number(caplog: pytest.LogCaptureFixture) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from torch.utils.data import DataLoader, TensorDataset

    import zeroir

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        logits = model(x)
        return nn.functional.cross_entropy(logits, y) + penalty(logits)

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(20, 8), torch.randint(0, 4, (20,))), 4)
    model, plain = nn.Linear(8, 4), nn.Linear(8, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    try:
        prepared = zeroir.prepare(Accelerator(cpu=True), model, optimizer, data, loss=loss)
        engine, steps, loader = prepared[0], prepared[1], prepared[2]
        for number, batch in enumerate(loader):
            globals()["beta"] = 0.1 * number
            result = engine.micro_step(batch, is_last=True)
            steps.step()
            expected = loss(plain, batch)
            reference.zero_grad()
            expected.backward()  # type: ignore[no-untyped-call]
            reference.step()
            assert result.loss == pytest.approx(expected.item(), rel=1e-5)
        engine.close()
    finally:
        globals()["beta"] = 0.0
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert len(compilations(caplog)) == 1
