"""The verifier and the passes find the buffers that bounds limit, and their groups, each in a way of its own."""

from __future__ import annotations

import pytest

from tests.support.subjects import CASES, WRITTEN, subject
from zeroir.passes.common.bounded_buffers import bounded_buffers, groups
from zeroir.verify.order.bounded_buffers import groups_of_releases, kinds_of_buffers


@pytest.mark.parametrize("name", [*CASES, *WRITTEN])
def test_both_find_the_same_groups(name: str) -> None:
    program = subject(name).scheduled
    kinds = kinds_of_buffers(program)
    assert kinds == bounded_buffers(program.buffers, program.ops())
    for section in program.sections:
        assert groups_of_releases(section.body, kinds) == groups(section.body, kinds)


def test_every_kind_is_among_them() -> None:
    kinds = {
        kind
        for name in (*CASES, *WRITTEN)
        for kind in kinds_of_buffers(subject(name).scheduled).values()
    }
    # Staging of the disk is in programs of tests/passes/test_offload_to_disk.py alone.
    assert {kind.value for kind in kinds} >= {
        "full_parameters",
        "full_gradients",
        "activations",
        "device_staging",
        "host_staging",
        "pages",
    }
