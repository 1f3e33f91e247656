"""Host memory that a CUDA device accesses directly: pinned, and not larger than requested.

Torch's own pinned allocator rounds every request up to a power of two, so the states of an optimizer could take twice
their bytes. Large tensors are mapped page by page here and registered with CUDA instead.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

LARGE_BYTES: Final = 1 << 20
"""From this size on a tensor has its own pages; below it, rounding up costs little."""

_SUCCESS: Final = 0
_PORTABLE: Final = 1
"""The flag of cudaHostRegister that pins memory for every device."""


def pinned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a pinned 1-d tensor with undefined elements, or zeros.

    Raises:
        MemoryError: where the host has too little memory left that may be pinned.
    """
    size_bytes = numel * dtype.itemsize
    if size_bytes < LARGE_BYTES:
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    pages = mmap.mmap(-1, size_bytes)
    memory = (ctypes.c_char * size_bytes).from_buffer(pages)
    address = ctypes.addressof(memory)
    find_runtime: Callable[[], ModuleType] = torch.cuda.cudart
    runtime = find_runtime()
    code = int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE))
    if code != _SUCCESS:
        raise MemoryError(f"CUDA cannot pin {size_bytes:,} bytes of host memory (error {code})")
    # This runs before the pages are unmapped: the array is freed first, because it refers to them.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype)
