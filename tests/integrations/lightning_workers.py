"""One rank that trains with Lightning's DDP and with ZeroirStrategy, to be run as a module."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.runtime.support import join
from zeroir import ZeroirStrategy

Batch = tuple[Tensor, Tensor]


class Net(lightning.LightningModule):
    """A classifier that logs its loss in training, and a loss and an accuracy in validation.

    ``rows`` are losses, rates, predictions and metrics in the order of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.rows: list[dict[str, float]] = []

    def training_step(self, batch: Batch, *_: object) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, *_: object) -> dict[str, Tensor]:
        x, y = batch
        logits = self.layers(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), sync_dist=True)
        return {"logits": logits}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: object, *_: object) -> None:
        assert isinstance(outputs, dict)
        (group,) = self.trainer.optimizers[0].param_groups
        step = self.trainer.global_step
        self.rows.append({"step": step, "loss": float(outputs["loss"]), "lr": group["lr"]})

    def on_validation_batch_end(self, outputs: object, *_: object) -> None:
        assert isinstance(outputs, dict)
        logits = outputs["logits"]
        self.rows.append({"rows": logits.shape[0], "logits": float(logits.double().sum())})

    def on_validation_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.rows.append({name: float(value) for name, value in metrics.items()})


def loader(
    seed: int, samples: int, rows: int, *, is_shuffled: bool
) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    y = torch.randint(0, 4, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), rows, shuffle=is_shuffled)


def quiet_trainer(strategy: Strategy | str, folder: Path, **given: object) -> lightning.Trainer:
    """A trainer of one step on one device, unless something else is given."""
    arguments: dict[str, Any] = {
        "max_steps": 1,
        "devices": 1,
        "enable_checkpointing": False,
        **given,
    }
    return lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fitted(
    strategy: Strategy | str, folder: Path, *, epochs: int, go_on: Path | None = None
) -> tuple[lightning.Trainer, Net]:
    """A module trained from seed 1, or on from a checkpoint; the last validation batch is a smaller one."""
    lightning.seed_everything(1, verbose=False)
    module = Net()
    keeper = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    trainer = quiet_trainer(
        strategy,
        folder,
        devices=dist.get_world_size(),
        max_steps=-1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[keeper],
    )
    training = loader(0, 48, 4, is_shuffled=True)
    trainer.fit(module, training, loader(1, 30, 8, is_shuffled=False), ckpt_path=go_on)
    return trainer, module


def require_ranks_fit_as_ddp(folder: Path) -> None:
    """Losses, rates, metrics, predictions and parameters are those of DDP; a resumed run ends bit for bit alike."""
    _, stock = fitted("ddp", folder / "stock", epochs=3)
    trainer, own = fitted(ZeroirStrategy(stage=3), folder / "own", epochs=3)
    assert len(own.rows) == len(stock.rows) > 12
    for row, expected in zip(own.rows, stock.rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(own.state_dict(), stock.state_dict(), rtol=1e-4, atol=1e-6)

    final = {name: tensor.clone() for name, tensor in own.state_dict().items()}

    (best,) = (folder / "own").glob("epoch*.ckpt")
    assert best.name in {path.name for path in (folder / "stock").iterdir()}
    evaluated = trainer.validate(
        own, loader(1, 30, 8, is_shuffled=False), ckpt_path=best, verbose=False
    )
    score = trainer.checkpoint_callback
    assert isinstance(score, ModelCheckpoint)
    assert score.best_model_score is not None
    assert evaluated[0]["val_loss"] == pytest.approx(float(score.best_model_score), rel=1e-5)

    fitted(ZeroirStrategy(stage=3), folder / "half", epochs=2)
    last = folder / "half" / "last.ckpt"
    _, resumed = fitted(ZeroirStrategy(stage=2), folder / "whole", epochs=3, go_on=last)
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, final[name]), name


def main() -> None:
    folder = Path(os.environ["TEST_FOLDER"])
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    join(timeout_s=240)
    require_ranks_fit_as_ddp(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
