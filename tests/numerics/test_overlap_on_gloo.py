"""Real processes with merged collectives and the update in the backward compute what lockstep does without either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.overlap_workers import STEPS, logical, scheduled
from tests.runtime.support import (
    Ranks,
    initial_flats,
    lowered,
    random_batches,
    require_success,
)
from tests.support.lockstep import run_lockstep
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", "peer-memory"])
def test_all_stages_equal_lockstep_bit_for_bit(tmp_path: Path, backend: str) -> None:
    ranks = Ranks(3, tmp_path, backend, module="tests.numerics.overlap_workers")
    require_success(ranks.wait())
    program = logical()
    expected = run_lockstep(
        lowered(program, 0, 3), initial=initial_flats(program), inputs=random_batches(STEPS, 3)
    )
    for stage in range(4):
        body = scheduled(stage, 3).section_by_name[LAST_MICRO_STEP].body
        assert any(isinstance(op, ops.Collective) and len(op.pairs) > 1 for op in body)
        assert any(isinstance(op, ops.OptimizerStep) for op in body)
        found = load_file(tmp_path / f"{stage}.safetensors")
        assert found.pop("losses").tolist() == [losses[0] for losses in expected.losses]
        states = {f"{flat}/{quantity}": t for (flat, quantity), t in expected.state.items()}
        assert found.keys() == states.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, states[key]), f"stage {stage}: {key}"
