"""What the tests themselves use of torch, and torch does not promise to keep, is still there."""

from __future__ import annotations

import inspect

import pytest
import torch


def test_the_agent_of_torchrun_starts_ranks_where_the_tests_fork_them() -> None:
    """See ``tests/support/zygote.py``."""
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
            SubprocessHandler,
        )

        start = SubprocessHandler._popen
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} starts ranks elsewhere: {error!r}")
    assert list(inspect.signature(start).parameters) == ["self", "args", "env"], torch.__version__
