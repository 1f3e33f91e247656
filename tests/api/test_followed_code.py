"""Tensors, optimizers and functions outside the module: an engine follows them, or refuses a change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.living_net import (
    Scaled,
    X,
    engine_of,
    loss,
    net_of,
    plain_step,
)
from tests.runtime.support import Ranks, require_success
from zeroir.errors import UserError


def test_a_module_that_the_loss_reads_is_compared_too() -> None:
    other = Scaled()

    def with_other(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = other(module(x))
        return y.square().mean()

    engine = engine_of(net_of(), with_other)
    engine.step(X)
    other.tau = 0.5
    with pytest.raises(UserError, match=r"other of .*with_other.*\.tau.* is 0\.5 now"):
        engine.step(X)


def test_tensors_outside_the_module_have_their_present_values() -> None:
    """Two that are equal at first, one that is replaced in its module, and one that only an evaluation reads."""
    first, second, shown = torch.ones(2), torch.ones(2), torch.ones(2)
    teacher = nn.Linear(4, 2).requires_grad_(False)

    def distance(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = module(x)
        aim = teacher(x)
        value: Tensor = (y * first - aim * second).square().mean()
        return value, {"y": y * shown}

    net, plain = net_of(), net_of()
    engine = engine_of(net, distance, optimizer="sgd", evaluate=True)
    for step in range(3):
        expected = plain_step(plain, distance(plain, X)[0], 0.1)
        assert engine.step(X).loss == expected
        first.add_(0.5)
        second.data.mul_(0.5)
        shown.fill_(step)
        teacher.weight.data = torch.full((2, 4), 0.1 * step)
    plain.eval()
    value, outputs = distance(plain, X)
    evaluation = engine.evaluate(X)
    assert evaluation.loss == value.item()
    assert isinstance(evaluation.outputs, dict)
    assert torch.equal(evaluation.outputs["y"], outputs["y"])


def test_a_replaced_tensor_outside_is_refused() -> None:
    outside = SimpleNamespace(aim=torch.zeros(2))

    def distance(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x) - outside.aim
        return y.square().mean()

    engine = engine_of(net_of(), distance)
    engine.step(X)
    outside.aim = torch.ones(2)
    with pytest.raises(UserError, match="aim"):
        engine.step(X)


def test_the_scripts_own_optimizer_and_its_scheduler_drive_the_program() -> None:
    def optimizer_of(net: nn.Sequential) -> torch.optim.AdamW:
        groups: list[dict[str, object]] = [
            {"params": net[:2].parameters(), "lr": 0.1},
            {"params": net[3].parameters()},
        ]
        return torch.optim.AdamW(groups, lr=0.01, fused=True)

    net, plain = net_of(), net_of()
    own, of_plain = optimizer_of(net), optimizer_of(plain)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (own, of_plain)]
    compiled = zeroir.compile(net, X, loss=loss, optimizer=own, world_size=1)
    engine = compiled.engine(self_check=False)
    for _ in range(5):
        of_plain.zero_grad()
        expected = loss(plain, X)
        expected.backward()  # type: ignore[no-untyped-call]
        of_plain.step()
        assert engine.step(X).loss == expected.item()
        for scheduler in schedulers:
            scheduler.step()
    own.param_groups[0]["betas"] = (0.5, 0.9)
    engine.step(X)
    assert engine.optimizer.param_groups[0]["betas"] == (0.5, 0.9)
    with pytest.raises(UserError, match=r"call engine\.step\(batch\)"):
        own.step()
    own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UserError, match="has 3 groups now, and had 2"):
        engine.step(X)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_train_beside_a_teacher_that_follows_and_end_with_the_values(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, module="tests.api.living_workers")
    require_success(ranks.wait())


class Weighted:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        return self.of(module, x)

    def of(self, module: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = self.weight * module(x).square().mean()
        return value


def weighted(weights: dict[str, float], module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = weights["loss"] * module(x).square().mean()
    return value


@pytest.mark.slow
def test_the_state_of_a_loss_that_is_no_plain_function_counts() -> None:
    called, bound, given = Weighted(), Weighted(), {"loss": 1.0}
    default = {"loss": 1.0}

    def with_default(module: nn.Module, x: Tensor, weights: dict[str, float] = default) -> Tensor:
        return weighted(weights, module, x)

    cases: list[tuple[Callable[..., object], Callable[[], object], str]] = [
        (called, lambda: setattr(called, "weight", 0.5), r"Weighted\.weight"),
        (bound.of, lambda: setattr(bound, "weight", 0.5), r"Weighted\.weight"),
        (partial(weighted, given), lambda: given.update(loss=0.5), r"args\[0\]\['loss'\]"),
        (with_default, lambda: default.update(loss=0.5), r"weights of .*\['loss'\]"),
    ]
    for function, change, name in cases:
        engine = engine_of(net_of(), function)
        engine.step(X)
        change()
        with pytest.raises(UserError, match=f"{name}.* is 0.5 now"):
            engine.step(X)


def test_code_without_a_file_counts_as_that_of_a_script() -> None:
    names: dict[str, object] = {"beta": 1.0, "__name__": "__main__"}
    exec("def loss(module, x): return module(x).square().mean() * beta", names)
    function = names["loss"]
    assert callable(function)
    engine = engine_of(net_of(), function)
    engine.step(X)
    names["beta"] = 2.0
    with pytest.raises(UserError, match=r"beta.* is 2\.0 now"):
        engine.step(X)


def test_a_scheduler_that_warms_up_sets_the_first_steps_rate() -> None:
    net, plain = net_of(), net_of()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (net, plain)]
    compiled = zeroir.compile(net, X, loss=loss, optimizer=optimizers[0], world_size=1)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.1 * (step + 1))
        for each in optimizers
    ]
    engine = compiled.engine(self_check=False)
    for _ in range(3):
        optimizers[1].zero_grad()
        expected = loss(plain, X)
        expected.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        assert engine.step(X).loss == expected.item()
        for scheduler in schedulers:
            scheduler.step()


def test_a_tensor_outside_of_another_dtype_is_refused() -> None:
    teacher = nn.Linear(4, 2).requires_grad_(False)

    def distance(module: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = (module(x) - teacher(x)).square().mean()
        return value

    engine = engine_of(net_of(), distance)
    engine.step(X)
    teacher.double()
    with pytest.raises(UserError, match=r"is torch.float64 of shape .*, and was torch.float32"):
        engine.step(X)


class Config:
    """Settings as attributes of a class."""

    gain = 1.0


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor) -> Tensor:
        return x * factor

    return scale


class CallsItsFunctions(nn.Module):
    """Calls functions that its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.first, self.second = scaled_by(1.0), scaled_by(2.0)
        self.config = Config()
        self.bound = functools.partial(weighted_sum, table)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bound(self.line(self.first(x)) * self.config.gain)
        return self.second(y).mean()


table = {"weight": 1.0}


def weighted_sum(weights: dict[str, float], y: Tensor) -> Tensor:
    return y.square() * weights["weight"]


@pytest.mark.parametrize("name", ["first", "second", "config", "bound"])
def test_what_functions_in_attributes_read_counts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = CallsItsFunctions()
    engine = zeroir.compile(net, X, world_size=1).engine(self_check=False, compile_again=False)
    engine.step(X)
    if name == "config":
        monkeypatch.setattr(Config, "gain", 0.5)
    elif name == "bound":
        monkeypatch.setitem(table, "weight", 0.5)
    else:
        (cell,) = vars(net)[name].__closure__
        cell.cell_contents = 3.0
    with pytest.raises(UserError, match=r"is (0\.5|3\.0) now, but was"):
        engine.step(X)
    engine.close(return_values=False)
