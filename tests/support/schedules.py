"""Schedules of the small hand-made programs, and runs of them that are compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from tests.support.groups import in_groups
from tests.support.lockstep import LockstepResult, run_lockstep
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.passes.base import Pass
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.manager import apply
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.page_optimizer import PageOptimizer

TORCH_DTYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A logical program and what is made of it; the fields are those of ``mlp`` and ``for_stage``.

    With ``is_grouped`` some parameters have settings of their own.
    """

    stage: int = 3
    ranks: int = 3
    precision: str = "fp32"
    micro_steps: int = 1
    clip: float | None = None
    tied: bool = False
    keep_fp32: bool = False
    elide: bool = True
    distance: int = 1
    bucket: int = 0
    overlap_update: bool = False
    order: OrderByLayer | None = None
    ema: float | None = None
    optimizer: str = "adamw"
    is_weighted: bool = False
    is_grouped: bool = False
    has_codes: bool = False
    has_parameters_on_host: bool = False
    paging: PageOptimizer | None = None
    offload: tuple[Pass, ...] = ()
    blocks: int = field(default=2)
    dim: int = 4

    @property
    def logical(self) -> Program:
        return _logical(self)

    @property
    def scheduled(self) -> Program:
        return _scheduled(self)


@cache
def _logical(case: Case) -> Program:
    program = mlp(
        blocks=case.blocks,
        dim=case.dim,
        features=4,
        batch=2,
        precision=case.precision,
        micro_steps=case.micro_steps,
        clip=case.clip,
        tied=case.tied,
        keep_fp32=case.keep_fp32,
        ema=case.ema,
        optimizer=case.optimizer,
        is_weighted=case.is_weighted,
        has_codes=case.has_codes,
    )
    return in_groups(program) if case.is_grouped else program


@cache
def _scheduled(case: Case) -> Program:
    program = case.logical
    passes = for_stage(
        case.stage,
        case.ranks,
        elide=case.elide,
        bucket=case.bucket,
        distance=case.distance,
        overlap_update=case.overlap_update,
        order=case.order,
    )
    passes += () if case.paging is None else (case.paging,)
    for step in (*passes, *case.offload):
        program = apply(step, program)
    return apply(OffloadParameters(), program) if case.has_parameters_on_host else program


def run(
    program: Program, steps: int = 2, schedule_seed: int = 0, lr_factor: float = 1.0
) -> LockstepResult:
    """Train the program from fixed values on fixed batches."""
    generator = torch.Generator().manual_seed(7)
    initial: dict[str, Tensor] = {}
    for flat in program.flats:
        values = torch.zeros(flat.padded_numel)
        for slot in flat.slots:
            values[slot.offset : slot.offset + slot.numel] = (
                torch.randn(slot.numel, generator=generator) * 0.5
            )
        initial[f"{flat.name}.param"] = values.to(TORCH_DTYPES[flat.dtype])
    micro_steps = int(program.options.texts["micro_steps"])
    inputs = [
        [
            [{"x": torch.randn(2, 4, generator=generator)} for _ in range(micro_steps)]
            for _ in range(program.mesh.world_size)
        ]
        for _ in range(steps)
    ]
    return run_lockstep(
        program,
        initial=initial,
        inputs=inputs,
        schedule_seed=schedule_seed,
        lr_factor=lr_factor,
    )


def is_same(a: LockstepResult, b: LockstepResult) -> bool:
    """Whether two runs agree in every bit of what steps report, parameters and states."""
    return (
        a.losses == b.losses
        and a.skipped == b.skipped
        and repr(a.told) == repr(b.told)  # NaN differs from itself
        and a.state.keys() == b.state.keys()
        and all(torch.equal(a.state[key], b.state[key]) for key in a.state)
    )
