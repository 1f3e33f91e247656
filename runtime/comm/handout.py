"""What rank 0 alone has, handed out to all ranks of a job in messages of bounded size."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeroir.runtime.comm.job import PeerError, exchanged, explained

T = TypeVar("T")
_INTERVAL_S: Final = 20.0
"""How often rank 0 says that it is still at it: well below the timeout of any collective."""


class Handout(Protocol):
    """Who has the values, and how the other ranks come by them. Every rank calls each method alike."""

    @property
    def device(self) -> torch.device:
        """Where messages must be."""

    def make(self, act: Callable[[], T]) -> T | None:
        """What ``act`` returns, on rank 0; None on the other ranks, once rank 0 has it.

        Raises:
            PeerError: on the other ranks, where ``act`` raises on rank 0.
        """

    def send(self, message: Tensor) -> None:
        """Overwrite every rank's message with that of rank 0, of the same length and dtype."""

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all ranks below each other, in rank order, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoHandout:
    """Every rank that there is lives in this process."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def make(self, act: Callable[[], T]) -> T | None:
        """See ``Handout.make``."""
        return act()

    def send(self, message: Tensor) -> None:
        """See ``Handout.send``."""

    def gather(self, own: Tensor) -> Tensor:
        """See ``Handout.gather``."""
        return own.cpu()


class _News(IntEnum):
    """What rank 0 says of what it makes."""

    UNDER_WAY = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandout:
    """Among the ranks of torch's default group, which carries messages on ``device``."""

    rank: int
    device: torch.device
    interval_s: float = _INTERVAL_S

    def make(self, act: Callable[[], T]) -> T | None:
        """See ``Handout.make``. It may take longer than a collective waits: rank 0 gives signs of life meanwhile."""
        if self.rank != 0:
            self._wait()
            return None
        try:
            with self._signs_of_life():
                made = act()
        except Exception:
            self._tell(_News.FAILED)
            raise
        self._tell(_News.DONE)
        return made

    def send(self, message: Tensor) -> None:
        """See ``Handout.send``."""
        with explained():
            dist.broadcast(message, src=0)

    def gather(self, own: Tensor) -> Tensor:
        """See ``Handout.gather``."""
        return exchanged(own.flatten(), self.device)

    def _wait(self) -> None:
        news = torch.zeros(1, dtype=torch.uint8, device=self.device)
        while int(news) == _News.UNDER_WAY:
            self.send(news)
        if int(news) == _News.FAILED:
            raise PeerError("Rank 0 could not build the model.")

    def _tell(self, news: _News) -> None:
        self.send(torch.tensor([news], dtype=torch.uint8, device=self.device))

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """A body of rank 0 that takes as long as it takes."""
        is_over = threading.Event()

        def give() -> None:
            # Where a rank is lost this one learns of it when it has come to its end.
            with contextlib.suppress(PeerError):
                while not is_over.wait(self.interval_s):
                    self._tell(_News.UNDER_WAY)

        thread = threading.Thread(target=give, name="zeroir-signs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
