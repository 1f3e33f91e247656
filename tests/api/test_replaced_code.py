"""What a script replaces counts: the code of functions and their defaults, functions and settings of torch, classes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import date, datetime
from time import time as now
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroir
from tests.api.living_net import X
from zeroir.errors import UserError

variable = ContextVar("variable", default=1.0)


def doubled(x: Tensor, *, factor: float = 2.0) -> Tensor:
    return x * factor


class Squashed(nn.Linear):
    """Differs from its base in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def loss(net: nn.Module, x: Tensor) -> Tensor:
    y = doubled(F.silu(net(x))).square().mean() * variable.get()
    if torch.are_deterministic_algorithms_enabled() or torch.get_default_dtype() == torch.float64:
        y = y * 2
    return y


def set_variable_twice(*_: object) -> None:
    # The second number may be where the first was.
    for value in (0.5, 0.25, 0.125):
        variable.set(value * 3)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, nn.Module], object]] = {
    "code": lambda m, _: m.setattr(doubled, "__code__", (lambda x, *, factor: x + factor).__code__),
    "default": lambda m, _: m.setitem(doubled.__kwdefaults__ or {}, "factor", 3.0),
    "defaults": lambda m, _: m.setattr(doubled, "__kwdefaults__", {"factor": 3.0}),
    "function": lambda m, _: m.setattr(F, "silu", torch.tanh),
    "method": lambda m, _: m.setattr(Tensor, "square", lambda x: x.exp(), raising=False),
    "forward": lambda m, _: m.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T),
    "class": lambda _, net: setattr(net, "__class__", Squashed),
    "variable": set_variable_twice,
    "setting": lambda *_: torch.use_deterministic_algorithms(mode=True),
    "default dtype": lambda *_: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_replaced_counts_at_the_next_step(
    change: Callable[[pytest.MonkeyPatch, nn.Module], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    value, dtype = variable.get(), torch.get_default_dtype()
    compiled = zeroir.compile(net, X, loss=loss, lr=0.0, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False)
    try:
        before = engine.step(X).loss
        change(monkeypatch, net)
        after = engine.step(X).loss
        engine.close()
        with torch.no_grad():
            assert after == pytest.approx(float(loss(net, X)), rel=1e-6)
        assert after != before
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.set_default_dtype(dtype)
        variable.set(value)


CLOCKS: dict[str, Callable[[], Any]] = {
    "year": lambda: datetime.now().year,
    "today": lambda: date.today().weekday(),
    "imported": lambda: now() // 86_400,
    "text": lambda: int(time.strftime("%d")),
    "calendar": lambda: time.localtime().tm_mon,
    "bit": lambda: secrets.randbelow(2),
}


@pytest.mark.parametrize("read", CLOCKS.values(), ids=CLOCKS)
def test_what_a_clock_or_random_bits_decide_is_refused(read: Callable[[], Any]) -> None:
    def timed(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = net(x).mean() * (1 + read())
        return value

    with pytest.raises(
        UserError, match=r"with a clock .* which .*test_replaced_code\.py:\d+ reads"
    ):
        zeroir.compile(nn.Linear(4, 2), X, loss=timed, lr=0.1, evaluate=False, world_size=1)


def test_a_clock_that_decides_nothing_may_be_read() -> None:
    def timed(net: nn.Module, x: Tensor) -> Tensor:
        is_date = isinstance(datetime.now(), datetime) and datetime(2020, 1, 1) < datetime.now()
        value: Tensor = net(x).mean() * (1 if is_date else 2)
        return value

    zeroir.compile(nn.Linear(4, 2), X, loss=timed, lr=0.1, evaluate=False, world_size=1)
