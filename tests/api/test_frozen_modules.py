"""Modules beside the model that a program shards and freezes, such as teachers, and how their values change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.frozen_workers import Blocks, of_mean_teacher
from tests.runtime.support import Ranks, require_success
from zeroir.errors import UserError
from zeroir.ir.contents import PARAM
from zeroir.runtime.state.full_parameters import flat_buffers

X = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("recipe", "world_size"), [("mean-teacher", 2), ("byol", 3)])
def test_frozen_modules_train_as_in_plain_pytorch(
    recipe: str, world_size: int, tmp_path: Path
) -> None:
    ranks = Ranks(
        world_size,
        tmp_path,
        recipe,
        module="tests.api.frozen_workers",
    )
    require_success(ranks.wait())


class Scaled(nn.Module):
    """A layer whose result is divided by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.tau = nn.Linear(6, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x) / self.tau
        return y


def compiled(student: nn.Module, teacher: nn.Module, **options: object) -> zeroir.CompiledProgram:
    return zeroir.compile(
        student,
        X,
        loss=lambda student, x: of_mean_teacher(student, teacher, x),
        frozen={"teacher": teacher},
        evaluate=False,
        **options,  # type: ignore[arg-type]
    )


def test_each_rank_has_its_part_of_a_frozen_module() -> None:
    program = compiled(Scaled(), Blocks(), stage=3, world_size=3).program
    frozen = [flat for flat in program.flats if not flat.is_trainable]
    for flat in frozen:
        ((buffer, _),) = flat_buffers(program, flat.name, (PARAM,))
        assert 3 * buffer.numel == flat.padded_numel
    names = {slot.name for flat in frozen for slot in flat.slots}
    assert names == {f"teacher.{name}" for name, _ in Blocks().named_parameters()}
    assert "teacher.blocks.0" in {flat.unit for flat in frozen}


@pytest.mark.slow
def test_a_frozen_module_changes_as_the_script_says() -> None:
    student, teacher = Scaled(), Scaled()
    engine = compiled(student, teacher).engine(self_check=False)
    plain = Scaled()
    with pytest.raises(
        UserError, match="has no frozen module 'taecher'; names like it are teacher"
    ):
        engine.update_frozen("taecher")
    with pytest.raises(UserError, match="is trained, and update_frozen changes frozen"):
        engine.update_frozen("line")
    with pytest.raises(UserError, match=r"'teacher.line.weight' has no counterpart in .* 'line'"):
        engine.update_frozen("teacher", source="line")
    with pytest.raises(UserError, match=r"lack 'line\.weight'"):
        engine.update_frozen("teacher", {"line.bias": plain.line.bias})
    codes = {"line.weight": torch.zeros(8, 6, dtype=torch.int8), "line.bias": plain.line.bias}
    with pytest.raises(UserError, match=r"'line.weight' with elements of torch.int8, but .* f32"):
        engine.update_frozen("teacher", codes)
    with pytest.raises(UserError, match=r"leave out either the values"):
        engine.update_frozen("teacher", plain, ema=0.5)
    with pytest.raises(UserError, match=r"ema is 1\.5"):
        engine.update_frozen("teacher", ema=1.5)
    engine.update_frozen("teacher", plain)
    teacher.tau = plain.tau = 2.0
    with engine.watch("teacher.line") as outputs:
        found = engine.step(X).loss
        expected = plain.line(X + 0.1)
        assert torch.equal(outputs["teacher.line"], expected)  # type: ignore[arg-type]
    with engine.gathered("teacher.line") as lent:
        assert torch.equal(lent.get_parameter("weight"), plain.line.weight)
    engine.close()
    assert torch.equal(teacher.line.weight, plain.line.weight)
    assert found > 0


class Pair(nn.Module):
    """A network and its target, as parts of one module; running statistics of the target are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)) for _ in range(2)
        )
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.online(x) - self.target(x + 0.1)).square().mean()
        return loss


def test_a_frozen_part_of_the_model_follows_another_part() -> None:
    plain, pair = Pair(), Pair()
    engine = zeroir.compile(pair, X, lr=0.1, evaluate=False).engine(self_check=False)
    engine.step(X)
    before = engine.state_dict()
    engine.update_frozen("target", source="online", ema=0.25)
    after = engine.state_dict()
    for name, value in before.items():
        expected = value
        if name in ("target.0.weight", "target.0.bias", "target.1.weight", "target.1.bias"):
            expected = value.lerp(before[name.replace("target", "online")], 0.75)
        assert torch.equal(after[name], expected), name
    engine.update_frozen("target", source="online", buffers=True)
    copied = engine.state_dict()
    for name in plain.online.state_dict():
        assert torch.equal(copied[f"target.{name}"], copied[f"online.{name}"]), name
    engine.load_state_dict(before)
    assert torch.equal(
        engine.state_dict()["target.1.running_mean"], before["target.1.running_mean"]
    )
    engine.close()


def test_averages_in_16_bits_are_those_of_the_program() -> None:
    engine = compiled(Scaled(), Scaled(), precision="bf16", ema=0.5).engine(self_check=False)
    engine.step(X)
    with pytest.raises(UserError, match=r"'teacher.line.weight' is not in FP32"):
        engine.update_frozen("teacher", ema=0.5)
    engine.update_frozen("teacher", averages=True)
    averages = engine.full_parameters(ema=True)
    rounded = averages["line.weight"].to(torch.bfloat16)
    assert torch.equal(averages["teacher.line.weight"], rounded)
    engine.close()


def test_a_program_from_a_file_takes_frozen_modules_beside_the_model(tmp_path: Path) -> None:
    student, teacher = Scaled(), Scaled()
    expected = of_mean_teacher(student, teacher, X).item()
    compiled(student, teacher).save(tmp_path / "a.zir")
    program = zeroir.load(tmp_path / "a.zir")
    engine = program.engine(model=student, frozen={"teacher": teacher}, self_check=False)
    assert engine.step(X).loss == pytest.approx(expected)
    engine.close()
    with pytest.raises(UserError, match="pass that as model=, too"):
        program.engine(frozen=teacher)
    with pytest.raises(UserError, match="frozen= is 'teacher', but should be a module"):
        zeroir.compile(student, X, frozen="teacher", evaluate=False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no effect on a model file"):
        zeroir.compile("model.py", frozen=teacher, evaluate=False)
