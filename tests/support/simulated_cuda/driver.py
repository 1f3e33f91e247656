"""The driver of devices that are not there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from tests.support.simulated_cuda.queues import Moment, Queue, Recording, Schedule, World
from tests.support.simulated_cuda.tensors import (
    DeviceTensor,
    FactoryMode,
    LiteralMode,
    watch_end,
)
from zeroir.runtime.device.driver import use_driver
from zeroir.runtime.device.interface import (
    DeviceCapture,
    DeviceGraph,
    DeviceGraphPool,
    DeviceStream,
    TimedEvent,
)
from zeroir.runtime.memory.tensors import poison


class SimulatedCuda:
    """As many devices as ranks; ``waits`` counts for which operators the host waited, ``pools`` those of graphs."""

    def __init__(self, seed: int = 0, devices: int = 1) -> None:
        self.world = World(Schedule(seed))
        self.waits: Counter[str] = Counter()
        self.pools = 0
        self._devices = devices
        self._defaults = [self.world.new_queue(index) for index in range(devices)]
        self._thread = threading.local()
        self._pinned: list[Tensor] = []
        self._generators = [torch.Generator().manual_seed(index) for index in range(devices)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a block, in all threads, on these devices."""
        with (
            use_driver(self),
            mock.patch.object(torch.cuda, "_lazy_init", return_value=None),
            self.in_thread(),
        ):
            yield

    @contextmanager
    def in_thread(self, device: int = 0) -> Iterator[None]:
        """Let the calling thread make tensors on the devices."""
        with ExitStack() as stack:
            stack.enter_context(LiteralMode())
            stack.enter_context(FactoryMode(self))
            self._thread.has_modes = True
            self._thread.device = device
            try:
                yield
            finally:
                self._thread.has_modes = False

    # ------------------------------------------------------------------------------------------ tensors

    def with_index(self, device: torch.device) -> torch.device:
        is_one = device.type == "cuda" and device.index is not None
        return device if is_one else torch.device("cuda", self.current_device())

    def new(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, place: torch.device
    ) -> DeviceTensor:
        """Return a tensor whose elements nobody has written."""
        elements = torch.empty_strided(shape, stride, dtype=dtype)
        return self.adopt(elements, place, is_written=False)

    def adopt(
        self, elements: Tensor, place: torch.device, *, is_written: bool = True
    ) -> DeviceTensor:
        """Return a tensor of these elements; when it is freed, later work of its stream may overwrite them."""
        # The whole memory, because elements may overlap.
        numel = elements.untyped_storage().nbytes() // elements.itemsize
        memory = elements.as_strided((numel,), (1,), 0)
        if not is_written:
            poison(memory)
        made = DeviceTensor(elements, self, place, None)
        stream = self._queue(place)
        if stream.capture is None:
            watch_end(made, lambda: stream.submit(lambda: poison(memory)))
        return made

    def submit(self, place: torch.device, task: Callable[[], object]) -> None:
        """Let the current stream of a device run a task."""
        self._queue(place).submit(lambda: _unrecorded(task))

    def has_chosen_stream(self) -> bool:
        """Return whether the calling thread submits work to a stream that it has chosen."""
        return bool(self._thread.__dict__.get("streams"))

    def in_turn(self, task: Callable[[], object]) -> None:
        """Run a task when the stream comes to it that the calling thread has chosen, or at once where it has none."""
        if self.has_chosen_stream():
            self.submit(torch.device("cuda", self.current_device()), task)
        else:
            task()

    def host_waits(self, place: torch.device, name: str) -> None:
        """Wait for the current stream, because the host needs a value."""
        self.waits[name] += 1
        self._queue(place).synchronize()

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.untyped_storage().data_ptr()
        return any(start == pinned.untyped_storage().data_ptr() for pinned in self._pinned)

    # ------------------------------------------------------------------------------------------ Driver

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, device: torch.device) -> None:
        self._thread.device = self.with_index(device).index
        if not getattr(self._thread, "has_modes", False):
            # For the rest of the thread, which belongs to a stream.
            LiteralMode().__enter__()  # type: ignore[no-untyped-call]
            FactoryMode(self).__enter__()  # type: ignore[no-untyped-call]
            self._thread.has_modes = True

    def name(self, device: torch.device) -> str:  # noqa: ARG002 - of a real device
        return "a device that is not there"

    def processor(self, device: torch.device) -> tuple[object, ...]:  # noqa: ARG002 - of a real device
        return ("simulated",)

    def new_stream(self, device: torch.device) -> DeviceStream:
        return self.world.new_queue(self.with_index(device).index)

    def current_stream(self, device: torch.device) -> DeviceStream:
        return self._queue(self.with_index(device))

    def stream_handle(self, device: torch.device) -> int:
        return self._queue(device).index

    @contextmanager
    def on(self, stream: DeviceStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        assert isinstance(stream, Queue)
        current: dict[int, Queue] = self._thread.__dict__.setdefault("streams", {})
        before = current.get(stream.device)
        current[stream.device] = stream
        try:
            yield
        finally:
            if before is None:
                del current[stream.device]
            else:
                current[stream.device] = before

    def timed_event(self) -> TimedEvent:
        return _TimedEvent(self)

    def synchronize(self, device: torch.device) -> None:
        own = [q for q in self.world.queues if q.device == self.with_index(device).index]
        self.world.refuse_in_capture(*own)
        self.world.until(lambda: not any(queue.items for queue in own), f"device {device}")

    def new_graph_pool(self) -> DeviceGraphPool:
        self.pools += 1
        return _GraphPool(self)

    def is_capturing(self) -> bool:
        return self._queue(torch.device("cuda", self.current_device())).capture is not None

    def pinned_empty(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002 - of a real device
    ) -> Tensor:
        made = torch.empty(numel, dtype=dtype)
        poison(made)
        self._pinned.append(made)
        return made

    def peak_bytes(self, device: torch.device) -> int:  # noqa: ARG002 - of a real device
        return 0

    def allocated_bytes(self, device: torch.device) -> int:  # noqa: ARG002 - of a real device
        return 0

    def reset_peak_bytes(self, device: torch.device) -> None:
        pass

    def requested_bytes(self, device: torch.device, moment: str) -> int:  # noqa: ARG002 - of a real device
        return 0

    def new_generator(self, device: torch.device) -> torch.Generator:  # noqa: ARG002 - of a real device
        return torch.Generator()

    def random_state(self, device: torch.device) -> Tensor:
        return self._generators[self.with_index(device).index].get_state()

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        self._generators[self.with_index(device).index].set_state(state)

    def _queue(self, device: torch.device) -> Queue:
        index = self.with_index(device).index
        current: dict[int, Queue] = self._thread.__dict__.setdefault("streams", {})
        return current.get(index, self._defaults[index])


def _unrecorded(task: Callable[[], object]) -> None:
    with torch.no_grad():
        task()


@dataclass(eq=False)
class _TimedEvent:
    driver: SimulatedCuda
    moment: Moment | None = None
    at_s: float = 0.0

    def record(self) -> None:
        queue = self.driver._queue(torch.device("cuda", self.driver.current_device()))

        def note() -> None:
            self.at_s = time.perf_counter()

        queue.submit(note)
        self.moment = queue.record_event()

    def synchronize(self) -> None:
        moment = self.moment
        assert moment is not None
        self.driver.world.until(lambda: moment.is_done, "a timed event")

    def elapsed_time(self, end_event: TimedEvent) -> float:
        assert isinstance(end_event, _TimedEvent)
        return (end_event.at_s - self.at_s) * 1e3


@dataclass(eq=False)
class _GraphPool:
    driver: SimulatedCuda

    def begin_capture(self, stream: DeviceStream) -> DeviceCapture:
        assert isinstance(stream, Queue)
        self.driver.synchronize(torch.device("cuda", stream.device))
        return _Capture(self.driver, stream, self.driver.world.begin(stream))


@dataclass(eq=False)
class _Capture:
    driver: SimulatedCuda
    origin: Queue
    recording: Recording

    def end(self) -> DeviceGraph:
        self.driver.world.end(self.origin, self.recording)
        return _Graph(self.driver, self.recording)

    def abandon(self) -> None:
        self.recording.is_spoiled = False
        with suppress(RuntimeError):
            self.driver.world.end(self.origin, self.recording)


@dataclass(eq=False)
class _Graph:
    driver: SimulatedCuda
    recording: Recording

    def replay(self) -> None:
        queue = self.driver._queue(torch.device("cuda", self.driver.current_device()))
        queue.submit(lambda: self.driver.world.replay(self.recording))

    def reset(self) -> None:
        self.recording.nodes.clear()
