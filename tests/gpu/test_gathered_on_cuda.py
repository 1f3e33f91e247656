"""A module in hand on a CUDA device gives its memory to the engine, and modules are lent on that device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.support import held_bytes
from tests.runtime.constructors import Mlp
from tests.runtime.support import lowered, random_batches, require_parameters
from tests.support.programs import mlp
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.publishing.receiver import Receiver

pytestmark = pytest.mark.gpu

NEW_STREAM: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


def test_a_module_on_the_device_is_never_held_twice(device: torch.device) -> None:
    dim, blocks = 1024, 24
    program = lowered(mlp(dim=dim, blocks=blocks), 3, 1)
    module = Mlp(dim=dim, blocks=blocks).to(device)
    model_bytes = sum(p.nbytes for p in module.parameters())
    expected = {name: p.detach().cpu() for name, p in module.named_parameters()}
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    engine = Engine(program, device=device)
    engine.initialise(module)
    peak = torch.cuda.max_memory_allocated(device) - before
    assert peak < sum(held_bytes(program)) - 0.8 * model_bytes
    assert all(p.is_meta for p in module.parameters())
    with engine.gathered() as gathered:
        assert all(p.device == device for p in gathered.parameters())
        require_parameters(gathered.cpu(), "", expected, torch.float32)
    engine.close()


def test_loans_see_the_steps_before_them(device: torch.device) -> None:
    """Also on a stream other than that on which the engine was made."""
    engine = Engine(lowered(mlp(precision="bf16"), 3, 1), device=device)
    engine.initialise(Mlp())
    for (batch,) in (step[0] for step in random_batches(3, 1)):
        engine.step(batch)
        expected = {name: value.cpu() for name, value in engine.full_parameters().items()}
        with torch.cuda.stream(NEW_STREAM(device)), engine.gathered() as gathered:
            require_parameters(gathered.cpu(), "", expected, torch.bfloat16)
    engine.close()


def test_weights_go_from_the_device_to_a_module_on_it(device: torch.device, tmp_path: Path) -> None:
    engine = Engine(lowered(mlp(precision="bf16"), 3, 1), device=device)
    engine.initialise(Mlp())
    received = Mlp().to(device, torch.bfloat16)
    receiver = Receiver(tmp_path / "mlp.safetensors")
    for (batch,) in (step[0] for step in random_batches(2, 1)):
        engine.step(batch)
        engine.publish(tmp_path / "mlp.safetensors")
        assert receiver.update(received)
        expected = {name: value.cpu() for name, value in engine.full_parameters().items()}
        require_parameters(copy.deepcopy(received).cpu(), "", expected, torch.bfloat16)
    engine.close()
