"""One rank that trains with Hugging Face's Trainer and with ZeroirTrainer, to be run as a module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.runtime.support import join
from zeroir import ZeroirTrainer

VOCABULARY = 32


def model() -> LlamaForCausalLM:
    """One layer, for models of several equal ones are traced in tests of the frontend and of `bert`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def with_adapters() -> nn.Module:
    """The model with LoRA: peft's where that is installed, otherwise with some parameters frozen."""
    base = model()
    if find_spec("peft") is None:
        for name, parameter in base.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        return base
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # It is zero at first, and then lora_A has no gradient.
            parameter.data.normal_(std=0.3, generator=generator)
    return cast("nn.Module", adapted)


def samples(count: int, *, longest: int = 9) -> list[dict[str, Tensor]]:
    """Sequences of growing lengths, the later the longer, so that programs for longer batches are needed."""
    generator = torch.Generator().manual_seed(2)
    lengths = [3 + index * (longest - 2) // count for index in range(count)]
    return [
        {"input_ids": torch.randint(1, VOCABULARY, (length,), generator=generator)}
        for length in lengths
    ]


def collate(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)

    def stacked(value: int, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([pad(row, (0, longest - len(row)), value=value) for row in rows])

    ids = [example["input_ids"] for example in examples]
    labels = [torch.where(row % 5 == 0, -100, row) for row in ids]
    return {
        "input_ids": stacked(0, ids),
        "attention_mask": stacked(0, [torch.ones_like(row) for row in ids]),
        "labels": stacked(-100, labels),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits = np.asarray(prediction.predictions)
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}


def arguments(folder: Path, **others: object) -> TrainingArguments:
    given: dict[str, object] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **others,
    }
    return TrainingArguments(output_dir=str(folder), **cast("dict[str, Any]", given))


def require_same_logs(actual: Trainer, expected: Trainer) -> None:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss")
    compared = 0
    for own, theirs in zip(actual.state.log_history, expected.state.log_history, strict=True):
        for name in names:
            assert (name in own) == (name in theirs), (own, theirs)
            if name in own:
                assert own[name] == pytest.approx(theirs[name], rel=1e-4), (name, own, theirs)
                compared += 1
    assert compared > 8


def trained(trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def require_ranks_train_as_ddp(folder: Path, rank: int) -> None:
    """Losses, norms, rates, metrics and parameters are those of DDP; a resumed run ends bit for bit as the other."""
    given: dict[str, object] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
    }
    data, eval_data = samples(22), samples(7)
    trainers: list[Trainer] = []
    for kind in (Trainer, ZeroirTrainer):
        trainer = kind(
            with_adapters(),
            arguments(folder / kind.__name__, **given),
            data_collator=collate,
            train_dataset=data,
            eval_dataset=eval_data,
            compute_metrics=accuracy,
        )
        trainer.train()
        trainers.append(trainer)
    stock, own = trainers
    require_same_logs(own, stock)
    expected = parameters(trained(stock))
    for name, parameter in parameters(trained(own)).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
    assert own.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-4)

    saved = folder / "ZeroirTrainer" / "checkpoint-2"
    (file,) = saved.glob("*model.safetensors")
    theirs = load_file(folder / "Trainer" / "checkpoint-2" / file.name)
    for name, tensor in load_file(file).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)

    again = ZeroirTrainer(
        with_adapters(),
        arguments(folder / "resumed", eval_strategy="steps", eval_steps=2, save_strategy="no"),
        data_collator=collate,
        train_dataset=data,
        eval_dataset=eval_data,
        compute_metrics=accuracy,
    )
    again.train(resume_from_checkpoint=str(saved))
    last = max((folder / "ZeroirTrainer").glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
    if rank == 0:
        own_values = trained(again).state_dict()
        for name, tensor in load_file(last / file.name).items():
            key = name if name in own_values else name.replace(".weight", ".default.weight")
            assert torch.equal(own_values[key], tensor), name
    dist.barrier()


def main() -> None:
    rank = int(os.environ["RANK"])
    folder = Path(os.environ["TEST_FOLDER"])
    os.environ["LOCAL_RANK"] = str(rank)
    # peft and accelerate use what transformers and torch deprecate.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    join(timeout_s=240)
    require_ranks_train_as_ddp(folder, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
