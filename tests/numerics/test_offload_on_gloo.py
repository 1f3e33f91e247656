"""Real processes with buffers outside device memory compute what lockstep does with all of them inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numerics.trainings import assert_ranks_compute_the_same, offloaded
from tests.support.offloads import OFFLOADS
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "names"),
    [("gloo", tuple(OFFLOADS)), ("peer-memory", ("everything",))],
    ids=["gloo", "peer-memory"],
)
def test_what_is_offloaded_equals_lockstep_bit_for_bit(
    tmp_path: Path, backend: str, names: tuple[str, ...]
) -> None:
    for training in offloaded(*names):
        body = training.scheduled().section_by_name[LAST_MICRO_STEP].body
        assert any(isinstance(op, ops.Transfer) for op in body), training.name
    assert_ranks_compute_the_same(tmp_path, backend, "offloaded", *names)


@pytest.mark.parametrize("backend", ["gloo", "peer-memory"])
def test_an_offloaded_optimizer_with_averages_equals_lockstep_bit_for_bit(
    tmp_path: Path, backend: str
) -> None:
    assert_ranks_compute_the_same(tmp_path, backend, "offloaded_with_averages")
