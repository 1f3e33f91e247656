"""A module and a loss that read attributes, globals and objects, which tests change between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zeroir
from zeroir.runtime.engine.engine import Engine

X = torch.linspace(-1, 1, 24).view(6, 4)


@dataclass
class Settings:
    """An object of the user's that the loss reads."""

    weight: float = 0.25
    note: str = "unread"


class Scaled(nn.Module):
    """Reads attributes, a class attribute, and a list."""

    slope = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0
        self.epoch = 0
        self.factors = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.leaky_relu(x, self.slope) / self.tau
        return y * self.factors[0] + self.factors[1]


def net_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled(), nn.Linear(4, 2))


beta = 0.0


settings = Settings()


table = {"gain": 1.0}


def penalty(y: Tensor) -> Tensor:
    return beta * y.abs().mean() + settings.weight * y.square().mean() * table["gain"]


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return penalty(module(x))


def engine_of(net: nn.Module, loss: Callable[..., object] = loss, **options: object) -> Engine:
    given = {"lr": 0.1, "evaluate": False, **options}
    compiled = zeroir.compile(net, X, loss=loss, world_size=1, **given)  # type: ignore[arg-type]
    return compiled.engine(self_check=False, compile_again=False)


def set_global(name: str, value: object) -> Callable[[nn.Sequential], None]:
    return lambda _: globals().__setitem__(name, value)


def scaled(net: nn.Sequential) -> Scaled:
    return next(module for module in net if isinstance(module, Scaled))


def plain_step(net: nn.Module, loss: Tensor, lr: float) -> float:
    net.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=lr)
    return loss.item()


@contextmanager
def restored(*nets: nn.Module) -> Iterator[None]:
    """Undo the changes of the block, and those of networks that are not in the values of tensors."""
    names = {name: globals()[name] for name in ("beta", "penalty")}
    others = (settings.weight, table["gain"], Scaled.slope)
    modules = [module for net in nets for module in net.modules()]
    attributes = [{key: copy.copy(value) for key, value in vars(m).items()} for m in modules]
    parameters = [parameter for net in nets for parameter in net.parameters()]
    trained = [parameter.requires_grad for parameter in parameters]
    try:
        yield
    finally:
        globals().update(names)
        settings.weight, table["gain"], Scaled.slope = others
        for module, before in zip(modules, attributes, strict=True):
            for key, value in before.items():
                match vars(module)[key]:
                    case dict() as present:
                        present.clear()
                        present.update(value)
                    case list() as present:
                        present[:] = value
                    case _:
                        setattr(module, key, value)
        for parameter, is_trained in zip(parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)


def require_counted(read: Callable[[], Any], change: Callable[[], object]) -> None:
    """Check that a step has eager PyTorch's loss after a change of what the loss reads, and another one than before."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = (net(x) * read()).square().mean()
        return value

    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    compiled = zeroir.compile(net, X, loss=loss, lr=0.0, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False)
    before = engine.step(X).loss
    assert engine.step(X).loss == before
    change()
    after = engine.step(X).loss
    engine.close()
    assert after != before
    with torch.no_grad():
        assert after == float(loss(net, X))
