"""The global random generators of this process: Python's, numpy's, and torch's on the CPU and the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.runtime.device.driver import driver

RandomStates = Mapping[str, object]
"""The state of each generator by its name (``python``, ``numpy``, ``torch``, ``cuda``), in types that checkpoints
store."""


def random_states(device: torch.device | None = None) -> RandomStates:
    """Return the present states of the generators on the host, and on ``device`` if it is a GPU."""
    version, words, gaussian = random.getstate()
    states: dict[str, object] = {
        "python": (version, np.array(words, np.uint64), gaussian),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        states["cuda"] = driver().random_state(device)
    return states


def set_random_states(states: RandomStates, device: torch.device | None = None) -> None:
    """Set the generators to states of ``random_states``. A GPU's is set only if there is one now and was one then.

    Raises:
        UserError: where the states are of other generators than those of this process.
    """
    try:
        version, words, gaussian = cast("tuple[int, np.ndarray, float | None]", states["python"])
        random.setstate((version, tuple(int(word) for word in words), gaussian))
        np.random.set_state(cast("tuple[str, np.ndarray, int, int, float]", states["numpy"]))
        torch.set_rng_state(cast("Tensor", states["torch"]))
        if device is not None and device.type == "cuda" and "cuda" in states:
            driver().set_random_state(cast("Tensor", states["cuda"]), device)
    except (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The states of random generators cannot be set here ({error}): they were saved by another version of "
            "Python, numpy or torch."
        ) from error


def seed_host_generators(seed: int) -> None:
    """Seed the generators on the host, for 0 ≤ seed < 2^63; those of GPUs are not changed."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed the generators on the host and on all GPUs, for 0 ≤ seed < 2^63."""
    seed_host_generators(seed)
    torch.manual_seed(seed)


@contextmanager
def host_generators_kept() -> Iterator[None]:
    """Restore the generators on the host after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
