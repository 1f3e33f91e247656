"""The workspaces of operators of libraries and models: declared by their authors, measured, and exact in programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.memory.judge import judge
from zeroir.api.compiled import CompiledProgram
from zeroir.artifact import from_bytes, to_bytes
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node
from zeroir.ir.text import parse, print_program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.torch_ops import foreign_workspaces
from zeroir.verify import verify

DOUBLES = "workspaces.in_doubles.default"


@torch.library.custom_op("workspaces::in_doubles", mutates_args=())
def in_doubles(x: Tensor, by: float, *, power: int = 2) -> Tensor:
    """Computes in FP64."""
    result = torch.empty_like(x)
    return result.copy_(x.double().pow_(power).mul_(by))


in_doubles.register_fake(lambda x, *_, **__: torch.empty_like(x))


class _Context(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    by: float


def _save(
    ctx: _Context, inputs: tuple[Tensor, float], keyword_only_inputs: dict[str, int], output: Tensor
) -> None:
    assert keyword_only_inputs == {"power": 2}
    assert output.shape == inputs[0].shape
    ctx.save_for_backward(inputs[0])
    ctx.by = inputs[1]


def _backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * in_doubles(x, ctx.by, power=1) * 2, None


in_doubles.register_autograd(_backward, setup_context=_save)


def workspace_bytes(x: Tensor, by: float, *, power: int) -> int:
    assert by == 0.5
    assert power in (1, 2)
    return 8 * x.numel() + 8  # the number by which it multiplies


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(in_doubles(self.first(x), 0.5)).square().mean()
        return result


BATCH = torch.ones(6, 8)


@pytest.fixture(scope="module", autouse=True)
def declared() -> Iterator[None]:
    zeroir.register_workspace(in_doubles, workspace_bytes)
    yield
    del foreign_workspaces._FORMULAS[DOUBLES]


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    return zeroir.compile(Net(), BATCH, stage=3, world_size=1)


def with_workspace(program: Program, op: str, size_bytes: int) -> Program:
    """The program where the calls of an operator declare another workspace."""

    def changed(node: Node) -> Node:
        return replace(node, workspace_bytes=size_bytes) if node.op == op else node

    return replace(
        program,
        segments=tuple(replace(s, nodes=tuple(map(changed, s.nodes))) for s in program.segments),
    )


def test_a_program_declares_workspaces_and_takes_exactly_them(compiled: CompiledProgram) -> None:
    program = compiled.program
    nodes = [node for s in program.segments for node in s.nodes if node.op == DOUBLES]
    # forward, backward and the evaluation
    assert [node.workspace_bytes for node in nodes] == [8 * 49] * 3
    assert parse(print_program(program)) == program
    assert from_bytes(to_bytes(compiled.artifact)) == compiled.artifact
    judged = judge(program, [BATCH], model=Net())
    assert not judged.wrong
    less = judge(with_workspace(program, DOUBLES, 391), [BATCH], model=Net())
    assert len(less.wrong) == 3


def test_the_verifier_refuses_workspaces_of_other_operators(compiled: CompiledProgram) -> None:
    program = compiled.program

    def findings(size: int, op: str) -> set[str]:
        damaged = with_workspace(program, op, size)
        return {str(finding.code) for finding in verify(damaged).findings}

    assert not findings(1, DOUBLES)
    assert findings(1, "aten.t.default") == {"Z008"}
    assert "Z011" in findings(-1, DOUBLES)


def test_the_self_check_refuses_an_operator_that_takes_more(compiled: CompiledProgram) -> None:
    Engine(compiled.program, EngineSettings(self_check=True)).close()
    less = with_workspace(compiled.program, DOUBLES, 391)
    with pytest.raises(
        zeroir.UserError,
        match=r"operator workspaces\.in_doubles\.default \(.*test_foreign_workspaces\.py:\d+\) holds 392 bytes at once "
        r"beside its arguments and results, although its workspace was declared .* as 391",
    ):
        Engine(less, EngineSettings(self_check=True))


@pytest.mark.parametrize("name", ["workspaces::in_doubles", "workspaces::in_doubles.default"])
def test_what_is_measured_is_what_is_declared(name: str) -> None:
    assert zeroir.measure_workspace(name, torch.randn(100, 30), 0.5, power=1) == 8 * 3001


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        (lambda *_, **__: 1 / 0, "cannot be computed: .* raised ZeroDivisionError"),
        (lambda *_, **__: 2.0, "returned 2.0 instead of a number of bytes"),
        (lambda *_, **__: -1, "returned -1 instead of a number of bytes"),
    ],
)
def test_a_formula_that_fails_is_refused_with_the_line_of_the_model(
    formula: Callable[..., int], problem: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(foreign_workspaces._FORMULAS, DOUBLES, formula)
        with pytest.raises(
            zeroir.UserError, match=rf"{Path(__file__).name}:\d+ uses the operator .* {problem}"
        ):
            zeroir.compile(Net(), BATCH)


def test_a_formula_is_a_function() -> None:
    with pytest.raises(zeroir.UserError, match="is None, but should be a function"):
        zeroir.register_workspace(in_doubles, cast("Callable[..., int]", None))


@pytest.mark.parametrize("name", ["workspaces::gone", "in_doubles", "aten::mm"])
def test_only_registered_operators_of_libraries_and_models_have_workspaces(name: str) -> None:
    problem = "no operator that a library" if name == "aten::mm" else "Nothing has registered"
    with pytest.raises(zeroir.UserError, match=problem):
        zeroir.register_workspace(name, workspace_bytes)
