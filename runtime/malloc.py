"""How the C library's allocator treats freed memory on a CPU.

By default glibc hands large freed blocks back to the kernel at once and asks for them anew: every gathered unit and
every temporary of a kernel is then made of fresh pages, which the kernel has to clear one by one. A training step
allocates the same sizes over and over, so keeping them costs nothing at the peak and saves the clearing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Final

# Parameters of mallopt(3), from <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGEST: Final = 2**31 - 1
_DEFAULT_MMAP_BYTES: Final = 128 * 1024


def return_freed_memory() -> bool:
    """Let large blocks go back to the kernel when they are freed, however often they come; for what runs only once.

    glibc would otherwise learn from the first of them to keep the next, between which small ones then settle.
    """
    return _set({_M_MMAP_THRESHOLD: _DEFAULT_MMAP_BYTES, _M_ARENA_MAX: 1})


def keep_freed_memory() -> bool:
    """Let this process reuse the memory that it frees, in one arena for all threads; for training steps.

    False where the C library cannot be told. The setting holds for the whole process.
    """
    return _set({_M_TRIM_THRESHOLD: _LARGEST, _M_MMAP_THRESHOLD: _LARGEST, _M_ARENA_MAX: 1})


def _set(settings: Mapping[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(
        ctypes.CDLL(None), "mallopt", None
    )  # absent from other C libraries than glibc
    if mallopt is None:
        return False
    accepted = {mallopt(name, value) for name, value in settings.items()}
    return accepted == {1}
