"""Collectives of devices that are not there: those of one communicator meet in the order of their submission."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from tests.support.simulated_cuda.driver import SimulatedCuda
from tests.support.simulated_cuda.queues import Item, Queue
from tests.support.simulated_cuda.tensors import DeviceTensor
from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import combine


@dataclass(frozen=True, slots=True)
class _Part:
    """One collective as one rank submits it; ``what`` has to be the same on all ranks."""

    what: tuple[object, ...]
    source: Tensor
    target: Tensor


@dataclass(eq=False)
class _Meeting(Item):
    """What a rank launches together, at the front of its communicator's own stream."""

    communicator: Communicator
    member: int
    parts: list[_Part] = field(default_factory=list)

    def is_ready(self) -> bool:
        return all(
            queue.items and isinstance(queue.items[0], _Meeting)
            for queue in self.communicator.queues
        )

    def run(self) -> None:
        self.communicator.meet()

    def __str__(self) -> str:
        names = [str(part.what[0]) for part in self.parts]
        return f"{', '.join(names)} of {self.communicator.name}"


class Communicator:
    """The ranks that communicate, each on a device, with a stream of its own there, as NCCL has one."""

    def __init__(
        self, driver: SimulatedCuda, name: str, members: Sequence[int], *, rounds: bool = False
    ) -> None:
        self.driver, self.name, self.members = driver, name, tuple(members)
        self.rounds = rounds
        """Whether sums are rounded at each rank, as NCCL's are, or once."""
        self.queues = [driver.world.new_queue(device) for device in members]
        self.met = 0

    def of(self, rank: int) -> RankTransport:
        """Return the collectives of one of the ranks."""
        return RankTransport(self, self.members.index(rank))

    def meet(self) -> None:
        """Carry out what stands in front of all streams."""
        meetings = [cast("_Meeting", queue.items.popleft()) for queue in self.queues]
        asked = [[part.what for part in meeting.parts] for meeting in meetings]
        if any(own != asked[0] for own in asked):
            raise RuntimeError(f"ranks meet in different collectives of {self.name}: {asked}")
        for parts in zip(*(meeting.parts for meeting in meetings), strict=True):
            _carry_out(parts, rounds=self.rounds)
        self.met += 1


class RankTransport:
    """Collectives as a rank submits them to its current stream."""

    def __init__(self, communicator: Communicator, member: int) -> None:
        self._communicator, self._member = communicator, member
        self._thread = threading.local()

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        self._launch("all_gather", target, source)

    def reduce_scatter(self, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        self._launch("reduce_scatter", target, source, reduction)

    def all_reduce(self, values: Tensor, reduction: Reduction) -> None:
        self._launch("all_reduce", values, values, reduction)

    def broadcast(self, values: Tensor, root: int) -> None:
        self._launch("broadcast", values, values, root)

    @contextmanager
    def one_launch(self) -> Iterator[None]:
        parts: list[_Part] = []
        self._thread.parts = parts
        try:
            yield
        finally:
            del self._thread.parts
        self._submit(parts)

    def close(self) -> None:
        pass

    def _launch(self, name: str, target: Tensor, source: Tensor, *more: object) -> None:
        assert isinstance(target, DeviceTensor)
        assert isinstance(source, DeviceTensor)
        what = (name, source.numel(), target.numel(), source.dtype, target.dtype, *more)
        part = _Part(what, source.elements, target.elements)
        parts = getattr(self._thread, "parts", None)
        if parts is None:
            self._submit([part])
        else:
            parts.append(part)

    def _submit(self, parts: list[_Part]) -> None:
        communicator = self._communicator
        driver, own = communicator.driver, communicator.queues[self._member]
        device = torch.device("cuda", communicator.members[self._member])
        current = cast("Queue", driver.current_stream(device))
        own.wait_event(current.record_event())
        meeting = _Meeting(communicator, self._member, parts)
        if len(communicator.members) == 1:
            own.submit(lambda: _alone(parts))
        elif own.capture is not None:
            raise RuntimeError("collectives of several simulated devices cannot be captured")
        else:
            own.place(meeting)
        current.wait_event(own.record_event())


def _alone(parts: Sequence[_Part]) -> None:
    for part in parts:
        _carry_out([part])


def _carry_out(parts: Sequence[_Part], *, rounds: bool = False) -> None:
    name, *rest = parts[0].what
    sources = [part.source for part in parts]
    match name:
        case "all_gather":
            gathered = torch.cat([source.reshape(-1) for source in sources])
            results = [gathered for _ in parts]
        case "broadcast":
            results = [sources[cast("int", rest[-1])].clone() for _ in parts]
        case "all_reduce":
            results = [_combined(sources, rest[-1], parts[0].target, rounds=rounds)] * len(parts)
        case _:
            slices = [source.chunk(len(parts)) for source in sources]
            results = [
                _combined([own[index] for own in slices], rest[-1], part.target, rounds=rounds)
                for index, part in enumerate(parts)
            ]
    for part, result in zip(parts, results, strict=True):
        part.target.copy_(result.view(part.target.shape))


def _combined(
    sources: Sequence[Tensor], reduction: object, like: Tensor, *, rounds: bool
) -> Tensor:
    if rounds and reduction is Reduction.SUM:
        return functools.reduce(torch.add, sources)
    result = torch.empty_like(like)
    combine([source.clone() for source in sources], cast("Reduction", reduction), result)
    return result
