"""Eager replicas whose code asks for the ranks and gathers tensors of all of them, in one process.

Each replica runs in a thread of its own, and only one of them at a time: where its code gathers, it hands over to the
next one, and goes on when all have come as far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.runtime.memory.tensors import accumulation_dtype
from zeroir.torch_ops._torch_distributed import ranks_seen

T = TypeVar("T")


class ReplicaRanks:
    """The ranks of ``size`` replicas; each thread is one of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._own = threading.local()
        self._turn = threading.Condition()
        self._is_taken = False
        self._arrived: dict[int, Tensor] = {}
        self._exchanged: list[Tensor] = []
        self._round = 0
        self._ended = 0
        self._is_broken = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return the rank of the replica that this thread runs."""
        rank: int = self._own.rank
        return rank

    def gathered(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, ``[ranks, *x.shape]``; its gradient is summed over all ranks."""
        gathered: Tensor = _Gathered.apply(self, x)  # type: ignore[no-untyped-call]
        return gathered

    def run(self, replicas: Sequence[Callable[[], T]]) -> list[T]:
        """Return what these functions return, one for each rank.

        Raises:
            UserError: if not all of them gather as often.
        """
        self._ended, self._is_broken = 0, False
        with ranks_seen(self), ThreadPoolExecutor(self._size) as threads:
            pending = [
                threads.submit(self._run_one, rank, replica)
                for rank, replica in enumerate(replicas)
            ]
            errors = [each.exception() for each in pending]
        # That which another replica did not wait for comes first.
        for error in sorted((e for e in errors if e), key=lambda e: isinstance(e, _LeftAloneError)):
            raise error
        return [each.result() for each in pending]

    def _run_one(self, rank: int, replica: Callable[[], T]) -> T:
        self._own.rank = rank
        with self._my_turn():
            try:
                return replica()
            except BaseException:
                self._is_broken = True
                raise
            finally:
                self._ended += 1

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(lambda: not self._is_taken)
            self._is_taken = True
        try:
            yield
        finally:
            with self._turn:
                self._is_taken = False
                self._turn.notify_all()

    def exchanged(self, x: Tensor) -> list[Tensor]:
        """Return what all replicas call this with, in the order of the ranks."""
        with self._turn:
            number = self._round
            self._arrived[self.rank()] = x
            if len(self._arrived) == self._size:
                self._exchanged = [self._arrived[rank] for rank in range(self._size)]
                self._arrived = {}
                self._round += 1
                self._turn.notify_all()
                return self._exchanged
            self._is_taken = False
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._is_taken and self._may_go_on(number))
            self._is_taken = True
            if self._round == number:
                raise _LeftAloneError(
                    "Not all replicas gather as often: a program gathers on all ranks, or on none."
                )
            return self._exchanged

    def _may_go_on(self, number: int) -> bool:
        return self._round > number or self._is_broken or self._ended > 0


class _LeftAloneError(UserError):
    """A replica waits for others that have ended."""


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: ReplicaRanks, x: Tensor) -> Tensor:  # noqa: ANN401 - torch's
        ctx.ranks = ranks
        return torch.stack(ranks.exchanged(x.detach()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:  # noqa: ANN401 - torch's
        (grad,) = grads
        ranks = cast("ReplicaRanks", ctx.ranks)
        parts = [whole[ranks.rank()] for whole in ranks.exchanged(grad)]
        # In the order of the ranks, rounded once, as a program adds.
        total = parts[0].to(accumulation_dtype(grad.dtype))
        for part in parts[1:]:
            total = total + part
        return None, total.to(grad.dtype)
