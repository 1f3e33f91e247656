"""Real processes with buffers outside device memory compute what lockstep does with all of them inside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.offload_workers import MICRO_STEPS, STEPS, logical, scheduled
from tests.runtime.support import Ranks, initial_flats, lowered, random_batches, require_success
from tests.support.lockstep import run_lockstep
from tests.support.offloads import OFFLOADS
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("backend", "offload"), [*(("gloo", what) for what in OFFLOADS), ("peer-memory", "everything")]
)
def test_all_stages_equal_lockstep_bit_for_bit(tmp_path: Path, backend: str, offload: str) -> None:
    ranks = Ranks(3, tmp_path, offload, backend, module="tests.numerics.offload_workers")
    require_success(ranks.wait())
    program = logical(offload)
    expected = [
        run_lockstep(
            lowered(program, stage, 3),
            initial=initial_flats(program),
            inputs=random_batches(STEPS, 3, MICRO_STEPS),
        )
        for stage in range(4)
    ]
    for stage in range(4):
        body = scheduled(stage, 3, offload).section_by_name[LAST_MICRO_STEP].body
        assert any(isinstance(op, ops.Transfer) for op in body)
        found = load_file(tmp_path / f"{stage}.safetensors")
        losses = [of_step[0] for of_step in expected[stage].losses]
        assert found.pop("losses").tolist() == losses
        states = {f"{flat}/{quantity}": t for (flat, quantity), t in expected[stage].state.items()}
        assert found.keys() == states.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, states[key]), f"stage {stage}: {key}"
