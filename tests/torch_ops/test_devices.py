"""Code that names accelerators runs on the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zeroir.torch_ops.devices import OneDevice

CUDA = torch.device("cuda", 1)
MOVES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.cuda(),
    lambda x: x.cuda(CUDA, non_blocking=True),
    lambda x: x.cpu(),
    lambda x: x.to("cuda"),
    lambda x: x.to(0),
    lambda x: x.to(CUDA, non_blocking=True),
    lambda x: x.to(device=CUDA),
    lambda x: x.to("cuda", torch.float32),
    lambda x: x.to(CUDA, None, True),
]
CONVERSIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.to("cuda", torch.float64),
    lambda x: x.to(CUDA, dtype=torch.float64),
    lambda x: x.to(device="cuda", dtype=torch.float64, non_blocking=True),
    lambda x: x.to(torch.float64, True),
    lambda x: x.to(torch.ones((), dtype=torch.float64)),
    lambda x: x.new_ones(x.shape, dtype=torch.float64, device="cuda"),
    lambda x: torch.ones_like(x, dtype=torch.float64, device=CUDA),
    lambda x: torch.ones(x.shape, dtype=torch.float64, device="xpu"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("move", MOVES)
def test_a_move_leaves_the_tensor_on_its_device(
    move: Callable[[Tensor], Tensor], device: str
) -> None:
    x = torch.ones(2, 3, device=device)
    with OneDevice():
        assert move(x) is x


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_all_arguments_but_the_device_are_used(convert: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3)
    with OneDevice():
        converted = convert(x)
    assert torch.equal(converted, torch.ones(2, 3, dtype=torch.float64))


def test_requested_copies_are_made() -> None:
    x = torch.ones(2, 3)
    with OneDevice():
        copy = x.to("cuda", copy=True)
    assert copy is not x
    assert torch.equal(copy, x)


def test_the_cpu_and_the_meta_device_are_not_ignored() -> None:
    with torch.device("meta"), OneDevice():
        assert torch.linspace(0, 1, 3, device="cpu").tolist() == [0, 0.5, 1]
        assert torch.ones(3, device="cuda").is_meta
    with OneDevice():
        assert torch.ones(3).to("meta").is_meta


def test_modules_stay_on_their_device() -> None:
    with torch.device("meta"), OneDevice():
        module = nn.Linear(2, 3).cuda().to("cuda:1", torch.bfloat16)
    assert {(p.is_meta, p.dtype) for p in module.parameters()} == {(True, torch.bfloat16)}
