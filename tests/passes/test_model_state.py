"""Model states per rank follow the formulae of the ZeRO paper (Rajbhandari et al. 2020, §3 and §5), to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.layout import padded_numel, used_numel
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP
from zeroir.memory.states import model_state_bytes

BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "fp16": (2, 2, 12)}
"""Of one parameter, one gradient, and K: what Adam keeps of it, its FP32 copy included."""


def _expected(stage: int, world_size: int, numel: int, sizes: tuple[int, int, int]) -> int:
    param, grad, k = sizes
    whole, sharded = {
        0: (param + grad + k, 0),
        1: (param + grad, k),
        2: (param, grad + k),
        3: (0, param + grad + k),
    }[stage]
    return whole * numel + sharded * numel // world_size


@examples(60)
@given(
    st.integers(0, 3),
    st.one_of(st.integers(1, 1024), st.sampled_from([1, 2, 3, 7, 64, 1000, 1023, 1024])),
    st.sampled_from(sorted(BYTES)),
    st.integers(1, 3),
    st.sampled_from([8, 16, 24]),
)
def test_bytes_per_rank(stage: int, world_size: int, precision: str, blocks: int, dim: int) -> None:
    logical = mlp(blocks=blocks, dim=dim, precision=precision)
    numel = sum(padded_numel(used_numel(flat), world_size) for flat in logical.flats)
    program = applied(logical, for_stage(stage, world_size))
    expected = _expected(stage, world_size, numel, BYTES[precision])
    assert sum(model_state_bytes(program).values()) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_sums_of_micro_steps_are_four_bytes_a_gradient(stage: int) -> None:
    program = applied(mlp(precision="bf16", micro_steps=2), for_stage(stage, 4))
    numel = sum(flat.padded_numel for flat in program.flats)
    assert model_state_bytes(program)["grad"] == 4 * (numel if stage < 2 else numel // 4)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_local_sums_trade_memory_for_traffic(stage: int, precision: str) -> None:
    """Whole FP32 sums on each rank, and one reduction of them a step instead of one a micro-step."""
    ranks = 4
    _, size, _ = BYTES[precision]
    sharded, local = (
        applied(
            mlp(precision=precision, micro_steps=2),
            for_stage(stage, ranks, accumulate_locally=is_local),
        )
        for is_local in (False, True)
    )
    numel = sum(flat.padded_numel for flat in local.flats)
    assert model_state_bytes(local)["grad"] == 4 * numel
    assert model_state_bytes(sharded)["grad"] == 4 * numel // ranks
    for program, in_each, in_last in ((sharded, size, size), (local, 0, 4)):
        reduced = {
            name: sum(
                pair.source.numel * program.buffer_by_name[pair.source.buffer].dtype.itemsize_bytes
                for op in program.section_by_name[name].body
                if isinstance(op, ops.ReduceScatter)
                for pair in op.pairs
            )
            for name in (MICRO_STEP, LAST_MICRO_STEP)
        }
        assert reduced == {MICRO_STEP: in_each * numel, LAST_MICRO_STEP: in_last * numel}
    others = [
        {k: v for k, v in model_state_bytes(p).items() if k != "grad"} for p in (sharded, local)
    ]
    assert others[0] == others[1]
