"""GRPO generates with the present weights and trains on batches of any size, with the bits of eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.support import Ranks, require_success


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_generate_and_train_as_eager_replicas(world_size: int, tmp_path: Path) -> None:
    module = "tests.integrations.grpo_workers"
    ranks = Ranks(world_size, tmp_path, module=module)
    require_success(ranks.wait(240))
