"""The kernel backends by name."""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

import torch

from zeroir.runtime.kernels.base import Kernels
from zeroir.runtime.kernels.eager import EagerKernels


class KernelBackend(StrEnum):
    """The kernels of segments: torch's operators one by one, or code that Inductor generates."""

    EAGER = "eager"
    INDUCTOR = "inductor"


def open_kernels(backend: KernelBackend, device: torch.device) -> Kernels:
    """Return the kernel backend of that name on a device."""
    match backend:
        case KernelBackend.EAGER:
            return EagerKernels(device)
        case KernelBackend.INDUCTOR:
            from zeroir.runtime.kernels.inductor import InductorKernels

            return InductorKernels(device)
        case _:
            assert_never(backend)
