"""The rates of the host at hand; how fast it is, no test says."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from zeroir.runtime.execution.host_profile import measure_host


@pytest.mark.slow
def test_the_host_at_hand_is_measured() -> None:
    meetings: list[None] = []
    rates = measure_host(torch.device("cpu"), lambda: meetings.append(None))
    assert len(meetings) > 0
    assert all(rate > 0 for rate in asdict(rates).values())
    # Both directions at once cannot copy more than each of them alone, and noise is below 10 times.
    one_way = rates.to_device_bytes_per_s + rates.to_host_bytes_per_s
    assert rates.both_bytes_per_s < 10 * one_way
