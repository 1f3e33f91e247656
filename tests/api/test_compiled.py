"""A compiled program comes with the report on the very program that it holds, and is examined no more than once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.programs import mlp
from zeroir.api import lowering
from zeroir.api.compiled import CompiledProgram
from zeroir.artifact import Artifact
from zeroir.config import make_options
from zeroir.config.steps import MicroSteps
from zeroir.errors import UserError
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.passes import manager
from zeroir.verify import Reference, Report, verify


def compiled_for_four(**values: object) -> CompiledProgram:
    options = make_options({"stage": 1, "world_size": 4, **values})
    logical = replace(mlp(blocks=1), options=options)
    artifact = Artifact(
        logical=logical,
        scheduled=logical,
        model_path="model.py",
        model_sha256="0" * 64,
        torch_version="2.13.0",
        zeroir_version="0.1.0",
    )
    return CompiledProgram(artifact=artifact, report=Report())


@pytest.mark.usefixtures("proofs_between_passes")
@pytest.mark.parametrize("budget", [None, "1GB"])
def test_what_the_passes_proved_is_not_proved_again_but_for_a_budget(
    monkeypatch: pytest.MonkeyPatch, budget: str | None
) -> None:
    examined: list[Program] = []

    def counted(
        program: Program,
        reference: Program | Reference | None = None,
        budget_bytes: int | None = None,
    ) -> Report:
        examined.append(program)
        return verify(program, reference, budget_bytes)

    for name in ("verify", "verify_at_largest"):
        monkeypatch.setattr(manager, name, counted)
    monkeypatch.setattr(lowering, "verify_program", counted)
    found = compiled_for_four(memory_budget=budget).specialise(world_size=2)
    assert examined[-1] is found.program
    assert len([one for one in examined if one is found.program]) == (1 if budget is None else 2)
    assert len(examined) == len(found.program.passes) + (1 if budget is None else 2)
    size = None if budget is None else 10**9
    assert found.report == verify(found.program, found.logical, size)
    assert ("Z301" in found.report.laws) == (budget is not None)


def test_a_run_may_take_another_order_and_number_of_micro_steps() -> None:
    one = compiled_for_four()
    layer = one.specialise(micro_steps=MicroSteps(count=4, order="layer"))
    assert (layer.program.interleaved, layer.options.micro_steps.count, layer.accumulates) == (
        4,
        4,
        True,
    )
    assert MICRO_STEP not in layer.program.section_by_name
    assert layer.report.is_valid
    assert layer.specialise(micro_steps=MicroSteps(count=6, order="layer")).program.interleaved == 6
    groups = layer.specialise(micro_steps=MicroSteps(count=4, order="layer=2"))
    assert (groups.program.interleaved, MICRO_STEP in groups.program.section_by_name) == (2, True)
    step = groups.specialise(micro_steps=MicroSteps(count=4, order="step"))
    assert step.program.interleaved == 1
    assert step.specialise(micro_steps=MicroSteps(count=4, order="step")) == step
    with pytest.raises(UserError, match="needs --micro-steps above 1"):
        one.specialise(micro_steps=MicroSteps(count=1, order="layer"))
