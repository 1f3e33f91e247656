"""The valid programs that exhibits damage, each with its logical program."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.schedules import Case
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program
from zeroir.passes.base import Pass
from zeroir.passes.manager import apply
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer

Subject = Callable[[], tuple[Program, Program]]
"""A function that makes a schedule and the logical program that it is proved equal to."""


def made(case: Case, *passes: Pass) -> Subject:
    """Return the schedule of a case after further passes."""

    def make() -> tuple[Program, Program]:
        program = case.scheduled
        for step in passes:
            program = apply(step, program)
        return program, case.logical

    return make


def lowered(logical: Program, *passes: Pass) -> Subject:
    """Return what passes make of a logical program."""
    return lambda: (applied(logical, passes), logical)


def changed(subject: Subject, change: Callable[[str], str]) -> Subject:
    """Return a subject whose text is changed and still valid."""

    def make() -> tuple[Program, Program]:
        scheduled, logical = subject()
        return parse(change(print_program(scheduled))), logical

    return make


def _on_one_stream(text: str) -> str:
    """Reduce on the compute stream, so that no other law is broken where a reduction moves."""
    return text.replace("stream=reduce", "stream=compute").replace("on=reduce", "on=compute")


def _with_one_bucket(text: str) -> str:
    """Let two units reduce from the same buffer, one after the other."""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("buffer %blocks.0.grad_full ")]
    return "".join(kept).replace("%blocks.0.grad_full", "%root.post.grad_full")


_LOGICAL = mlp(blocks=2, dim=4, features=4, batch=2, precision="bf16", clip=1.0)

ZERO0 = made(Case(stage=0, precision="bf16", micro_steps=2))
ZERO0_CLIPPED = made(Case(stage=0, clip=1.0))
ZERO0_ONE_STREAM = changed(ZERO0, _on_one_stream)
ZERO1 = made(Case(stage=1, precision="fp16", clip=1.0, micro_steps=2, ema=0.9))
ZERO1_ONE_STREAM = changed(made(Case(stage=1, precision="bf16", micro_steps=2)), _on_one_stream)
ZERO1_TIED = changed(made(Case(stage=1, precision="bf16", tied=True)), _on_one_stream)
ZERO1_MUON = lowered(mlp(blocks=0, optimizer="muon", micro_steps=2), *for_stage(1, 3))
ZERO2 = made(Case(stage=2, precision="bf16", micro_steps=2))
ZERO2_TIED = made(Case(stage=2, precision="bf16", tied=True))
ZERO2_WEIGHTED = made(Case(stage=2, precision="bf16", micro_steps=2, is_weighted=True))
ZERO3 = made(Case(stage=3, precision="bf16", clip=1.0))
ZERO3_ONE_BUCKET = changed(ZERO3, _with_one_bucket)
ZERO3_RECOMPUTED = lowered(_LOGICAL, *for_stage(3, 3, recompute=("*",)))
HYBRID = lowered(_LOGICAL, *for_stage(3, 4, replicas=2))
HYBRID_FP32 = lowered(mlp(blocks=2), *for_stage(3, 4, replicas=2))
OFFLOADED = made(Case(stage=3, precision="bf16", offload=(OffloadOptimizer(), OffloadGradients())))
PARAMETERS_ON_HOST = made(Case(stage=3, precision="bf16", has_parameters_on_host=True))
ACTIVATIONS_ON_HOST = made(
    Case(stage=2, precision="bf16", blocks=3, offload=(OffloadActivations(smallest=0),))
)
SAVING = made(Case(stage=3, precision="bf16"), SaveState())
PLANNED = made(Case(stage=3, precision="bf16"), PlanMemory())
