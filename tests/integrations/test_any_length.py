"""Trainers of other libraries train on batches of any size, on every rank its own, by one program, as DDP does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime.support import Ranks, require_success

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
]


@pytest.mark.parametrize(
    ("what", "library", "world_size"),
    [
        ("bert", "accelerate", 2),
        ("bert", "accelerate", 3),
        ("lightning", "lightning", 2),
        ("accelerate", "accelerate", 2),
    ],
)
def test_ranks_train_on_batches_of_any_size_as_ddp(
    what: str, library: str, world_size: int, tmp_path: Path
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = "tests.integrations.any_length_workers"
    ranks = Ranks(world_size, tmp_path, what, module=module)
    require_success(ranks.wait(240))
