"""Rounds in which every rank does its share and rank 0 decides, with one outcome on all ranks.

An error on any rank ends the round on all of them: no rank continues alone, and none waits for one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroir.errors import ZeroirError
from zeroir.runtime.comm.job import PeerError, explained

SHORTEST_TIMEOUT: Final = timedelta(hours=1)
"""The shortest timeout of a round: a rank may write or read for long before it answers. A dead rank is noticed at once.
"""

_DONE: Final = b"\0"
_FAILED: Final = b"\1"


def nothing(_: Sequence[bytes]) -> bytes:
    """Return no bytes: the decision of a round in which ranks only learn whether all of them succeeded."""
    return b""


class Rounds(Protocol):
    """Collective rounds of the processes of a job."""

    def hold(
        self,
        task: str,
        /,
        share: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], bytes] = nothing,
    ) -> bytes:
        """Call ``share`` on every rank, then ``decide`` on rank 0 with all results in rank order; return its result.

        ``task`` is a verb phrase that tells the other ranks what a rank could not do.

        Raises:
            PeerError: where another rank failed.
            Exception: what ``share`` or ``decide`` raised on this rank.
        """

    def close(self) -> None:
        """Release the resources of the rounds; no round may follow."""


class RoundsAlone:
    """The rounds of a job with one process."""

    def hold(
        self,
        _: str,
        /,
        share: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], bytes] = nothing,
    ) -> bytes:
        return decide([share()])

    def close(self) -> None:
        """Do nothing: one process holds no resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooRounds:
    """Rounds over a gloo group of all ranks, which must not be used for anything else meanwhile."""

    group: ProcessGroup

    def hold(
        self,
        task: str,
        /,
        share: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], bytes] = nothing,
    ) -> bytes:
        failure: Exception | None = None
        try:
            own = _DONE + share()
        except Exception as error:  # noqa: BLE001 - it is raised again after the other ranks know
            failure, own = error, _FAILED + _told(error)
        with explained():
            answers = self._gather(own)
        outcome: bytes | None = None
        if answers is not None:
            failed = next((r for r, answer in enumerate(answers) if answer[:1] == _FAILED), None)
            if failed is not None:
                outcome = _FAILED + failed.to_bytes(4, "little") + answers[failed][1:]
            else:
                try:
                    outcome = _DONE + decide([answer[1:] for answer in answers])
                except Exception as error:  # noqa: BLE001 - as above
                    failure, outcome = error, _FAILED + bytes(4) + _told(error)
        with explained():
            outcome = self._broadcast(outcome)
        if failure is not None:
            raise failure
        if outcome[:1] == _FAILED:
            rank = int.from_bytes(outcome[1:5], "little")
            raise PeerError(f"Rank {rank} could not {task}: {outcome[5:].decode()}")
        return outcome[1:]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _gather(self, own: bytes) -> list[bytes] | None:
        """Return every rank's bytes on rank 0, and None on the others."""
        size = torch.tensor([len(own)], dtype=torch.int64)
        sizes = [torch.empty_like(size) for _ in range(self.group.size())]
        dist.all_gather(sizes, size, group=self.group)
        if self.group.rank() != 0:
            dist.send(_tensor(own), dst=0, group=self.group)
            return None
        answers = [own]
        for rank in range(1, self.group.size()):
            message = torch.empty(int(sizes[rank]), dtype=torch.uint8)
            dist.recv(message, src=rank, group=self.group)
            answers.append(message.numpy().tobytes())
        return answers

    def _broadcast(self, message: bytes | None) -> bytes:
        size = torch.tensor([0 if message is None else len(message)], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self.group)
        data = (
            _tensor(message) if message is not None else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(data, src=0, group=self.group)
        return data.numpy().tobytes()


def open_rounds(timeout: timedelta) -> GlooRounds:
    """Create the group of the rounds; all ranks call this together."""
    group = dist.new_group(backend="gloo", timeout=max(timeout, SHORTEST_TIMEOUT))
    assert isinstance(group, ProcessGroup)
    return GlooRounds(group=group)


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _told(error: Exception) -> bytes:
    text = str(error) if isinstance(error, ZeroirError) else f"{type(error).__name__}: {error}"
    return text.encode()
