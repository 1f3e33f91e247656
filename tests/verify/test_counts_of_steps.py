"""Parameters that were not trained in all steps have a count of their own, and no other may stand in for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support.edits import mapped
from zeroir.api.capture import given_source
from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_again
from zeroir.config import make_options
from zeroir.frontend.source.source import Earlier
from zeroir.ir import ops
from zeroir.ir.buffers import whole
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.ir.text.parser import parse
from zeroir.ir.text.printer import print_program
from zeroir.verify import verify

pytestmark = pytest.mark.slow


def loss(net: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = net(x).square().mean()
    return value


def compiled(**options: object) -> CompiledProgram:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    source = given_source(net, torch.zeros(4, 16), loss, None)
    earlier = Earlier(step_counts={"0.weight": 1, "1.bias": 2})
    return compile_again(source, make_options({"world_size": 2, **options}), None, earlier)


def codes(program: Program, reference: Program) -> set[str]:
    return {finding.code for finding in verify(program, reference=reference).findings}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "fp16", "micro_steps": 2},
        {"offload": "optimizer", "clip": 1.0, "speculate": True},
        {"optimizer_bits": 8, "stage": 1, "clip": 1.0},
        {"optimizer": "adafactor", "ema": 0.9},
    ],
    ids=str,
)
def test_every_pass_keeps_the_counts_apart(options: dict[str, object]) -> None:
    found = compiled(**options)
    program = found.program
    assert found.report.is_valid
    assert program.counts_of_steps == ("step", "step.1", "step.2")
    assert set(program.counts_of_steps) <= set(program.counters)
    of_flat = {name: flat.name for name, (flat, _) in program.parameter_by_name.items()}
    assert of_flat["0.weight"].endswith(".steps1")
    assert of_flat["1.bias"].endswith(".steps2")
    assert not of_flat["0.bias"].endswith(".steps1")
    assert parse(print_program(program)) == program


def test_another_count_is_refused() -> None:
    found = compiled()
    program = found.program
    assert not codes(program, found.logical)

    def exchanged(op: Op) -> tuple[Op, ...]:
        if isinstance(op, ops.OptimizerStep) and op.step.buffer == "step.1":
            return (replace(op, step=whole(program.buffer_by_name["step"])),)
        return (op,)

    def lost(op: Op) -> tuple[Op, ...]:
        return (replace(op, counts=op.counts[1:]),) if isinstance(op, ops.Decide) else (op,)

    def twice(op: Op) -> tuple[Op, ...]:
        if isinstance(op, ops.Decide):
            return (replace(op, counts=(*op.counts, op.counts[0])),)
        return (op,)

    for change in (exchanged, lost, twice):
        assert codes(mapped(program, change), found.logical), change
