"""The transfer rates of one rank's host: copies to and from the device, copies within memory, and an update.

All ranks of a node measure at the same time, so that they share the memory and links as in training. Each figure is the
median of several rounds over tensors that are larger than the caches, after a round that first touches the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Final

import torch
from torch import Tensor

from zeroir.ir.host_rates import MeasuredHost
from zeroir.runtime.device.driver import driver
from zeroir.runtime.optimizers.adam import adam
from zeroir.runtime.optimizers.operands import Operands

_COPIED_BYTES: Final = 64 << 20
_SMALL_BYTES: Final = 4 << 10
_UPDATED_NUMEL: Final = 4 << 20
_ROUNDS: Final = 7

UPDATE_TRAFFIC_BYTES: Final = 32
"""Bytes that Adam reads and writes per element: the parameter, its gradient and two moments, each read and written."""


def measure_host(device: torch.device, meet: Callable[[], None]) -> MeasuredHost:
    """Measure the transfer rates of this rank. ``meet`` is a barrier; all ranks call this together."""
    rounds = _TimedRounds(device, meet)
    host, other = (_host_tensor(_COPIED_BYTES, device) for _ in range(2))
    near, far = (torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    small = slice(_SMALL_BYTES)

    def down() -> None:
        other.copy_(far, non_blocking=True)

    def up() -> None:
        near.copy_(host, non_blocking=True)

    return MeasuredHost(
        to_device_bytes_per_s=_COPIED_BYTES / rounds.seconds(up),
        to_host_bytes_per_s=_COPIED_BYTES / rounds.seconds(down),
        both_bytes_per_s=2 * _COPIED_BYTES / rounds.seconds(up, down),
        copy_s=rounds.seconds(lambda: near[small].copy_(host[small], non_blocking=True)),
        memory_bytes_per_s=2 * _COPIED_BYTES / rounds.seconds(lambda: other.copy_(host)),
        update_bytes_per_s=UPDATE_TRAFFIC_BYTES * _UPDATED_NUMEL / rounds.seconds(_adam()),
    )


class _TimedRounds:
    """Times concurrent tasks, each on a stream or a thread of its own as in a step."""

    def __init__(self, device: torch.device, meet: Callable[[], None]) -> None:
        self._device = device
        self._meet = meet

    def seconds(self, *tasks: Callable[[], object]) -> float:
        """Return the median seconds until all tasks are done."""
        with ThreadPoolExecutor(len(tasks)) as threads:
            measured = [self._once(threads, tasks) for _ in range(1 + _ROUNDS)]
        return median(measured[1:])

    def _once(self, threads: ThreadPoolExecutor, tasks: Sequence[Callable[[], object]]) -> float:
        self._meet()
        start = time.perf_counter()
        for done in [threads.submit(self._run, task) for task in tasks]:
            done.result()
        return time.perf_counter() - start

    def _run(self, task: Callable[[], object]) -> None:
        if self._device.type != "cuda":
            task()
            return
        stream = driver().new_stream(self._device)
        with driver().on(stream):
            task()
        stream.synchronize()


def _host_tensor(size_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return driver().pinned_empty(size_bytes, torch.uint8, device)
    return torch.zeros(size_bytes, dtype=torch.uint8)


def _adam() -> Callable[[], None]:
    """Return an Adam update of a fixed size, as the host runs it."""
    param, grad, *states = (torch.zeros(_UPDATED_NUMEL) for _ in range(4))
    operands = Operands(
        params=[param],
        grads=[grad],
        states=[[state] for state in states],
        step=torch.ones(1),
        lr=torch.full((1,), 1e-3, dtype=torch.float64),
        hyper=torch.tensor((0.9, 0.999, 1e-8, 0.0), dtype=torch.float64),
        divisor=torch.ones(1),
        skip=None,
    )
    return lambda: adam(operands)
