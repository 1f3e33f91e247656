"""Each wait of the device path is needed: without it some schedule of a device gives other numbers, or an error."""

from __future__ import annotations

import pytest
import torch

from tests.support.simulated_cuda import SimulatedCuda, queues
from tests.support.simulated_cuda.lockstep import OnDevice
from tests.support.simulated_cuda.without_waits import waits, without
from tests.support.subjects import is_equal, subject
from zeroir.runtime.execution.cuda import CudaStreams

SEEDS = range(20)
SHOWN_BY = {
    "self._threads.join([name for name in pending if self._is_of_thread(name)]) #0": "stage 3, paged",
    "self._threads.call(name, partial(self._in_thread, wait)) #0": "stage 3, paged",
    "stream.wait_event(signal) #0": "stage 3, overlapped",
    "wait_for_threads() #0": "stage 3, paged",
    "arrived.synchronize() #0": "stage 3, overlapped",
    "self._threads.call(stream, signal.synchronize) #0": "stage 3, paged",
    "self._threads.call(op.on, partial(synchronize, event)) #0": "stage 1, speculative",
}
"""The program that shows the lack of a wait soon."""


def differs(name: str, seed: int, streams: type[CudaStreams]) -> bool:
    """Whether a program comes to other numbers than lockstep's, or to an error."""
    made = subject(name)
    driver = SimulatedCuda(seed)
    with driver.running(), torch.no_grad():
        run = OnDevice(driver, made.scheduled, weight=made.weight, streams=streams)
        try:
            found = [value.cpu() for value in made.train_on(run)]
        except Exception:  # noqa: BLE001 - whatever it is, the whole class raises none
            return True
        finally:
            run.streams.close()
    expected = made.train(made.scheduled, 0)
    return not (len(found) == len(expected) and all(map(is_equal, found, expected)))


@pytest.mark.slow
@pytest.mark.parametrize("wait", SHOWN_BY)
def test_without_a_wait_some_schedule_differs(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "PATIENCE_S", 2.0)
    streams = without(waits()[wait])
    assert any(differs(SHOWN_BY[wait], seed, streams) for seed in SEEDS)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_step_is_ordered_with_the_callers_own_stream(side: str) -> None:
    """Without one of the two waits of ``entered``, the caller or the step reads too early."""
    wait = {
        "before": "own.wait_event(callers.record_event()) #0",
        "after": "callers.wait_event(own.record_event()) #0",
    }[side]

    def is_right(seed: int, kind: type[CudaStreams]) -> bool:
        device = torch.device("cuda", 0)
        driver = SimulatedCuda(seed)
        with driver.running():
            streams = kind(subject("stage 0").scheduled, device)
            with driver.on(driver.new_stream(device)):
                values = torch.ones(4, device=device) * 2
                with streams.entered():
                    doubled = values * 2
                found = (doubled + 0).tolist()
            streams.close()
        return found == [4.0] * 4

    assert all(is_right(seed, CudaStreams) for seed in SEEDS)
    assert not all(is_right(seed, without(waits()[wait])) for seed in SEEDS)
