"""Streams and events of a program on a CUDA device: each maps to one of CUDA's own.

Streams that the host or a disk executes keep a worker thread; a device stream that must wait for one of them holds
back the issuing thread, because CUDA cannot wait for a thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

import torch

from zeroir.ir.effects import effects
from zeroir.ir.mesh import COMPUTE, HOST, Executor
from zeroir.ir.ops import Op, Wait
from zeroir.ir.program import Program
from zeroir.runtime.reuse import Reuse
from zeroir.runtime.streams import Execute, ThreadStreams


class CudaStreams:
    """Streams of one process on one CUDA device; ``reuse`` hears of everything that is issued."""

    def __init__(
        self, program: Program, device: torch.device, execute: Execute, reuse: Reuse
    ) -> None:
        self._execute = execute
        self._device = device
        self._reuse = reuse
        self._streams: dict[str, torch.cuda.Stream] = {}
        on_host: set[str] = set()
        used = {COMPUTE, *(effects(op).stream for op in program.ops())}
        for stream in program.streams:
            match stream.executor:
                case Executor.DEVICE if stream.name == COMPUTE:
                    # The user's own work, and the copies of a batch, are on the current stream.
                    self._streams[stream.name] = torch.cuda.current_stream(device)
                case Executor.DEVICE:
                    if stream.name in used:
                        self._streams[stream.name] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                case Executor.HOST | Executor.DISK:
                    on_host.add(stream.name)
                case _:
                    assert_never(stream.executor)
        self._host_streams = frozenset(on_host)
        self._threads = ThreadStreams(self._on_host, inline=())
        self._events: dict[str, torch.cuda.Event] = {}
        self._last_signal: dict[str, str | None] = {}
        self._crossing = frozenset(p.event for s in program.sections for p in s.exit.pending)
        self._before_crossing: dict[str, torch.cuda.Event] = {}

    def stream(self, name: str) -> torch.cuda.Stream:
        """The CUDA stream of that name."""
        return self._streams[name]

    def submit(self, op: Op) -> None:
        """See ``Streams.submit``."""
        match op:
            case Wait():
                self._wait(op)
            case _ if op.stream in self._host_streams:
                # Another section may have used the name for an event of the device.
                self._events.pop(op.event or "", None)
                self._threads.submit(op)
            case _:
                self._on_device(op)
        self._reuse.issue(op)

    def join(self, pending: Collection[str]) -> None:
        """See ``Streams.join``. The host itself does not wait for the device."""
        self._threads.join([name for name in pending if name not in self._events])
        signals: dict[str, torch.cuda.Event] = {}
        for name, stream in self._streams.items():
            if self._last_signal.get(name) not in pending:
                signals[name] = stream.record_event()
            elif name in self._before_crossing:
                signals[name] = self._before_crossing[name]
        for name, stream in self._streams.items():
            for other, signal in signals.items():
                if other != name:
                    stream.wait_event(signal)
        self._reuse.join(pending)

    def signal(self, event: str) -> None:
        """See ``Streams.signal``."""
        self._events[event] = self._streams[COMPUTE].record_event()

    def close(self) -> None:
        """See ``Streams.close``."""
        self._threads.close()

    def _on_device(self, op: Op) -> None:
        assert not isinstance(op, Wait)
        stream = self._streams[op.stream]
        if op.event in self._crossing and self._last_signal.get(op.stream) not in self._crossing:
            # A joint leaves out the op that crosses it, but not what its stream does before.
            self._before_crossing[op.stream] = stream.record_event()
        with torch.cuda.stream(stream):
            self._execute(op)
        self._last_signal[op.stream] = op.event
        if op.event is not None:
            self._events[op.event] = stream.record_event()

    def _wait(self, op: Wait) -> None:
        event = self._events.get(op.waited)
        if event is None:  # signalled by the host or the disk
            on = op.on if op.on in self._host_streams else HOST
            self._threads.submit(Wait(waited=op.waited, on=on))
        elif op.on == HOST:
            event.synchronize()
        elif op.on in self._host_streams:
            # The worker waits for the device in its turn; the issuing thread goes on.
            self._threads.call(op.on, event.synchronize)
        else:
            self._streams[op.on].wait_event(event)

    def _on_host(self, op: Op) -> None:
        torch.cuda.set_device(self._device)
        self._execute(op)
