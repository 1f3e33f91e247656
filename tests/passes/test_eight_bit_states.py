"""States of 8 bits outside device memory: offloaded or in pages, with the same bits, also of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime.support import initial_flats, random_batches
from tests.support.groups import in_groups
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.optimizers.forms import ABSMAX, CODES
from zeroir.ir.program import Program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.verify import verify

SHAPE = (4, 20)
PAGES = PageOptimizer(device_bytes=4096, page_bytes=1024)
FEW_PAGES = PageOptimizer(device_bytes=2048, page_bytes=1024)
WAYS: Mapping[str, tuple[Pass, ...]] = {
    "on the host": (OffloadOptimizer(),),
    "in pages": (PAGES,),
    "all in few pages": (FEW_PAGES,),
    "in pages, parameters on the host": (FEW_PAGES, OffloadParameters()),
}


@cache
def logical(precision: str) -> Program:
    clip = 0.05 if precision == "fp16" else None
    return in_groups(mlp(dim=24, features=20, precision=precision, clip=clip, has_codes=True))


@cache
def scheduled(
    precision: str, stage: int, passes: tuple[Pass, ...], *, overlap_update: bool = False
) -> Program:
    base = for_stage(stage, 2, overlap_update=overlap_update)
    return applied(logical(precision), (*base, *passes, SaveState(), PlanMemory()))


def trained(program: Program, steps: int = 3) -> Lockstep:
    lockstep = Lockstep(program, schedule_seed=steps)
    lockstep.initialise_flats(initial_flats(program))
    for batches in random_batches(steps, 2, shape=SHAPE):
        lockstep.step(batches)
    return lockstep


def equal(first: Lockstep, second: Lockstep) -> bool:
    states: list[Mapping[tuple[str, str], Tensor]] = [first.full_state(), second.full_state()]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][key]) for key, value in states[0].items()
    )


def of_states(program: Program) -> list[Space]:
    quantities = {*CODES.values(), *ABSMAX.values()}
    return [
        buffer.space
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent) and buffer.holds.quantity in quantities
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("fp16", 1), ("bf16", 3)])
def test_no_bit_changes(way: str, precision: str, stage: int) -> None:
    is_overlapped = precision != "fp16"
    program = scheduled(precision, stage, WAYS[way], overlap_update=is_overlapped)
    report = verify(program, logical(precision))
    assert report.is_valid, report.render()
    assert Space.HOST in of_states(program)
    assert equal(trained(program), trained(scheduled(precision, stage, ())))


def test_pages_bring_codes_and_scales_together() -> None:
    program = scheduled("fp32", 3, (PAGES,))
    assert verify(program, logical("fp32")).is_valid
    assert {Space.HOST, Space.DEVICE} == set(of_states(program))
    pages = {buffer.dtype.value for buffer in program.buffers if buffer.role is Role.PAGE}
    assert pages == {"u8", "f32"}
    assert equal(trained(program), trained(scheduled("fp32", 3, ())))


def test_a_piece_of_codes_on_disk_comes_with_the_scales_of_its_blocks() -> None:
    whole = mlp(dim=96, features=20, has_codes=True)
    plain = applied(whole, for_stage(1, 2))
    program = manager.run(plain, [OffloadOptimizer(), OffloadToDisk(piece_numel=4096)], whole)
    steps = [op for op in program.ops() if isinstance(op, ops.OptimizerStep)]
    assert len({op.param.numel for op in steps}) > 1
    for op in steps:
        assert {scale.numel for scale in op.scales} == {-(-op.param.numel // op.form.block_numel)}
    assert equal(trained(program), trained(plain))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["on the host", "in pages"])
def test_a_checkpoint_goes_on_there_and_elsewhere(way: str, tmp_path: Path) -> None:
    program, plain = scheduled("fp32", 1, WAYS[way]), scheduled("fp32", 3, ())
    source = trained(program)
    source.save(str(tmp_path / "saved"))
    for number, loading in enumerate((program, plain)):
        target = Lockstep(loading)
        target.load(str(tmp_path / "saved"))
        assert equal(source, target)
        target.save(str(tmp_path / f"again{number}"))
        back = Lockstep(program)
        back.load(str(tmp_path / f"again{number}"))
        assert equal(source, back)
