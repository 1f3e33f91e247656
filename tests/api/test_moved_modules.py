"""A module whose values are in an engine says so, and gets them back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroir
from tests.api.living_net import (
    X,
    engine_of,
    loss,
    net_of,
)
from zeroir.errors import CheckpointWarning, UserError

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


def test_what_would_train_a_module_without_values_is_refused() -> None:
    net = net_of()
    before = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = engine_of(net)
    engine.step(X)
    uses: list[Callable[[], object]] = [
        before.step,
        torch.optim.AdamW(net.parameters()).step,
        lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(net.parameters(), 1.0),
    ]
    for use in uses:
        with pytest.raises(UserError, match="gradients of this module are in the engine"):
            use()
    before.zero_grad()
    net.zero_grad()
    with pytest.raises(UserError, match=r"read them with engine\.gradients"):
        _ = net[0].weight.grad
    engine.close(return_values=False)


def test_a_module_is_as_before_once_its_engine_is_closed(tmp_path: Path) -> None:
    net = net_of()
    engine = engine_of(net, evaluate=True)
    engine.step(X)
    engine.close()
    assert not vars(net[0].weight)
    torch.save(net, tmp_path / "net.pt")
    for call in (engine.step, engine.evaluate, engine.micro_step):
        with pytest.raises(UserError, match="The engine was closed"):
            call(X)
    engine.close()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_scripts_optimizer_updates_again_once_the_engine_is_closed(momentum: float) -> None:
    net = net_of()
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    compiled = zeroir.compile(net, X, loss=loss, optimizer=own, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False)
    engine.step(X)
    for method in (own.state_dict, lambda: own.load_state_dict({})):
        with pytest.raises(UserError, match="The engine has the states of this optimizer"):
            method()
    engine.close()
    plain = copy.deepcopy(net)
    new = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=momentum)
    for module in (net, plain):
        loss(module, X).backward()  # type: ignore[no-untyped-call]
    new.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.step()
        own.step()
    new.step()
    assert [w.category for w in caught] == [CheckpointWarning] * bool(momentum)
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value)
    own.load_state_dict(own.state_dict())
