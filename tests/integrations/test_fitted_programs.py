"""Programs that fit a data loader's batches: one for all sizes where the model's code allows that, otherwise more."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeroir
from zeroir.api import CompiledProgram
from zeroir.api.compiling import compile_following
from zeroir.config.steps import MicroSteps
from zeroir.errors import ModelWarning, UserError
from zeroir.frontend.source.source import Earlier
from zeroir.integrations.fitted_programs import FittedPrograms
from zeroir.runtime.engine.engine import Engine
from zeroir.torch_ops.batches import Batch

Code = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Embeds ids, and calls a function on them, f32[rows, length, 4]."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.code = code

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.code(self.table(ids)).square().mean()
        return loss


def batch(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).view(rows, length) % 10


class Annealed(Net):
    """Multiplies by a number, with which its code for long batches decides."""

    scale = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        if ids.shape[1] > 64:
            x = x.tanh() if self.scale > 1.2 else x.sigmoid()
        loss: Tensor = self.code(x).square().mean()
        return loss


class Fitted:
    """An engine for a module's batches, and the shapes of the programs that were compiled."""

    def __init__(self, code: Code, first: Tensor, kind: type[Net] = Net) -> None:
        torch.manual_seed(0)
        self.module, self.shapes = kind(code), list[str | None]()
        self.plain = kind(code)
        self.plain.load_state_dict(self.module.state_dict())
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.programs = FittedPrograms(self._compiled, first)
        self.engine: Engine = self.programs.present.compiled.engine(
            self_check=False, compile_again=False
        )
        self.programs.drive(self.engine)

    def _compiled(self, example: Batch, shapes: str | None, earlier: Earlier) -> CompiledProgram:
        compiled = compile_following(
            earlier,
            self.module,
            example,
            shapes=shapes,
            optimizer="sgd",
            lr=0.1,
            micro_steps=MicroSteps(count=2, mean_over="batches"),
            world_size=1,
        )
        self.shapes.append(shapes)
        return compiled

    def step(self, *batches: Tensor) -> None:
        """Train on batches, one by one, and compare with PyTorch."""
        for index, each in enumerate(batches):
            is_last = index == len(batches) - 1
            result = self.engine.micro_step(each, is_last=is_last)
            loss = self.plain(each)
            (loss / len(batches)).backward()
            assert result.loss == loss.item()
        self.engine.update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        own, weight = self.engine.full_parameters()["table.weight"], self.plain.table.weight
        torch.testing.assert_close(own, weight.detach(), rtol=1e-6, atol=1e-7)


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "zeroir"]


def _same(x: Tensor) -> Tensor:
    return x.tanh()


@pytest.mark.slow
def test_longer_batches_of_a_step_are_taken_by_another_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fitted = Fitted(_same, batch(3, 4))
    with caplog.at_level(logging.INFO, "zeroir"):
        fitted.step(batch(3, 4), batch(2, 2))
        assert not notes(caplog)
        fitted.step(batch(1, 3), batch(3, 70))
    assert notes(caplog) == [
        "Batches of other sizes have another program: rows 1 to 3, length 2 to 128."
    ]
    fitted.step(batch(3, 128))
    fitted.engine.evaluate(batch(3, 5))
    assert fitted.shapes == ["0: 1<=rows<=3, 2<=length<=64", "0: 1<=rows<=3, 2<=length<=128"]
    # An evaluation of more rows does not raise the memory of the training.
    fitted.engine.evaluate(batch(8, 5))
    assert fitted.engine.program.dims[1].maximum == 8
    fitted.step(batch(3, 5))
    assert fitted.engine.program.dims[1].maximum == 3
    fitted.engine.evaluate(batch(7, 7))
    assert len(fitted.shapes) == 3
    fitted.step(batch(8, 3))
    assert len(fitted.shapes) == 3
    with pytest.raises(UserError, match="different tensors"):
        fitted.engine.step([batch(3, 4), torch.zeros(3)])
    fitted.engine.close()


def _up_to_six(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, 6)[: x.shape[1], None]


def _not_alone(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x


def _times_length(x: Tensor) -> Tensor:
    return x * int(x.shape[1])


def _plus_length(x: Tensor) -> Tensor:
    return x + int(x.shape[1])


def _by_length(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 5 else x


@pytest.mark.filterwarnings(
    "ignore:.* lets the sizes of the batch decide:zeroir.errors.ModelWarning"
)
def test_a_table_of_positions_bounds_the_length() -> None:
    fitted = Fitted(_up_to_six, batch(3, 5))
    fitted.step(batch(2, 3))
    fitted.step(batch(3, 6))
    assert len(fitted.shapes) == 1
    assert {dim.name: dim.maximum for dim in fitted.engine.program.dims} == {"rows": 3, "length": 6}
    fitted.engine.close()


@pytest.mark.slow
def test_the_engine_has_a_program_of_its_own_for_a_size_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.warns(ModelWarning, match="the dim rows is from 2 to 3"):
        fitted = Fitted(_not_alone, batch(3, 4))
    fitted.step(batch(3, 4), batch(1, 4))
    fitted.step(batch(2, 3))
    assert [dim.minimum for dim in fitted.engine.program.dims] == [2, 2]
    fitted.step(batch(1, 5))
    assert fitted.engine.program.inputs[0].shape[0] == 1
    assert fitted.shapes == ["0: 1<=rows<=3, 2<=length<=64"]
    assert len(notes(caplog)) == 1
    fitted.engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* the sizes of the batch decide")
def test_where_code_decides_by_a_size_each_side_has_a_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fitted = Fitted(_by_length, batch(3, 7))
    fitted.step(batch(2, 6), batch(1, 5))
    fitted.step(batch(1, 64), batch(3, 7))
    fitted.step(batch(3, 3))
    (note,) = notes(caplog)
    assert "only where length > 5: a program for batches such as length 5, rows 1" in note
    # More rows need programs for more, one for each side where it is needed.
    fitted.step(batch(4, 5))
    fitted.step(batch(3, 7))
    fitted.step(batch(4, 7))
    assert fitted.shapes == ["0: 1<=rows<=3, 2<=length<=64", "0: 1<=rows<=4, 2<=length<=64"]
    fitted.engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* the sizes of the batch decide")
def test_a_program_that_was_left_is_compiled_again_after_a_change() -> None:
    fitted = Fitted(_same, batch(3, 4), Annealed)
    for scale, length in ((1.0, 4), (0.9, 4), (0.8, 70), (0.7, 4), (1.3, 4), (1.4, 70)):
        for net in (fitted.module, fitted.plain):
            assert isinstance(net, Annealed)
            net.scale = scale
        if length == 4:
            fitted.step(batch(3, 4))
        else:  # the program of evaluations follows the number only as far as it decides nothing
            found = fitted.engine.evaluate(batch(3, length)).loss
            assert found == fitted.plain(batch(3, length)).item(), scale
    fitted.engine.close()


@pytest.mark.slow
def test_a_change_may_come_with_a_size_that_has_a_program_of_its_own() -> None:
    fitted = Fitted(_times_length, batch(3, 4))
    for code, length in (
        *((_times_length, 4), (_times_length, 5), (_plus_length, 4), (_plus_length, 5)),
        *((_times_length, 5), (_plus_length, 4)),
    ):
        fitted.module.code = fitted.plain.code = code
        fitted.step(batch(3, length))
    fitted.engine.close()


def test_other_mistakes_are_the_users() -> None:
    def compile_program(example: Batch, shapes: str | None, _: Earlier) -> CompiledProgram:
        return zeroir.compile(Net(_same), example, shapes=shapes, units="nothing.*")

    with pytest.raises(UserError, match="nothing"):
        FittedPrograms(compile_program, batch(3, 4))
