"""The driver of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroir.runtime.device.cuda_driver import CudaDriver
from zeroir.runtime.device.interface import DeviceDriver

_driver: list[DeviceDriver] = [CudaDriver()]


def driver() -> DeviceDriver:
    """Return the driver of this process, which is CUDA's unless ``use_driver`` says otherwise."""
    return _driver[-1]


@contextmanager
def use_driver(other: DeviceDriver) -> Iterator[None]:
    """Run a block, in all threads of this process, with another driver."""
    _driver.append(other)
    try:
        yield
    finally:
        _driver.remove(other)


def new_generator(device: torch.device) -> torch.Generator:
    """Return a generator of random numbers for tensors of any device, the CPU too."""
    return torch.Generator() if device.type == "cpu" else driver().new_generator(device)
