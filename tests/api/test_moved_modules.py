"""A module whose values are in an engine says so, and gets them back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.api.living_net import (
    X,
    engine_of,
    net_of,
)
from zeroir.errors import UserError

USES: list[Callable[[nn.Sequential], object]] = [
    lambda net: net(X),
    nn.Module.state_dict,
    lambda net: net.to(torch.float64),
    copy.deepcopy,
    lambda net: net[0].weight.data,
    lambda net: net.get_buffer("1.running_mean").zero_(),
    lambda net: net.get_parameter("0.weight").tolist(),
]


def test_a_module_says_that_its_values_are_in_the_engine() -> None:
    net = net_of()
    engine = engine_of(net)
    engine.step(X)
    for use in USES:
        with pytest.raises(UserError, match="values of this module are in the engine"):
            use(net)
    engine.close(return_values=False)


def test_a_module_without_values_can_be_described_and_saved_later(tmp_path: Path) -> None:
    net = net_of()
    shapes = [(name, p.shape, p.numel(), p.dtype) for name, p in net.named_parameters()]
    engine = engine_of(net)
    engine.step(X)
    described = [(name, p.shape, p.numel(), p.dtype) for name, p in net.named_parameters()]
    assert described == shapes
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert "in the engine" in repr(net[0].weight)
    expected = engine.state_dict()
    engine.close()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    saved = torch.load(tmp_path / "net.pt")
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert type(net[0].weight) is nn.Parameter


def test_values_are_not_given_back_while_an_exception_is_handled() -> None:
    net = net_of()
    engine = engine_of(net)

    def failing() -> None:
        try:
            raise ZeroDivisionError
        finally:
            engine.close()

    with pytest.raises(ZeroDivisionError):
        failing()
    assert net[0].weight.is_meta
