"""Steps that run the user's code in eager PyTorch, with the bits of the program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function

import zeroir
from tests.api.eager_workers import trained
from tests.runtime.support import Ranks, require_success
from zeroir.errors import UserError
from zeroir.report.opaque_code import has_opaque_code

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.slow
@pytest.mark.dist
def test_eager_steps_of_ranks_have_the_programs_bits(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, module="tests.api.eager_workers")
    require_success(ranks.wait())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16", "ema": 0.9, "offload": "optimizer,parameters"},
        {
            "micro_steps": zeroir.MicroSteps(count=2, order="layer"),
            "shapes": "0: rows<=3, words<=5; 1: rows, words",
            "units": "blocks.*",
        },
    ],
    ids=["fp16", "order"],
)
def test_eager_steps_have_the_bits_of_every_kind_of_program(options: dict[str, object]) -> None:
    losses, state = trained(1, 0, **options)
    expected, expected_state = trained(None, 0, **options)
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())


class Net(nn.Module):
    """A layer whose code may do anything in an eager step; ``seen`` are the means of its results.

    The forward of the number ``fails_at`` from now on fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.seen: list[float] = []
        self.looks = False
        self.fails_at = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x)
        if self.looks:
            self.seen.append(y.mean().item())
        if self.fails_at:
            self.fails_at -= 1
            if not self.fails_at:
                raise ValueError("bad number")
        return y.square().mean()


def test_code_runs_once_in_an_eager_step() -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    engine = zeroir.compile(net, X, optimizer="sgd", lr=0.1).engine(self_check=False)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    net.looks = plain.looks = True  # which no trace can follow
    with engine.eager():
        for _ in range(2):
            own.zero_grad()
            plain(X).backward()
            own.step()
            engine.step(X)
        net.line.bias.requires_grad_(False)
        with pytest.raises(UserError, match=r"requires_grad of line\.bias changed"):
            engine.step(X)
        net.line.bias.requires_grad_(True)
        with pytest.raises(UserError, match="compiled with --no-evaluate"):
            engine.evaluate(X)
    assert net.seen == plain.seen
    net.looks = False
    plain.looks = False
    assert engine.step(X).loss == plain(X).item()
    engine.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_whose_code_fails_changes_nothing(count: int) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    compiled = zeroir.compile(net, X, optimizer="adamw", lr=0.1, micro_steps=count)
    engine = compiled.engine(self_check=False)
    expected = zeroir.compile(plain, X, optimizer="adamw", lr=0.1, micro_steps=count)
    other = expected.engine(self_check=False)
    batches = [X + number for number in range(count)]
    assert engine.step(batches).loss == other.step(batches).loss
    with engine.eager():
        net.fails_at = count
        with pytest.raises(
            UserError, match=r"test_eager_steps.py:\d+ failed: ValueError: bad number"
        ) as caught:
            engine.step(batches)
        assert isinstance(caught.value.__cause__, ValueError)
        net.fails_at = 1
        with pytest.raises(UserError, match="bad number"):
            engine.micro_step(X, is_last=count == 1)
        assert engine.step(batches).loss == other.step(batches).loss
    assert engine.step(batches).loss == other.step(batches).loss
    for each in (engine, other):
        each.close()
    assert torch.equal(net.line.weight, plain.line.weight)


def test_an_engine_without_a_module_has_no_eager_steps() -> None:
    engine = zeroir.compile(Net, X).engine(self_check=False)
    with pytest.raises(UserError, match="made from a file or a function"), engine.eager():
        engine.step(X)
    engine.close()


class Ranged(nn.Module):
    """A layer within a range of a profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with record_function("of the layer"):
            y: Tensor = self.line(x)
        return y


def test_ranges_of_a_profiler_count_in_eager_steps_alone() -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        with record_function("of the loss"):
            y: Tensor = module(x).square().mean()
        return y

    compiled = zeroir.compile(nn.Sequential(Ranged()), X, loss=loss)
    assert not has_opaque_code(compiled.program)
    engine = compiled.engine(self_check=False)
    engine.step(X)
    with engine.eager(), profile() as profiled:
        engine.step(X)
    assert {"of the layer", "of the loss"} <= {event.key for event in profiled.key_averages()}
    engine.close()
