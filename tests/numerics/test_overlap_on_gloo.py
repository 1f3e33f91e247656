"""Real processes with merged collectives and the update in the backward compute what lockstep does without either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numerics.trainings import assert_ranks_compute_the_same, overlapped
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", "peer-memory"])
def test_all_stages_equal_lockstep_bit_for_bit(tmp_path: Path, backend: str) -> None:
    for training in overlapped():
        body = training.scheduled().section_by_name[LAST_MICRO_STEP].body
        assert any(isinstance(op, ops.Collective) and len(op.pairs) > 1 for op in body)
        assert any(isinstance(op, ops.OptimizerStep) for op in body)
    assert_ranks_compute_the_same(tmp_path, backend, "overlapped")
