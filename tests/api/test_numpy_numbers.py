"""NumPy's numbers, and functions of NumPy of any number, are followed as Python's floats are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.living_net import X

number: float = 0.0

EXPRESSIONS: dict[str, tuple[Callable[[float], object], Callable[[], object]]] = {
    "float64": (np.float64, lambda: number),
    "float32": (np.float32, lambda: np.float32(3) * number + number / 7),
    "int64": (lambda value: np.int64(10 * value), lambda: number),
    "exp": (np.float64, lambda: np.exp(-number)),
    "cos of a float": (float, lambda: 0.5 * (1 + np.cos(np.pi * number))),
    "minimum": (float, lambda: np.minimum(1.0, number)),
    "tensor": (np.float64, lambda: torch.tensor(number, dtype=torch.float32)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "factor"), EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_more_values_than_programs_count(
    kind: Callable[[float], object], factor: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = net(x).square().mean() * factor()
        return value

    monkeypatch.setitem(globals(), "number", kind(0.1))
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    compiled = zeroir.compile(net, X, loss=loss, lr=0.0, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False)
    losses, expected = [], []
    with torch.no_grad(), engine.gathered() as lent:
        for step in range(1, 12):
            monkeypatch.setitem(globals(), "number", kind(step * 0.125))
            expected.append(float(loss(lent, X)))
    for step in range(1, 12):
        monkeypatch.setitem(globals(), "number", kind(step * 0.125))
        losses.append(engine.step(X).loss)
    assert losses == expected


def test_a_number_of_numpy_that_forward_changes_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.scale = np.float32(1)

        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale * np.float32(0.5)
            value: Tensor = self.layer(x).mean() * float(self.scale)
            return value

    with pytest.raises(zeroir.UserError, match="changes scale and computes something else"):
        zeroir.compile(Counting(), X, lr=0.1, world_size=1)
