"""Each wait of the device path is needed: without it some schedule of a device gives other numbers, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.support.simulated_cuda import SimulatedCuda, queues
from tests.support.simulated_cuda.lockstep import OnDevice
from tests.support.simulated_cuda.without_waits import waits, without
from tests.support.subjects import is_equal, subject
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import COMPUTE, HOST, OPTIMIZER
from zeroir.runtime.execution.cuda import CudaStreams

SEEDS = range(20)
REGION = Region(buffer="loss", offset=0, numel=1)
SHOWN_BY = {
    "self._threads.call(name, partial(self._in_thread, wait)) #0": "stage 3, paged",
    "stream.wait_event(signal) #0": "stage 3, overlapped",
    "wait_for_threads() #0": "stage 3, paged",
    "arrived.synchronize() #0": "stage 3, overlapped",
    "self._threads.call(stream, signal.synchronize) #0": "stage 3, paged",
    "self._threads.call(op.on, partial(synchronize, event)) #0": "stage 1, speculative",
    "self._order(self._streams[op.on], op.waited) #0": "stage 3, overlapped",
    "wait_for_thread() #0": "stage 3, paged",
    "stream.wait_event(arrived) #0": "stage 3, paged",
    "self._threads.call(op.on, partial(self._in_thread, on_stream)) #0": "stage 3, paged",
    "stream.wait_event(event) #0": "stage 3, overlapped",
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


OF_CALLER = {
    "before": "own.wait_event(callers.record_event()) #0",
    "after": "callers.wait_event(own.record_event()) #0",
}


@pytest.mark.parametrize("side", OF_CALLER)
def test_a_step_is_ordered_with_the_callers_own_stream(side: str) -> None:
    """Without one of the two waits of ``entered``, the caller or the step reads too early."""

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
    assert not all(is_right(seed, without(waits()[OF_CALLER[side]])) for seed in SEEDS)


OF_HOST = {
    "self._threads.join([name for name in pending if self._is_of_thread(name)]) #0": "boundary",
    "self._threads.join(()) #0": "finish of a thread",
    "driver().synchronize(self._device) #0": "finish of the device",
    "synchronize(event) #0": "wait of the host",
}
"""What shows the lack of a wait of the host, whose threads no schedule delays."""


def is_read_in_time(case: str, seed: int, kind: type[CudaStreams]) -> bool:
    """Whether the host reads what a slow thread or a stream has written before."""
    device = torch.device("cuda", 0)
    driver = SimulatedCuda(seed)
    with driver.running():
        streams = kind(subject("stage 3, updated on the host").scheduled, device)
        host = driver.pinned_empty(4, torch.float32, device)
        values = torch.ones(4, device=device)

        def on_host() -> None:
            time.sleep(0.1)
            host.fill_(1.0)

        def to_host() -> None:
            host.copy_(values, non_blocking=True)

        def run(stream: str, event: str, work: Callable[[], None]) -> None:
            streams.bind(
                ops.Fill(destination=REGION, value=0.0, stream=stream, event=event), work
            )()

        match case:
            case "boundary":
                run(OPTIMIZER, "0", on_host)
                streams.join(())
            case "finish of a thread":
                run(OPTIMIZER, "0", on_host)
                streams.finish()
            case "finish of the device":
                run(COMPUTE, "0", to_host)
                streams.finish()
            case _:
                run(COMPUTE, "0", to_host)
                streams.bind(ops.Wait(waited="0", on=HOST), lambda: None)()
        try:
            return host.tolist() == [1.0] * 4
        finally:
            streams.close()


@pytest.mark.parametrize("wait", OF_HOST)
def test_without_a_wait_of_the_host_something_is_read_too_early(wait: str) -> None:
    seeds = range(4)
    assert all(is_read_in_time(OF_HOST[wait], seed, CudaStreams) for seed in seeds)
    assert not all(is_read_in_time(OF_HOST[wait], seed, without(waits()[wait])) for seed in seeds)


def test_every_wait_of_streams_and_threads_is_shown_to_be_needed() -> None:
    """The others are those of a clock, and of captures and launches of graphs."""
    others = {
        "driver().synchronize(device) #0",
        "self._first.synchronize() #0",
        "event.synchronize() #0",
        "self.wait() #0",
        "self.stream.synchronize() #0",
        "self._order(own[COMPUTE], name) #0",
        "self._threads.waiting_for([name])() #0",  # in a launch alone; elsewhere the thread has waited before
        "stream.wait_event(begin) #0",
        "self._streams[COMPUTE].wait_event(stream.record_event()) #0",
    }
    assert waits().keys() == {*SHOWN_BY, *OF_CALLER.values(), *OF_HOST, *others}
