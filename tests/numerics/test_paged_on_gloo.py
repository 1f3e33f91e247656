"""Real processes with paged optimizer states compute what lockstep does without pages, and resume into any pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.paged_workers import LARGE, SMALL, STAGE, logical, scheduled
from tests.numerics.trainings import RANKS, assert_ranks_compute_the_same
from tests.runtime.support import Ranks, require_success
from zeroir.ir.contents import FlatContent
from zeroir.runtime.execution.lockstep import Lockstep


@pytest.mark.slow
@pytest.mark.dist
def test_all_stages_equal_lockstep_bit_for_bit(tmp_path: Path) -> None:
    assert_ranks_compute_the_same(tmp_path, "gloo", "paged")


@pytest.mark.slow
@pytest.mark.dist
def test_a_checkpoint_continues_in_other_pages_and_without(tmp_path: Path) -> None:
    program = scheduled(logical(), STAGE, RANKS, SMALL)
    assert any(isinstance(b.holds, FlatContent) and b.holds.stride for b in program.buffers)
    require_success(Ranks(RANKS, tmp_path, module="tests.numerics.paged_workers").wait())
    whole = load_file(tmp_path / "unpaged.whole.safetensors")
    for saver in ("paged", "unpaged"):
        for name in ("whole", "none", "small", "large"):
            found = load_file(tmp_path / f"{saver}.{name}.safetensors")
            assert found.keys() == whole.keys()
            for key, tensor in found.items():
                assert torch.equal(tensor, whole[key]), (saver, name, key)
    _check_other_ranks(tmp_path)


def _check_other_ranks(folder: Path) -> None:
    """Another number of ranks, with other shards and other pages, has the same state."""
    states = []
    for saver in ("paged", "unpaged"):
        for ranks, paging in ((1, SMALL), (2, LARGE), (4, None)):
            lockstep = Lockstep(scheduled(logical(), 3, ranks, paging))
            lockstep.load(str(folder / saver))
            states.append(lockstep.full_state())
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for key, tensor in state.items():
            assert torch.equal(tensor, states[0][key]), key
