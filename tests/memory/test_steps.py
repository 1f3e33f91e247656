"""Every byte that a training step allocates belongs to an op that declares it, by torch's own allocator events.

What rests, parameters, states and the block of temporary buffers, is allocated before the first step, and
``tests/runtime/test_memory.py`` compares it with the program. So a step itself may take what its ops declare, and no
more; where oneDNN computes, what is declared is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.memory.judge import Judged, judge, stepping
from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.examples import IS_THOROUGH
from tests.support.lowering import proved_for
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.cost.machine import MeasuredSegment, load_machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.frontend import load_model_file, trace
from zeroir.frontend.source.source import ModelSource
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint
from zeroir.runtime.execution import numerics
from zeroir.runtime.memory.measured_workspaces import on_host
from zeroir.workspace.op_scratch import weighing_bytes
from zeroir.workspace.segments import declared

ROOT = Path(__file__).parents[2]
MODELS = ("gpt", "gpt2", "bert", "convnet", "llama", "t5", "translator", "vit", "traps")
PRECISIONS = ("fp32", "bf16", "fp16")
RANKS = 3

STAGES = (0, 1, 2, 3, None)
# Every model in every precision, in turn at each stage and as it is traced; some unless all examples are asked for.
EVERYTHING: tuple[tuple[str, str, int | None], ...] = tuple(
    (name, precision, STAGES[(number * len(PRECISIONS) + turn) % len(STAGES)])
    for number, name in enumerate(MODELS)
    for turn, precision in enumerate(PRECISIONS)
)
SOME = EVERYTHING[::4]


OPTIONS: tuple[dict[str, object], ...] = (
    {"micro_steps": 2, "precision": "bf16", "stage": 2, "optimizer": "momentum"},
    {"mesh": "replicate=2,shard=2", "world_size": 4, "recompute": "*", "bucket": 100_000},
    {"micro_steps": 3, "precision": "bf16", "accumulate_locally": True},
    {"micro_steps": 2, "order": "layer", "precision": "bf16"},
    {"offload": "optimizer,gradients,parameters,activations", "precision": "fp16", "clip": 1.0},
)
MORE_OPTIONS: tuple[dict[str, object], ...] = (
    {"stage": 1, "page_optimizer": "512KiB", "page_bytes": 65_536},
    {"world_size": 1},
    {"unshard": "*", "overlap_update": False},
    {"micro_steps": 2, "precision": "fp16", "clip": 1.0},
    {"micro_steps": 4, "order": "layer=2", "precision": "fp16", "stage": 2},
    {"recompute": "*"},
    {"unshard": "*", "select_saved": False},
    {"bucket": 100_000, "stage": 2, "precision": "fp16"},
    {"mesh": "replicate=2,shard=2", "world_size": 4},
    {"optimizer": "momentum", "overlap_update": False, "stage": 1},
    {"keep_fp32": "*ln*", "precision": "bf16"},
    {"optimizer_bits": 8, "offload": "optimizer", "precision": "bf16"},
    {"optimizer_bits": 8, "page_optimizer": "256KB", "page_bytes": 16384, "clip": 1.0},
    {"offload": "optimizer,gradients", "micro_steps": 2, "precision": "bf16", "optimizer": "lion"},
)
TRACED = ("precision", "micro_steps", "optimizer", "keep_fp32", "clip")
"""Options that change the logical program."""


@cache
def model_file(name: str) -> ModelSource:
    path = ROOT / "examples" / "gpt.py"
    return load_model_file(
        str(path if name == "gpt" else ROOT / "tests" / "support" / "models" / f"{name}.py")
    )


@cache
def logical(name: str, choices: tuple[tuple[str, object], ...]) -> Program:
    return trace(model_file(name), make_options({"world_size": RANKS, **dict(choices)})).program


def require_right(judged: Judged, program: Program) -> None:
    """Every op takes what it declares, and outside of ops only seeds, numbers and batches' weights are allocated."""
    assert not judged.wrong
    seeds = sum(b.size_bytes for b in program.buffers if b.role is Role.RNG)
    most = max(seeds, 8, weighing_bytes(program))
    assert all(event.size_bytes <= most for event in judged.others)
    assert any(v.peak_bytes for v in judged.verdicts if isinstance(v.op, ops.Compute))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "ema"), [("adamw", None), ("lion", 0.9)])
@pytest.mark.parametrize(
    ("precision", "stage", "ranks"),
    [("fp32", 0, 2), ("fp16", 3, 3), ("bf16", 2, 3), ("bf16", 1, 2), ("fp16", 1, 1)],
)
def test_a_small_step_takes_what_its_ops_declare(
    precision: str, stage: int, ranks: int, optimizer: str, ema: float | None
) -> None:
    program = mlp(precision=precision, dim=64, optimizer=optimizer, ema=ema)
    scheduled = declared(lowered(program, stage, ranks))
    judged = judge(scheduled, random_batches(1, 1)[0][0], initial=initial_flats(program))
    require_right(judged, scheduled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stage", "ranks", "optimizer"),
    [("fp32", 0, 1, "adamw"), ("fp16", 3, 2, "lion"), ("bf16", 1, 3, "momentum")],
)
def test_a_step_with_states_of_8_bits_takes_what_its_ops_declare(
    precision: str, stage: int, ranks: int, optimizer: str
) -> None:
    program = mlp(precision=precision, dim=64, optimizer=optimizer, has_codes=True)
    scheduled = declared(lowered(program, stage, ranks))
    judged = judge(scheduled, random_batches(1, 1)[0][0], initial=initial_flats(program))
    require_right(judged, scheduled)


def test_memory_that_nobody_declares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = mlp(precision="fp16", dim=64)
    scheduled = declared(lowered(program, 2, 2))
    has_overflow = numerics.has_overflow

    def wasteful(sources: Sequence[Tensor], destination: Tensor, *, is_added: bool) -> None:
        torch.empty(10_000)
        has_overflow(sources, destination, is_added=is_added)

    monkeypatch.setattr(numerics, "has_overflow", wasteful)
    judged = judge(scheduled, random_batches(1, 1)[0][0], initial=initial_flats(program))
    (wrong,) = judged.wrong
    assert "check_finite" in wrong
    assert torch.__version__ in wrong


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "stage"), EVERYTHING if IS_THOROUGH else SOME)
def test_a_step_of_a_model_takes_what_its_ops_declare(
    name: str, precision: str, stage: int | None
) -> None:
    if stage is None:
        check(name, logical(name, (("precision", precision),)))
    else:
        check_options(name, {"precision": precision, "stage": stage})


@pytest.mark.slow
@pytest.mark.parametrize("choices", (*OPTIONS, *MORE_OPTIONS) if IS_THOROUGH else OPTIONS, ids=str)
def test_options_change_what_is_declared_and_taken_alike(choices: dict[str, object]) -> None:
    check_options("gpt2", choices)


@pytest.mark.parametrize(
    "mean_over",
    [
        pytest.param(None, id="watched", marks=pytest.mark.slow),
        pytest.param("elements", id="weighted"),
    ],
)
def test_the_weights_of_batches_are_counted(mean_over: str | None) -> None:
    """Whether batches have weights, or are only watched for labels that they ignore."""
    weighs = {} if mean_over is None else {"mean_over": mean_over}
    options = make_options({"world_size": 2, "precision": "bf16", **weighs})
    traced = trace(model_file("gpt"), options).program
    assert (traced.weight is not None) == (mean_over is not None)
    program = proved_for(traced, options)
    assert footprint(program).scratch_bytes >= weighing_bytes(program) > 8
    check("gpt", program)


def test_scratch_memory_suffices_for_the_weight_of_a_batch() -> None:
    program = logical("gpt", ())
    segment = program.weighing_segment
    assert segment is not None
    calls = tuple(replace(one, workspace_bytes=()) for one in program.segments)
    assert footprint(replace(program, segments=calls)).scratch_bytes == weighing_bytes(program)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("convnet", "fp32"), pytest.param("vit", "bf16", marks=pytest.mark.slow)],
)
def test_what_a_profile_measures_is_exact_where_only_a_bound_is_known(
    name: str, precision: str
) -> None:
    """Convolutions and products in BF16: what one step took is what the next one takes, to the byte."""
    program = proved_for(
        logical(name, (("precision", precision),)),
        make_options({"world_size": RANKS, "precision": precision, "stage": 3}),
    )
    file = model_file(name)
    with stepping(program, [file.batch()], model=file.model()) as step:
        workspaces, again = on_host(program, step), on_host(program, step)
    assert set(workspaces) == {
        program.segment_by_name[op.segment].digest()
        for op in program.step_ops()
        if isinstance(op, ops.Compute)
    }
    segments = {
        digest: MeasuredSegment(seconds=0, workspace_bytes=size, source="a step")
        for digest, size in workspaces.items()
    }
    machine = load_machine("cpu-local").model_copy(update={"segments": segments})
    measured = with_measured_workspaces(program, machine)
    for before, after in zip(program.segments, measured.segments, strict=True):
        if before == program.weighing_segment:
            assert after == before  # No op calls it.
            continue
        own = dict(after.workspace_bytes)["eager"]
        # A step does not call what only evaluations do.
        assert own == again.get(after.digest(), dict(before.workspace_bytes)["eager"])
        assert own <= dict(before.workspace_bytes)["eager"]
    assert footprint(measured).scratch_bytes < footprint(program).scratch_bytes


def check_options(name: str, choices: dict[str, object]) -> None:
    traced = tuple((key, choices[key]) for key in TRACED if key in choices)
    options = make_options({"world_size": RANKS, **choices})
    check(name, proved_for(logical(name, traced), options), micro_steps=options.micro_steps.count)


def check(name: str, program: Program, *, micro_steps: int = 1) -> None:
    file = model_file(name)
    judged = judge(program, [file.batch()] * micro_steps, model=file.model())
    require_right(judged, program)
