"""Whether the host's update is speculative: where that simulates faster, and the host has memory for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from tests.support.programs import mlp
from zeroir.api.compiled import CompiledProgram
from zeroir.api.search.costs import simulate
from zeroir.api.search.speculation import choose
from zeroir.artifact import Artifact
from zeroir.config import CompileOptions, make_options, replaced
from zeroir.cost.machine import Machine, load_machine
from zeroir.ir.program import Program
from zeroir.passes.pipelines import lower_with_proof

LOGICAL: Final = mlp(blocks=4, dim=512, precision="bf16", clip=1.0)


def options(**given: object) -> CompileOptions:
    kept = {"stage": 2, "world_size": 2, "precision": "bf16", "offload": "optimizer,gradients"}
    return make_options({**kept, "clip": 1.0, **given})


def machine(*, issue_s: float = 0.0, host_bytes: float = 1e12) -> Machine:
    """A machine whose host takes that long to issue an op, and has that much memory."""
    known = load_machine("dgx-h100")
    memory = known.host.memory
    size = memory.size_bytes.model_copy(update={"value": host_bytes})
    changed = {
        "issue_s": known.host.issue_s.model_copy(update={"value": issue_s}),
        "memory": memory.model_copy(update={"size_bytes": size}),
    }
    return known.model_copy(update={"host": known.host.model_copy(update=changed)})


def compiled(logical: Program, given: CompileOptions, chosen: CompileOptions) -> CompiledProgram:
    logical = replace(logical, options=given)
    proof = lower_with_proof(logical, chosen)
    artifact = Artifact(
        logical=logical,
        scheduled=proof.program,
        model_path="m",
        model_factory="",
        model_sha256="",
        torch_version="",
        zeroir_version="",
    )
    return CompiledProgram(artifact=artifact, report=proof.report)


def test_the_update_is_speculative_where_a_simulated_step_is_faster() -> None:
    faster = choose(LOGICAL, options(), machine())
    assert faster is not None
    assert faster.speculates
    assert faster.speculating_ns < faster.waiting_ns
    assert faster.in_words().startswith("The host's update begins before")
    # More ops take longer than they save where the host is slow to issue them.
    slower = choose(LOGICAL, options(), machine(issue_s=5e-5))
    assert slower is not None
    assert not slower.speculates
    assert "if the update begins before" in slower.in_words()


def test_the_update_waits_where_the_host_lacks_memory() -> None:
    choice = choose(LOGICAL, options(), machine(host_bytes=1e6))
    assert choice is not None
    assert choice.speculating_ns < choice.waiting_ns
    assert not choice.speculates
    assert "the host of each rank lacks" in choice.in_words()


def test_there_is_nothing_to_choose_without_a_decision_or_where_it_is_said() -> None:
    for given in (
        options(speculate=True),
        options(speculate=False),
        options(clip=None),
        options(offload="gradients"),
        options(offload_to="disk"),
        options(optimizer_bits=8),
    ):
        logical = mlp(precision="bf16", clip=given.clip, has_codes=given.optimizer.bits == 8)
        assert choose(logical, given, machine()) is None


@pytest.mark.slow
def test_a_choice_is_open_again_when_the_program_is_lowered_again() -> None:
    given = options()
    chosen = replaced(given, speculate=True)
    program = compiled(LOGICAL, given, chosen)
    assert program.options.offload.speculate is True
    assert program.requested.offload.speculate is None
    assert compiled(LOGICAL, chosen, chosen).requested.offload.speculate is True
    # A step that undoes its update takes longer, and is simulated, too.
    simulation = simulate(program, machine())
    assert simulation.redone_s is not None
    assert simulation.redone_s > simulation.step_s
    waiting = compiled(LOGICAL, given, options(speculate=False))
    assert simulate(waiting, machine()).redone_s is None
