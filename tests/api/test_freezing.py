"""Modes that a script sets between steps take effect as in plain PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeroir
from zeroir.runtime.engine.engine import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The module .* is in evaluation mode"),
]

WIDTH = 16
"""The fused kernels of torch's optimizers compute the last elements of other numbers in another way."""

X = torch.linspace(-1, 9, 12 * WIDTH).view(12, WIDTH).sin()
Change = Callable[[nn.Sequential], object]


def net_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.0),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) - x).square().mean()
    return loss


class Pair:
    """A module in an engine and the same one under plain PyTorch; changes apply to both."""

    def __init__(
        self, optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: object
    ) -> None:
        self.net, self.plain = net_of(), net_of()
        self.optimizer = optimizer(self.plain)
        self.own = optimizer(self.net)
        compiled = zeroir.compile(
            self.net,
            X,
            loss=loss_of,
            optimizer=self.own,
            world_size=1,
            **options,  # type: ignore[arg-type]
        )
        self.engine: Engine = compiled.engine(self_check=False)

    def change(self, change: Change) -> None:
        change(self.net)
        change(self.plain)

    def step(self, count: int = 2) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = loss_of(self.plain, X)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            assert self.engine.step(X).loss == loss.item()
        self.require_equal(self.engine.state_dict())

    def require_equal(self, found: dict[str, Tensor]) -> None:
        expected = self.plain.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    def close(self) -> None:
        self.engine.close()
        self.require_equal(self.net.state_dict())


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


def of_module(index: int, change: Callable[[nn.Module], object]) -> Change:
    return lambda net: change(net[index])


MODES: list[tuple[str, Change]] = [
    ("a norm", of_module(1, nn.Module.eval)),
    ("both norms", lambda net: (net[1].eval(), net[5].eval())),
    ("the model", nn.Module.eval),
    ("a norm without its statistics", lambda net: setattr(net[5], "momentum", 0.0)),
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", [each[1] for each in MODES], ids=[each[0] for each in MODES])
def test_modes_take_effect_at_the_next_step(change: Change, stage: int) -> None:
    pair = Pair(momentum, stage=stage)
    pair.step()
    pair.change(change)
    pair.step()
    pair.change(nn.Module.train)
    pair.step()
    pair.close()


def test_a_model_that_begins_in_evaluation_mode_may_leave_it() -> None:
    pair = Pair(momentum)
    pair.change(of_module(1, nn.Module.eval))
    pair.step()
    pair.change(of_module(1, nn.Module.train))
    pair.step()
    # The engine has the count now.
    assert pair.net[1].num_batches_tracked.is_meta
    pair.close()
