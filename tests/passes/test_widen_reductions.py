"""FP32 on the wire of gradients: the same program for ranks that add in FP32 anyway, and a better one by NCCL."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.runtime.support import begun, initial_flats, random_batches
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.simulated_cuda.queues import AT_ONCE
from tests.support.simulated_cuda.ranks import train_ranks
from tests.support.subjects import is_equal, subject
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Reduction
from zeroir.ir.program import Program
from zeroir.passes.communication.bucket import Bucket
from zeroir.passes.communication.widen_reductions import WidenReductions
from zeroir.passes.pipelines import for_options
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.verify import verify
from zeroir.workspace.op_scratch import scratch_bytes


def programs(
    stage: int, ranks: int, micro_steps: int = 1, precision: str = "bf16"
) -> tuple[Program, Program]:
    """A program as it is, and with FP32 on the wire."""
    logical = mlp(blocks=2, clip=1.0, micro_steps=micro_steps, precision=precision)
    plain = applied(logical, tuple(for_stage(stage, ranks)))
    wide = WidenReductions()(plain)
    assert verify(wide, logical).is_valid
    return plain, wide


def sums(program: Program) -> list[ops.ReduceScatter | ops.AllReduce]:
    return [
        op
        for op in program.ops()
        if isinstance(op, ops.ReduceScatter | ops.AllReduce) and op.reduction is Reduction.SUM
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_every_sum_of_16_bits_travels_in_fp32_and_ranks_that_add_in_fp32_have_the_same_bits(
    stage: int, micro_steps: int, precision: str
) -> None:
    plain, wide = programs(stage, 3, micro_steps, precision)
    for before, after in zip(sums(plain), sums(wide), strict=True):
        dtypes = {plain.buffer_by_name[pair.source.buffer].dtype for pair in before.pairs}
        assert after.wire_dtype is (None if dtypes == {DType.F32} else DType.F32)
    runs = [begun(Lockstep(program)) for program in (plain, wide)]
    for batches in random_batches(2, 3, micro_steps):
        first, second = (run.step(batches) for run in runs)
        assert [result.loss for result in first] == [result.loss for result in second]
    state, other = (run.full_state() for run in runs)
    assert all(torch.equal(state[key], other[key]) for key in state)


def gradients(program: Program, found: list[list[Tensor]], steps: int) -> list[Tensor]:
    names = [buffer.name for buffer in program.buffers if buffer.is_persistent]
    return [
        value
        for of_rank in found
        for name, value in zip(names, of_rank[steps:], strict=True)
        if name.endswith((".master", ".param"))
    ]


def test_sums_that_are_rounded_at_each_rank_lose_less() -> None:
    """By NCCL's additions, gradients in FP32 give the parameters of ranks that round once, and others do not."""
    ranks = 4
    plain, wide = programs(2, ranks)
    batches = random_batches(1, ranks)
    values = initial_flats(plain)

    def trained(program: Program, *, rounds: bool) -> list[Tensor]:
        driver = SimulatedCuda(AT_ONCE, ranks)
        with driver.running():
            found = train_ranks(driver, program, values, batches, rounds=rounds)
        return gradients(program, found, 1)

    once = trained(plain, rounds=False)
    exact = [torch.equal(a, b) for a, b in zip(trained(wide, rounds=True), once, strict=True)]
    lossy = [torch.equal(a, b) for a, b in zip(trained(plain, rounds=True), once, strict=True)]
    assert sum(exact) > sum(lossy)


def test_the_copies_on_the_wire_count_as_memory() -> None:
    plain, wide = programs(2, 4)
    for before, after in zip(sums(plain), sums(wide), strict=True):
        assert scratch_bytes(plain, before) == 0
        if after.wire_dtype is not None:
            (pair,) = after.pairs
            copied = pair.source.local_numel(wide.mesh) + pair.destination.local_numel(wide.mesh)
            assert scratch_bytes(wide, after) == 4 * copied


def test_the_option_is_the_pass_and_is_refused_where_it_does_nothing() -> None:
    options = make_options({"stage": 2, "precision": "bf16", "reduce_dtype": "fp32"})
    names = [one.name for one in for_options(options)]
    assert WidenReductions.name in names
    assert WidenReductions.name not in [one.name for one in for_options(make_options({"stage": 2}))]
    with pytest.raises(UserError, match="--reduce-dtype fp32 has no effect"):
        make_options({"stage": 2, "reduce_dtype": "fp32"})


def test_buckets_travel_in_fp32_too() -> None:
    logical = mlp(blocks=3, precision="bf16")
    program = applied(logical, (*for_stage(2, 2), Bucket(bytes=100_000), WidenReductions()))
    assert verify(program, logical).is_valid
    assert any(len(op.pairs) > 1 and op.wire_dtype is DType.F32 for op in sums(program))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gathering, stage 3", "stage 2, 8 bits", "captured, shampoo"])
def test_sums_of_other_tensors_than_gradients_keep_their_bits(name: str) -> None:
    """Those of tensors that a model gathers, and of what whole parameters are updated with."""
    made = subject(name)
    wide = WidenReductions()(made.scheduled)
    assert wide != made.scheduled
    assert verify(wide, made.logical).is_valid
    assert all(map(is_equal, made.train(wide, 0), made.train(made.scheduled, 0)))
