"""The curve of live bytes agrees with the peak, op by op."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.memory.curve import live_bytes, peak
from zeroir.workspace.op_scratch import scratch_bytes


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_highest_point_is_the_peak(stage: int, micro_steps: int) -> None:
    program = Case(stage=stage, micro_steps=micro_steps, precision="fp16").scheduled
    highest = 0
    for section in program.sections:
        curve = live_bytes(program, section, kernels="none")
        assert len(curve.buffers) == len(curve.totals) == len(section.body) + 1
        segments = [isinstance(op, ops.Compute) for op in section.body]
        assert not any(
            size for size, is_one in zip(curve.workspace[1:], segments, strict=True) if is_one
        )
        highest = max(highest, *curve.buffers)
    assert highest == peak(program).total_bytes


def test_what_an_op_takes_counts_while_it_runs() -> None:
    program = Case(stage=3, precision="fp16", clip=1.0).scheduled
    for section in program.sections:
        curve = live_bytes(program, section)
        for op, size in zip(section.body, curve.workspace[1:], strict=True):
            if isinstance(op, ops.Compute):
                segment = program.segment_by_name[op.segment]
                assert size == dict(segment.workspace_bytes)["eager"]
            else:
                assert size == scratch_bytes(program, op)
        assert any(curve.workspace)


def test_a_boundary_loses_nothing() -> None:
    """What is live after a section is live on entry to the next."""
    program = Case(stage=3, ranks=3, overlap_update=True).scheduled
    curves = [live_bytes(program, section, kernels="none") for section in program.sections]
    for before, after in pairwise(curves):
        for role in Role:
            ends = before.roles.get(role, [0])[-1]
            begins = after.roles.get(role, [0])[0]
            assert ends == begins
