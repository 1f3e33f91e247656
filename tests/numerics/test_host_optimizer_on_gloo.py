"""Real processes whose optimizer and gradients are on the host compute what lockstep does without offload."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.host_optimizer_workers import STEPS, WAYS, logical
from tests.runtime.support import (
    Ranks,
    initial_flats,
    lowered,
    random_batches,
    require_success,
)
from tests.support.lockstep import run_lockstep


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", "peer-memory"])
def test_offload_equals_lockstep_without_it_bit_for_bit(tmp_path: Path, backend: str) -> None:
    ranks = Ranks(3, tmp_path, backend, module="tests.numerics.host_optimizer_workers")
    require_success(ranks.wait())
    for is_clipped in (False, True):
        program = logical(is_clipped=is_clipped)
        expected = run_lockstep(
            lowered(program, 0, 3), initial=initial_flats(program), inputs=random_batches(STEPS, 3)
        )
        states = {f"{flat}/{quantity}": t for (flat, quantity), t in expected.state.items()}
        for stage, way in product((0, 3), WAYS):
            found = load_file(tmp_path / f"{stage}-{way}-{is_clipped}.safetensors")
            assert found.pop("losses").tolist() == [losses[0] for losses in expected.losses]
            assert found.keys() == states.keys()
            for key, tensor in found.items():
                assert torch.equal(tensor, states[key]), f"stage {stage}, {way}: {key}"
