"""zeroir.prepare: a loop of accelerate goes on from its states, and methods that an engine replaces say so.

That the losses are accelerate's own is tested by the guide in docs/moving.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from zeroir.api.keywords import CompileKeywords
from zeroir.errors import UserError

# Imports of accelerate take seconds, so tests that are left out make none.
pytestmark = [
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
    pytest.mark.slow,
]

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def own_accelerator() -> Iterator[None]:
    """accelerate keeps its state in classes."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def data() -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(20, 8), torch.randint(0, 4, (20,)))


def trained(folder: Path, *, go_on: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after two epochs of 5 batches, two a step; the state between them is saved or loaded."""
    from accelerate import Accelerator

    import zeroir

    samples = data()
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    engine, steps, loader, schedule = zeroir.prepare(
        accelerator, model, optimizer, DataLoader(samples, 4, shuffle=True), scheduler, loss=loss
    )
    losses: list[float] = []
    for epoch in range(2):
        if epoch == 0 and go_on:
            continue
        if epoch == 1 and go_on:
            accelerator.load_state(str(folder))
        if epoch == 1 and not go_on:
            for _ in range(2):  # The second state replaces the first.
                accelerator.save_state(str(folder))
        for batch in loader:
            with accelerator.accumulate():
                result = engine.micro_step(batch, is_last=accelerator.sync_gradients)
                steps.step()
                schedule.step()
            losses += [result.loss, engine.optimizer.param_groups[0]["lr"]]
    values = engine.full_parameters()
    assert engine.step_count == 6
    engine.close()
    return losses, values


def test_a_loop_goes_on_from_its_state_bit_for_bit(tmp_path: Path) -> None:
    losses, whole = trained(tmp_path / "state", go_on=False)
    torch.rand(7)  # Generators have gone on when another process loads the state.
    losses_on, resumed = trained(tmp_path / "state", go_on=True)
    assert losses_on == losses[10:]
    assert len(losses) == 20
    for name, value in resumed.items():
        assert torch.equal(value, whole[name]), name


def test_what_an_engine_replaces_is_refused() -> None:
    from accelerate import Accelerator

    import zeroir

    samples = data()
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    sampler = BatchSampler(SequentialSampler(samples), 4, drop_last=True)
    loader = DataLoader(samples, batch_sampler=sampler)
    with pytest.raises(UserError, match="pass an example batch of one rank as batch="):
        zeroir.prepare(accelerator, model, optimizer, loader, loss=loss)
    with pytest.raises(UserError, match="is a list, but should be a DataLoader"):
        zeroir.prepare(accelerator, model, optimizer, cast("DataLoader[Any]", [1]), loss=loss)
    example = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    ignored: list[tuple[CompileKeywords, str]] = [
        ({"world_size": 4}, "world_size=4 of zeroir.prepare has no effect"),
        ({"optimizer": "sgd"}, "optimizer='sgd' of zeroir.prepare has no effect"),
        ({"schedule": "cosine"}, "schedule='cosine' of zeroir.prepare has no effect"),
    ]
    for options, sentence in ignored:
        with pytest.raises(UserError, match=re.escape(sentence)):
            zeroir.prepare(
                accelerator, model, optimizer, loader, loss=loss, batch=example, **options
            )
    engine, _, loader = zeroir.prepare(
        accelerator, model, optimizer, loader, loss=loss, batch=example
    )
    assert len(loader) == 5
    with pytest.raises(UserError, match=r"has an engine of zeroir\.prepare already"):
        zeroir.prepare(accelerator, model, optimizer, loader, loss=loss, batch=example)
    with pytest.raises(UserError, match=r"call engine\.micro_step\(batch\) in its place"):
        accelerator.backward(torch.zeros(()))
    with pytest.raises(UserError, match=r"pass clip= to zeroir\.prepare"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    engine.close()


@pytest.mark.parametrize("name", ["kwargs_handlers, ddp_handler", "dynamo_backend"])
def test_settings_of_an_accelerator_for_what_an_engine_replaces_are_refused(name: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    import zeroir

    model = nn.Linear(8, 4)
    given: dict[str, Any] = (
        {"dynamo_backend": "inductor"}
        if name == "dynamo_backend"
        else {"kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=10)]}
    )
    accelerator = Accelerator(cpu=True, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=rf"\({name}\), which has no effect on an engine"):
        zeroir.prepare(accelerator, model, optimizer, DataLoader(data(), 4), loss=loss)
