"""Values that only rank 0 has, broadcast to all ranks of a job in messages of limited size."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeroir.runtime.comm.job import PeerError, exchanged, explained

T = TypeVar("T")
_INTERVAL_S: Final = 20.0
"""Seconds between two messages by which rank 0 says that it still works: far below the timeout of any collective."""
_MESSAGE_BYTES: Final = 4 << 20


class _WorkState(IntEnum):
    """The state of rank 0's work, which it sends to the others."""

    UNDER_WAY = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZeroValues:
    """Sends values of rank 0 to all ranks. Every rank calls each method, in the same order.

    Messages are on ``device`` and use torch's default group. With ``is_alone`` this process holds every rank, and
    nothing is sent.
    """

    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_alone: bool = False
    interval_s: float = _INTERVAL_S

    def make(self, act: Callable[[], T], task: str) -> T | None:
        """Call ``act`` on rank 0 and return its result there; return None on the other ranks when rank 0 has finished.

        ``task`` is a verb phrase for the message of the other ranks. The task may last longer than the timeout of a
        collective: rank 0 sends signs of life.

        Raises:
            PeerError: on the other ranks, where ``act`` raises on rank 0.
        """
        if self.is_alone:
            return act()
        if self.rank != 0:
            self._wait(task)
            return None
        try:
            with self._signs_of_life():
                made = act()
        except Exception:
            self._tell(_WorkState.FAILED)
            raise
        self._tell(_WorkState.DONE)
        return made

    def send(self, message: Tensor) -> None:
        """Overwrite every rank's ``message`` with that of rank 0, which has the same length and dtype."""
        if not self.is_alone:
            with explained():
                dist.broadcast(message, src=0)

    def send_tensors(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Send rank 0's tensors by name to every rank, in messages of limited size; other ranks get them on the CPU.

        ``tensors`` is None on the other ranks.
        """
        if self.is_alone:
            return tensors or {}
        listed = [] if tensors is None else [_described(*item) for item in tensors.items()]
        header = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
        size = torch.tensor([header.numel()], dtype=torch.int64, device=self.device)
        self.send(size)
        message = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if tensors is not None:
            message.copy_(header)
        self.send(message)
        received: dict[str, Tensor] = {}
        for name, dtype, shape in json.loads(bytes(message.tolist())):
            own = None if tensors is None else tensors[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if own is None else own
            elements = tensor.contiguous().view(-1).view(torch.uint8)
            for start in range(0, elements.numel(), _MESSAGE_BYTES):
                part = elements[start : start + _MESSAGE_BYTES]
                message = part.to(self.device)
                self.send(message)
                if own is None:
                    part.copy_(message)
            received[name] = tensor
        return received

    def gather(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks, stacked in rank order, on the CPU."""
        return own.cpu() if self.is_alone else exchanged(own.flatten(), self.device)

    def _wait(self, task: str) -> None:
        state = torch.zeros(1, dtype=torch.uint8, device=self.device)
        while int(state) == _WorkState.UNDER_WAY:
            self.send(state)
        if int(state) == _WorkState.FAILED:
            raise PeerError(f"Rank 0 could not {task}.")

    def _tell(self, state: _WorkState) -> None:
        self.send(torch.tensor([state], dtype=torch.uint8, device=self.device))

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Send signs of life from rank 0 while the block runs, however long it takes."""
        is_over = threading.Event()

        def send_signs() -> None:
            # If another rank is lost, this one learns of it with the next message after its work.
            with contextlib.suppress(PeerError):
                while not is_over.wait(self.interval_s):
                    self._tell(_WorkState.UNDER_WAY)

        thread = threading.Thread(target=send_signs, name="zeroir-signs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _described(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


ALONE: Final = RankZeroValues(is_alone=True)
