"""The curve of live bytes agrees with the peak, op by op."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.live_bytes import live_bytes
from zeroir.ir.memory import peak


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_highest_point_is_the_peak(stage: int, micro_steps: int) -> None:
    program = Case(stage=stage, micro_steps=micro_steps, precision="fp16").scheduled
    highest = 0
    for section in program.sections:
        curve = live_bytes(program, section, kernels="none")
        assert len(curve.totals) == len(section.body) + 1
        assert not any(curve.workspace)
        highest = max(highest, *curve.totals)
    assert highest == peak(program).total_bytes


def test_a_segments_workspace_counts_while_it_runs() -> None:
    program = Case(stage=3).scheduled
    for section in program.sections:
        curve = live_bytes(program, section)
        for op, size in zip(section.body, curve.workspace[1:], strict=True):
            is_compute = isinstance(op, ops.Compute)
            assert (size > 0) == is_compute


def test_a_joint_loses_nothing() -> None:
    """What is live after a section is live on entry to the next."""
    program = Case(stage=3, ranks=3, overlap_update=True).scheduled
    curves = [live_bytes(program, section, kernels="none") for section in program.sections]
    for before, after in pairwise(curves):
        for role in Role:
            ends = before.roles.get(role, [0])[-1]
            begins = after.roles.get(role, [0])[0]
            assert ends == begins
