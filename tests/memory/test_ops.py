"""What is known of operators holds for the samples of torch's own tests, and what nobody knows of is allowed enough."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.memory.nodes import taken
from tests.memory.test_scratch import described
from tools.list_counted_ops import sampled_cases
from zeroir.workspace.segments import eager_workspace


@pytest.mark.slow
def test_torchs_own_samples_take_no_more_than_is_declared() -> None:
    """Of every twelfth of its operators one sample; ``tools/list_counted_ops.py`` looks at all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = sampled_cases(1, every=12)
        found = taken(cases)
    wrong = [
        f"{described(case)} declares {declared} and takes {one}"
        for case, one in zip(cases, found, strict=True)
        if one.peak_bytes > (declared := eager_workspace(case.segment, case.outputs)).most_bytes
    ]
    assert not wrong, f"under torch {torch.__version__}: " + "; ".join(wrong[:10])
    assert len({case.segment.nodes[0].op for case in cases}) > 40
