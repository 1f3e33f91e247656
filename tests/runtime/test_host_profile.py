"""The rates of the host and the disk at hand; how fast they are, no test says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from zeroir.errors import UserError
from zeroir.runtime.disk_profile import measure_disk
from zeroir.runtime.host_profile import measure_host


def test_the_host_at_hand_is_measured() -> None:
    meetings: list[None] = []
    rates = measure_host(torch.device("cpu"), lambda: meetings.append(None))
    assert len(meetings) > 0
    assert all(rate > 0 for rate in asdict(rates).values())
    # Both directions at once cannot copy more than each of them alone, and noise is below 10 times.
    one_way = rates.to_device_bytes_per_s + rates.to_host_bytes_per_s
    assert rates.both_bytes_per_s < 10 * one_way


def test_the_disk_at_hand_is_measured_and_nothing_is_left_there(tmp_path: Path) -> None:
    meetings: list[None] = []
    rates = measure_disk(tmp_path, 0, lambda: meetings.append(None))
    assert len(meetings) > 0
    assert all(rate > 0 for rate in asdict(rates).values())
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone"):
        measure_disk(tmp_path / "gone", 0, lambda: None)
