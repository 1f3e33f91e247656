"""Numbers that a script changes at every step count, and the program is compiled again as seldom as possible."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from tests.api.living_net import plain_step
from zeroir.errors import UserError

EXP = math.exp
"""A function of Python's in C that no patch of ``math`` replaces."""

X = torch.linspace(-1, 1, 24).view(6, 4)

beta = 0.5


@dataclass
class Schedule:
    """Numbers that a script sets."""

    temperature: float = 1.0
    step: int = 0
    weights: list[float] = field(default_factory=lambda: [1.0, 0.5])


class Net(nn.Module):
    """Two layers and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh() * self.scale)
        return y


schedule = Schedule()
Loss = Callable[[nn.Module, Tensor], Tensor]


def everything(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x) / schedule.temperature
    first, second = schedule.weights
    rate = 0.5 * (1 + math.cos(math.pi * schedule.step / 10))
    terms: Tensor = first * y.square().mean() + (1 - second) * y.clamp(-beta, beta).abs().mean()
    return terms + rate * nn.functional.softmax(y / schedule.temperature, -1).square().mean()


def warmed_up(module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = module(x).square().mean() * min(1.0, schedule.step / 3)
    return value


def branching(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    term: Tensor = y.square() if schedule.step < 3 else y.abs()
    return term.mean() * schedule.temperature


def of_beta(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return (y.square() if beta > 0.2 else y.abs()).mean() * beta


def unseen(module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = module(x).square().mean() * EXP(-schedule.temperature)
    return value


def as_text(module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = module(x).square().mean() * ast.literal_eval(f"{schedule.temperature}")
    return value


def of_numpy(module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = module(x).square().mean() * float(np.clip(schedule.temperature, 0.15, 2.0))
    return value


def sized(module: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = module(x)[:, : 1 + schedule.step % 2].square().mean()
    return value


def of_type(module: nn.Module, x: Tensor) -> Tensor:
    factor = 1.0 if type(schedule.temperature) is float else 2.0
    value: Tensor = module(x).square().mean() * factor * schedule.temperature
    return value


@pytest.fixture(autouse=True)
def _restored() -> None:
    globals()["beta"] = 0.5
    vars(schedule).update(vars(Schedule()))


def set_numbers(net: Net, step: int) -> None:
    globals()["beta"] = 0.5 / (1 + step)
    net.scale = 1.0 + step / 4
    schedule.temperature = 1.0 / (1 + step)
    schedule.step = step
    schedule.weights[:] = [1.0 - step / 100, 0.25 + step / 100]


def steps_with(
    loss: Loss, caplog: pytest.LogCaptureFixture, count: int = 8, **options: object
) -> Sequence[str]:
    """Train beside eager PyTorch, and return what was said of programs that were compiled again."""
    torch.manual_seed(0)
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    set_numbers(net, 0)
    compiled = zeroir.compile(net, X, loss=loss, world_size=1, optimizer="sgd", lr=0.1, **options)  # type: ignore[arg-type]
    engine = compiled.engine(self_check=False)
    for step in range(count):
        for module in (net, plain):
            set_numbers(module, step)
        rows = X[: 2 + step % 4] if "shapes" in options else X
        expected = plain_step(plain, loss(plain, rows), 0.1)
        assert engine.step(rows).loss == pytest.approx(expected, rel=1e-6)
        assert engine.evaluate(rows).loss == pytest.approx(loss(plain, rows).item(), rel=1e-6)
    engine.close()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)
    return [record.message for record in caplog.records if "compiled again" in record.message]


@pytest.mark.slow
def test_numbers_of_every_place_are_followed_after_their_first_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (said,) = steps_with(everything, caplog)
    assert "is 1.25 now, but was 1.0" in said
    assert said.endswith(", and follows it from now on.")


@pytest.mark.slow
def test_numbers_are_followed_in_a_program_for_any_shape(caplog: pytest.LogCaptureFixture) -> None:
    shapes = (Dim("rows", min=2, max=6), 4)
    weights = zeroir.MicroSteps(mean_over="batches")
    assert len(steps_with(everything, caplog, shapes=shapes, micro_steps=weights)) == 1


@pytest.mark.slow
def test_an_answer_that_changes_makes_another_program(caplog: pytest.LogCaptureFixture) -> None:
    said = steps_with(branching, caplog)
    assert len(said) == 2
    assert "schedule.step < 3" in said[1]
    assert "is False now, but was True" in said[1]


@pytest.mark.slow
def test_a_number_that_warms_up_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    # The first change of the step makes one program, the end of the warm-up another.
    assert len(steps_with(warmed_up, caplog)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("loss", [of_type, as_text, of_numpy])
def test_a_number_that_is_read_unseen_is_a_state_of_the_program(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    said = [each for each in steps_with(loss, caplog, count=4) if "temperature, which" in each]
    assert len(said) == 2
    assert not any("follows" in each for each in said)


@pytest.mark.slow
def test_a_state_that_never_returns_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"now, but was .* compile again, pass it with"):
        steps_with(unseen, caplog, count=9)
    said = [record.message for record in caplog.records if "temperature, which" in record.message]
    assert len(said) == 6
    assert not any("follows" in each for each in said)


@pytest.mark.slow
def test_a_number_that_decides_a_size_is_a_state_of_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(steps_with(sized, caplog)) < 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The module Net is in evaluation mode")
def test_an_answer_that_changes_between_evaluations_counts() -> None:
    net = Net()
    engine = zeroir.compile(net, X, loss=of_beta, world_size=1, lr=0.0).engine(self_check=False)
    set_numbers(net, 1)
    engine.step(X)
    net.eval()
    for value in (0.3, 0.3, 0.1, 0.3):
        globals()["beta"] = value
        with engine.gathered() as module:
            expected = of_beta(module.eval(), X).item()
        assert engine.evaluate(X).loss == pytest.approx(expected, rel=1e-6)
    engine.close(return_values=False)


def test_what_cannot_be_computed_from_a_number_is_an_error() -> None:
    net = Net()
    engine = zeroir.compile(
        net, X, loss=lambda module, x: module(x).square().mean() / schedule.temperature
    ).engine(self_check=False)
    schedule.temperature = 0.5
    engine.step(X)
    schedule.temperature = 0.0
    assert engine.step(X).loss == math.inf
    engine.close(return_values=False)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["{:.1f}", "{}"])
def test_the_text_of_a_number_is_read(form: str) -> None:
    """A text is a key of a dict: values that differ too little to change it are no evidence that none does."""
    factors = {"0.1": 3.0}
    net = Net()
    engine = zeroir.compile(
        net,
        X,
        loss=lambda module, x: module(x).square().mean() * factors.get(form.format(beta), 1.0),
        lr=0.0,
        optimizer="sgd",
        world_size=1,
    ).engine(self_check=False)
    losses = []
    for value in (0.0, 0.5, 0.1, 0.6):
        globals()["beta"] = value
        losses.append(engine.step(X).loss)
    engine.close(return_values=False)
    assert [loss / losses[0] for loss in losses] == pytest.approx([1, 1, 3, 1], rel=1e-6)
