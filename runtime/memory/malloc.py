"""Settings of the C library's allocator for freed memory on a CPU.

By default glibc returns large freed blocks to the kernel at once. The next block of that size then consists of fresh
pages, which the kernel has to clear. A training step allocates the same sizes again and again, so keeping freed memory
does not raise the peak and saves the clearing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Final

_IS_LINUX: Final = sys.platform.startswith("linux")

# Parameters of mallopt(3), from <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGEST: Final = 2**31 - 1
_DEFAULT_MMAP_BYTES: Final = 128 * 1024


def return_freed_memory() -> bool:
    """Return large blocks to the kernel whenever they are freed, for code that runs only once.

    Otherwise glibc keeps large blocks after it has freed the first, and small blocks then fragment them.
    """
    return _set({_M_MMAP_THRESHOLD: _DEFAULT_MMAP_BYTES, _M_ARENA_MAX: 1})


def keep_freed_memory() -> bool:
    """Reuse freed memory, in one arena for all threads, for training steps.

    Return False where the C library has no such setting. The setting applies to the whole process.
    """
    return _set({_M_TRIM_THRESHOLD: _LARGEST, _M_MMAP_THRESHOLD: _LARGEST, _M_ARENA_MAX: 1})


def trim_freed_memory() -> None:
    """Return what is free at this moment to the kernel, also blocks that were allocated before other settings.

    Nothing happens where the C library cannot do so.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _IS_LINUX else None
    if trim is not None:
        trim(0)


def _set(settings: Mapping[int, int]) -> bool:
    if not _IS_LINUX:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is None:
        return False
    accepted = {mallopt(name, value) for name, value in settings.items()}
    return accepted == {1}
