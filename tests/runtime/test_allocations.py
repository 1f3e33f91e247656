"""Torch's allocator events, as the only module that looks into its profiler tells them."""

from __future__ import annotations

import os

import pytest
import torch
from torch.profiler import record_function

from zeroir.runtime.memory.allocations import allocations, by_range, left_bytes, peak_bytes


def test_events_are_told_by_the_ranges_around_them() -> None:
    kept: list[torch.Tensor] = []

    def action() -> None:
        with record_function("first"):
            kept.append(torch.empty(100))
            torch.empty(50)
        with record_function("second"):
            kept.clear()

    events = by_range(allocations(action), ("first", "second"))
    assert set(events) == {"first", "second"}, torch.__version__
    assert (peak_bytes(events["first"]), left_bytes(events["first"])) == (600, 400)
    assert (peak_bytes(events["second"]), left_bytes(events["second"])) == (0, -400)


def test_only_what_the_profiler_says_of_itself_is_kept_from_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    kept = [torch.empty(1000)]

    def action() -> None:
        kept.clear()  # which the profiler has to say something about
        os.write(2, b"something else\n")

    allocations(action)
    assert capfd.readouterr().err == "something else\n"
