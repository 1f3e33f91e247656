"""How the C library's allocator treats freed memory on a CPU.

By default glibc hands large freed blocks back to the kernel at once and asks for them anew: every gathered unit and
every temporary of a kernel is then made of fresh pages, which the kernel has to clear one by one. A training step
allocates the same sizes over and over, so keeping them costs nothing at the peak and saves the clearing.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

# Parameters of mallopt(3), from <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGEST: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process reuse the memory it frees, in one arena for all threads; False where that cannot be asked for.

    The setting holds for the whole process and cannot be taken back.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries than glibc
    if mallopt is None:
        return False
    settings = {_M_TRIM_THRESHOLD: _LARGEST, _M_MMAP_THRESHOLD: _LARGEST, _M_ARENA_MAX: 1}
    accepted = {mallopt(name, value) for name, value in settings.items()}
    return accepted == {1}
