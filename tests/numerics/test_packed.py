"""Packed documents train as they do one by one, and audio and words of any length give the bits of eager PyTorch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics import packed_workers as workers
from tests.numerics.packed_workers import LR, RANKS, STEPS
from tests.runtime.support import Ranks, require_success
from tests.support.models import packed_llama, speech
from zeroir.api.checks.check import check_model
from zeroir.config import make_options

pytestmark = [pytest.mark.slow]


def of_one_process() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return parameters and losses of plain SGD on each document by itself, a mean over all tokens of a step."""
    module = workers.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    ranks = [packed_llama.batches(rank, RANKS, seed=1) for rank in range(RANKS)]
    losses: list[float] = []
    for step in islice(zip(*ranks, strict=True), STEPS):
        documents = [each for batch in step for each in packed_llama.documents_of(batch)]
        counted = [each["labels"].shape[1] - 1 for each in documents]
        means = [module(**each).loss for each in documents]
        loss = sum(mean * n for mean, n in zip(means, counted, strict=True)) / sum(counted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return dict(module.named_parameters()), losses


@pytest.mark.dist
def test_ranks_with_other_borders_train_as_the_documents_one_by_one(tmp_path: Path) -> None:
    module = "tests.numerics.packed_workers"
    ranks = Ranks(RANKS, tmp_path, module=module)
    require_success(ranks.wait())
    found = load_file(tmp_path / "trained.safetensors")
    losses = found.pop("losses")
    parameters, expected = of_one_process()
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0)
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [packed_llama, speech], ids=["packed Llama", "speech"])
def test_the_bits_are_those_of_eager_pytorch(model: object) -> None:
    options = make_options({"stage": 3, "world_size": 2, "micro_steps": 2, "recompute": "*"})
    result = check_model(str(getattr(model, "__file__")), options, steps=3, seed=5)  # noqa: B009
    assert result.is_equal, result
    assert len(set(result.losses)) == 3


def test_trainer_takes_packed_documents(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from zeroir.integrations.hugging_face import ZeroirTrainer

    documents = [
        {"input_ids": document["input_ids"][0].tolist()}
        for batch in islice(packed_llama.batches(0, 1, seed=2), 9)
        for document in packed_llama.documents_of(batch)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, max_steps=4, use_cpu=True, report_to=[],
        learning_rate=LR, optim="sgd", save_strategy="no", max_grad_norm=0.0, logging_strategy="no",
    )  # fmt: skip
    trained = []
    for trainer in (transformers.Trainer, ZeroirTrainer):
        model = workers.module()
        collator = transformers.DataCollatorWithFlattening()
        trainer(
            model=model, args=arguments, train_dataset=documents, data_collator=collator
        ).train()
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
