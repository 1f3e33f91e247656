"""What the runtime asks of a device that works beside the host; ``driver.driver()`` is the one of this process.

No other module of the runtime calls ``torch.cuda``, so that tests can run the whole runtime on a device that is not
there, and another accelerator is another implementation of ``DeviceDriver``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A moment of a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come to it."""


class TimedEvent(DeviceEvent, Protocol):
    """A moment whose time is measured."""

    def record(self) -> None:
        """Make it the present end of the current stream."""

    def elapsed_time(self, end_event: TimedEvent, /) -> float:
        """Return the milliseconds from this event to another."""


class DeviceStream(Protocol):
    """A queue of work that the device does in order."""

    def record_event(self) -> DeviceEvent:
        """Return the event that the work submitted so far is done."""

    def wait_event(self, event: DeviceEvent, /) -> None:
        """Make later work of the stream wait for an event, as it was recorded until now."""

    def synchronize(self) -> None:
        """Wait until all work submitted so far is done."""


class DeviceGraph(Protocol):
    """Work of several streams that is captured once and launched often."""

    def replay(self) -> None:
        """Submit the captured work to the current stream."""

    def reset(self) -> None:
        """Release its resources; no launch of it may be under way."""


class DeviceCapture(Protocol):
    """A capture that has begun on a stream, and which streams join that wait for its events."""

    def end(self) -> DeviceGraph:
        """Return the graph. All streams that joined must be waited for."""

    def abandon(self) -> None:
        """End the capture, in whatever state it is, and release what it holds."""


class DeviceGraphPool(Protocol):
    """Memory that graphs share, no two of which may run at once."""

    def begin_capture(self, stream: DeviceStream) -> DeviceCapture:
        """Capture what the calling thread submits to a stream, which must be current, and to those that join.

        Raises:
            RuntimeError: where the stream cannot be captured; then nothing is.
        """


class DeviceDriver(Protocol):
    """A kind of device. Methods without a ``device`` are about the current device or stream of the calling thread."""

    def is_available(self) -> bool:
        """Return whether there is such a device."""

    def device_count(self) -> int:
        """Return the number of devices that this process sees."""

    def current_device(self) -> int:
        """Return the index of the calling thread's device."""

    def set_device(self, device: torch.device) -> None:
        """Make a device that of the calling thread."""

    def name(self, device: torch.device) -> str:
        """Return the name of the product, such as ``NVIDIA H100 80GB HBM3``."""

    def processor(self, device: torch.device) -> tuple[object, ...]:
        """Return everything about a device and its toolkit that compiled code depends on."""

    def new_stream(self, device: torch.device) -> DeviceStream:
        """Return another stream of a device."""

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the stream to which the calling thread submits work."""

    def stream_handle(self, device: torch.device) -> int:
        """Return the address of the current stream, for compiled code."""

    def on(self, stream: DeviceStream | None) -> AbstractContextManager[object]:
        """Return a context in which the calling thread submits work to a stream; None changes nothing."""

    def timed_event(self) -> TimedEvent:
        """Return an event that is to be recorded."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work of a device is done."""

    def new_graph_pool(self) -> DeviceGraphPool:
        """Return memory for graphs."""

    def is_capturing(self) -> bool:
        """Return whether work of the current stream is captured at present."""

    def pinned_empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-d tensor in host memory that a device accesses directly, with undefined elements or zeros.

        Raises:
            MemoryError: where the host has too little memory left that may be pinned.
        """

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes that tensors took at once, since the process began or ``reset_peak_bytes``."""

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the bytes that tensors take now."""

    def reset_peak_bytes(self, device: torch.device) -> None:
        """Begin to measure peaks anew."""

    def requested_bytes(self, device: torch.device, moment: str) -> int:
        """Return the bytes asked for, before blocks are rounded up; ``moment`` is ``current`` or ``peak``."""

    def new_generator(self, device: torch.device) -> torch.Generator:
        """Return a generator of random numbers on a device."""

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of a device's generator."""

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        """Set the state of a device's generator."""
