"""An engine compiles another program where batches have sizes for which the model's code decides otherwise."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from zeroir.api import CompiledProgram
from zeroir.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.* the sizes of the batch decide")

ROWS = Dim("rows", max=8)
Code = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, whose calls a function makes."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.code = code
        self.scale, self.kind = 1.0, "plain"

    def forward(self, x: Tensor) -> Tensor:
        y = self.code(self, x * self.scale)
        return (y if self.kind == "plain" else y.sigmoid()).square().mean()


def _other_order(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.a(net.b(x).tanh()) if x.shape[0] > 5 else net.b(net.a(x))
    return y


def _each_size(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.b(net.a(x * sum(x.shape[0] > n for n in range(2, 40, 2))))
    return y


def _one_alone(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.a(x) if x.shape[0] > 5 else net.b(net.a(x))
    return y


class Trained:
    """An engine beside eager PyTorch."""

    def __init__(self, code: Code, rows: int = 3, **options: object) -> None:
        torch.manual_seed(0)
        self.net = net = Net(code)
        self.plain = copy.deepcopy(net)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        given: dict[str, object] = {
            "shapes": (ROWS, 4),
            "optimizer": "sgd",
            "lr": 0.1,
            "evaluate": False,
            **options,
        }
        self.compiled: CompiledProgram = zeroir.compile(
            net,
            torch.zeros(rows, 4),
            micro_steps=zeroir.MicroSteps(mean_over="batches"),
            **given,  # type: ignore[arg-type]
        )
        self.engine = self.compiled.engine(self_check=False)

    def step(self, *rows: int, one_by_one: bool = False) -> None:
        """Train on batches of these numbers of rows, and compare losses and parameters bit by bit."""
        batches = [torch.randn(n, 4) for n in rows]
        self.optimizer.zero_grad()
        losses = [self.plain(each) for each in batches]
        for loss in losses:
            loss.backward()
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(rows)
        self.optimizer.step()
        if one_by_one:
            results = [self.engine.micro_step(each) for each in batches]
            self.engine.update()
            assert [each.loss for each in results] == [loss.item() for loss in losses]
        else:
            result = self.engine.step(batches if len(rows) > 1 else batches[0])
            assert result.loss == float(torch.stack(losses).sum().detach() / len(rows))
        own = self.engine.full_parameters()
        for name, parameter in self.plain.named_parameters():
            assert torch.equal(own[name], parameter), name

    @property
    def ends(self) -> tuple[int, int]:
        """The range of the rows of the program that runs."""
        (dim,) = self.engine.program.dims
        return dim.minimum, dim.maximum


def compilations(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many programs were compiled for other sizes."""
    return sum("a program for batches such as" in each.getMessage() for each in caplog.records)


def test_a_program_for_the_other_side_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained(_other_order, stage=3, units="a,b", evaluate=True)
    for rows, ends in ((3, (1, 5)), (6, (6, 8)), (8, (6, 8)), (5, (1, 5)), (7, (6, 8))):
        trained.step(rows)
        assert trained.ends == ends
    assert compilations(caplog) == 1
    text = caplog.records[-1].getMessage()
    assert "test_signatures.py:" in text
    assert "only where rows <= 5: a program for batches such as rows 6 was compiled in" in text
    evaluation = trained.engine.evaluate(x := torch.randn(2, 4))
    assert evaluation.loss == trained.plain(x).item()
    assert trained.ends == (1, 5)
    with pytest.raises(UserError, match="rows from 1 to 8"):
        trained.engine.step(torch.randn(9, 4))
    trained.step(8)
    trained.engine.close()
    assert compilations(caplog) == 1


@pytest.mark.parametrize(
    "first", [(7, 3, 3), *(pytest.param(first, marks=pytest.mark.slow) for first in ((3,), ()))]
)
def test_micro_steps_may_be_of_both_sides(
    caplog: pytest.LogCaptureFixture, first: tuple[int, ...]
) -> None:
    trained = Trained(_other_order)
    if first:
        trained.step(*first)
    trained.step(3, 4, 5, one_by_one=True)
    trained.step(7, 2, 8)
    trained.step(7, 3, 8, 2, one_by_one=True)
    trained.step(6, 8)
    trained.step(5)
    assert compilations(caplog) == 1
    trained.engine.close()


@pytest.mark.slow
def test_a_group_that_runs_unit_by_unit_is_of_one_side() -> None:
    net = Net(_other_order)
    engine, in_turn = (
        zeroir.compile(
            copy.deepcopy(net),
            torch.zeros(3, 4),
            micro_steps=zeroir.MicroSteps(count=4, order=order, mean_over="batches"),
            shapes=(ROWS, 4),
        ).engine(self_check=False)
        for order in ("layer=2", "step")
    )
    for rows in ((3, 1, 2, 5), (8, 6, 7, 7), (3, 2, 6, 8)):
        batches = [torch.randn(n, 4) for n in rows]
        for each in (engine, in_turn):
            for batch in batches:
                each.micro_step(batch)
        assert engine.update().loss == in_turn.update().loss
        assert engine.step(batches).loss == in_turn.step(batches).loss
    engine.micro_step(torch.randn(7, 4))
    with pytest.raises(
        UserError, match=r"test_signatures\.py:\d+ .*group .* needs several programs"
    ):
        engine.micro_step(torch.randn(2, 4))
    engine.close()
    in_turn.close()


def test_a_parameter_without_a_gradient_on_one_side_is_refused_with_the_line() -> None:
    trained = Trained(_one_alone)
    with pytest.raises(UserError, match=r"test_signatures\.py:\d+ .*parameter b\.bias has a grad"):
        trained.step(7)
    trained.engine.step(torch.randn(5, 4))
    trained.engine.close()


@pytest.mark.slow
def test_only_so_many_programs_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained(_each_size, shapes=(Dim("rows", max=40), 4))
    for rows in range(3, 20, 2):
        trained.step(rows)
    assert compilations(caplog) == 8
    with pytest.raises(UserError, match="8 more programs were compiled"):
        trained.engine.step(torch.randn(21, 4))
    trained.step(5)
    trained.engine.close()


@pytest.mark.slow
def test_a_change_and_other_sizes_may_come_together(caplog: pytest.LogCaptureFixture) -> None:
    def code(net: Net, x: Tensor) -> Tensor:
        y: Tensor = net.b(net.a(x))
        return y.tanh() if x.shape[0] > 5 else y

    trained = Trained(code)
    caplog.set_level(logging.WARNING, "zeroir")
    for kind, rows in (
        *(("plain", 3), ("other", 7), ("plain", 6), ("other", 6), ("other", 2), ("plain", 2)),
        ("plain", 7),
    ):
        trained.net.kind = trained.plain.kind = kind
        trained.step(rows)
    assert compilations(caplog) == 2
    assert sum("compiled again" in each.getMessage() for each in caplog.records) == 1
    trained.engine.close()


def test_an_engine_made_from_a_file_refuses_other_sizes(tmp_path: Path) -> None:
    trained = Trained(_other_order)
    trained.compiled.save(tmp_path / "net.zir")
    trained.engine.close()
    engine = zeroir.load(tmp_path / "net.zir").engine(model=Net(_other_order))
    with pytest.raises(UserError, match="rows from 1 to 5"):
        engine.step(torch.randn(7, 4))
    engine.close()


@pytest.mark.slow
def test_a_number_that_one_side_alone_compares_is_followed_on_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A program of the other side is right for those values of a number for which its code decides alike."""

    def code(net: Net, x: Tensor) -> Tensor:
        y: Tensor = net.b(net.a(x))
        if x.shape[0] > 5:
            return y.tanh() if net.scale > 1 else y.sigmoid()
        return y

    trained = Trained(code)
    for value, rows in (
        *((1.0, 3), (0.5, 2), (0.6, 7), (0.7, 8), (1.5, 4), (1.6, 8), (1.7, 7), (0.8, 6)),
        *((1.8, 3), (1.9, 6), (0.4, 5), (0.3, 7)),
    ):
        trained.net.scale = trained.plain.scale = value
        trained.step(rows)
    assert sum("compiled again" in each.getMessage() for each in caplog.records) == 1
    assert compilations(caplog) == 2
    trained.engine.close()
