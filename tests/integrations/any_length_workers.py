"""One rank that trains with DDP and with zeroir on batches of any size, its own on each rank, to be run as a module.

The argument says with which library.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.runtime.support import join
from zeroir.config.steps import MicroSteps

VOCABULARY = 32
LONGEST = 13

OF_BATCHES = MicroSteps(mean_over="batches")
"""The mean that DDP takes."""

Sample = tuple[Tensor, int]
Batch = dict[str, Tensor]


def samples(count: int) -> list[Sample]:
    """Sequences of different lengths with a class, the longest one first."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, LONGEST, (count,), generator=generator).tolist()
    return [
        (torch.randint(1, VOCABULARY, (length,), generator=generator), index % 3)
        for index, length in enumerate([LONGEST, *lengths[1:]])
    ]


def collate(rows: Sequence[Sample]) -> Batch:
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    return {"ids": ids, "labels": torch.tensor([label for _, label in rows])}


class Classifier(nn.Module):
    """A class of a sequence from the mean of its tokens, where 0 is no token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, ids: Tensor) -> Tensor:
        is_token = (ids != 0).unsqueeze(2)
        hidden = torch.where(is_token, self.table(ids), 0.0).sum(1) / is_token.sum(1)
        scores: Tensor = self.layers(hidden)
        return scores


def loss(module: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(module(batch["ids"]), batch["labels"])


@contextmanager
def programs_counted(module: ModuleType, counted: list[object]) -> Iterator[None]:
    """Collect the shapes with which a module compiles programs."""
    compile_following = cast("Any", module).compile_following

    def counting(*given: object, **options: object) -> object:
        counted.append(options["shapes"])
        return compile_following(*given, **options)

    cast("Any", module).compile_following = counting
    yield
    cast("Any", module).compile_following = compile_following


def require_close(actual: nn.Module, expected: nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in actual.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-4, atol=1e-6)


def bert(folder: Path) -> None:
    """A last batch has fewer rows on the last rank, and every rank has its own length in every micro-batch."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
        Trainer,
    )

    from tests.integrations import trainer_workers
    from zeroir import ZeroirTrainer
    from zeroir.integrations import engine_of_trainer

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), pad_token="w0"
    )
    world_size = dist.get_world_size()
    data = [
        {"input_ids": ids.tolist(), "label": label} for ids, label in samples(8 * world_size - 1)
    ]
    given: dict[str, object] = {
        "per_device_train_batch_size": 4,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "accelerator_config": {"even_batches": False},
    }
    trainers: list[Trainer] = []
    counted: list[object] = []
    for kind in (Trainer, ZeroirTrainer):
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            id2label={0: "a", 1: "b", 2: "c"},
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        trainer = kind(
            BertForSequenceClassification(config),
            trainer_workers.arguments(folder / kind.__name__, **given),
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=cast("Any", data),
            eval_dataset=cast("Any", data[: 3 * world_size]),
            compute_metrics=trainer_workers.accuracy,
        )
        with programs_counted(engine_of_trainer, counted):
            trainer.train()
        trainers.append(trainer)
    stock, own = trainers
    assert len(counted) == 1
    trainer_workers.require_same_logs(own, stock)
    require_close(trainer_workers.trained(own), trainer_workers.trained(stock))


def lightning(folder: Path) -> None:
    """A loader whose longest batches come later needs a second program, within a step, too."""
    import lightning.pytorch as pl

    from tests.integrations.lightning_workers import quiet_trainer
    from zeroir import ZeroirStrategy
    from zeroir.integrations import lightning as strategies

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()

        def training_step(self, batch: Batch, *_: object) -> Tensor:
            value = loss(self.net, batch)
            self.log("loss", value)
            return value

        def validation_step(self, batch: Batch, *_: object) -> None:
            self.log("val_loss", loss(self.net, batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    longer = [
        (ids.repeat(1 + 29 * (index == 9)), label) for index, (ids, label) in enumerate(samples(30))
    ]
    for data, programs in ((samples(30), 1), (longer, 2)):
        modules: list[Module] = []
        losses: list[float] = []
        counted: list[object] = []
        for strategy in ("ddp", ZeroirStrategy(stage=3, micro_steps=OF_BATCHES)):
            torch.manual_seed(0)
            module = Module()
            trainer = quiet_trainer(
                strategy,
                folder,
                devices=dist.get_world_size(),
                max_steps=-1,
                max_epochs=2,
                accumulate_grad_batches=2,
            )
            loader: Any = DataLoader(cast("Any", data), 4, collate_fn=collate)
            with programs_counted(strategies, counted):
                trainer.fit(module, loader, loader)
            modules.append(module)
            losses.append(float(trainer.callback_metrics["val_loss"]))
        assert len(counted) == programs, counted
        require_close(modules[1], modules[0])
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def accelerate(_: Path) -> None:
    """A loop of one's own: the last batch of an epoch has fewer rows on one rank."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState

    import zeroir
    from zeroir.integrations import accelerate as preparing

    modules: list[nn.Module] = []
    for is_stock in (True, False):
        torch.manual_seed(0)
        model: nn.Module = Classifier()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader: Any = DataLoader(
            cast("Any", samples(8 * dist.get_world_size() - 1)), 4, collate_fn=collate
        )
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        if is_stock:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for _epoch in range(2):
                for batch in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(loss(model, batch))
                        optimizer.step()
                        optimizer.zero_grad()
            model = accelerator.unwrap_model(model)
        else:
            counted: list[object] = []
            with programs_counted(preparing, counted):
                engine, optimizer, loader = zeroir.prepare(
                    accelerator, model, optimizer, loader, loss=loss, micro_steps=OF_BATCHES
                )
                for _epoch in range(2):
                    for batch in loader:
                        with accelerator.accumulate():
                            engine.micro_step(batch, is_last=accelerator.sync_gradients)
                            optimizer.step()
            assert len(counted) == 1, counted
            engine.return_values(model)
            engine.close()
        modules.append(model)
        AcceleratorState._reset_state(False)
        GradientState._reset_state()
    require_close(modules[1], modules[0])


def main() -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    checks: dict[str, Callable[[Path], None]] = {
        "bert": bert,
        "lightning": lightning,
        "accelerate": accelerate,
    }
    join(timeout_s=240)
    checks[sys.argv[1]](Path(os.environ["TEST_FOLDER"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
