"""The functions of ``rounding`` as compiled code for CPU tensors: each makes one pass over the elements.

The results are bitwise equal to those of torch's operators: all arithmetic is products, quotients and comparisons, each
rounded separately. So it does not matter which ranks have a compiler. The code is in ``rounding.cpp``; it divides the
blocks among the calling thread's threads as torch's operators do.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from zeroir.errors import InternalError, KernelWarning
from zeroir.ir import ops
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.program import Program
from zeroir.runtime.eight_bit.rounding import code_map
from zeroir.runtime.kernels.compile_pool import HostShare
from zeroir.runtime.kernels.cpp_library import NoLibraryError, load_cpp_library

_SOURCE: Final = Path(__file__).with_name("rounding.cpp")
_CPU: Final = torch.device("cpu")


class CompiledRounding:
    """The compiled code, loaded into this process.

    Raises:
        NoLibraryError: where there is no compiler, or the code does not compile or load.
    """

    def __init__(self) -> None:
        library = load_cpp_library(_SOURCE)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._widen = library.zeroir_widen
        self._widen.argtypes = [pointer, number, *[pointer] * 4]
        self._narrow = library.zeroir_narrow
        self._narrow.argtypes = [pointer, number, *[pointer] * 5]
        try:
            # Symbols of a library are also looked up in the libraries that it is linked with.
            parallel_for = ctypes.CDLL(torch._C.__file__).torch_parallel_for
        except (OSError, AttributeError) as error:
            raise NoLibraryError(str(error)) from error
        self._parallel_for = ctypes.cast(parallel_for, pointer)

    def state(self, codes: Tensor, absmax: Tensor, *, signed: bool) -> CompiledState:
        """Return the codes and scales of a state, in a form that widens and narrows them.

        They are 1-d on the CPU: ``codes`` u8 of whole blocks and ``absmax`` f32 with an element for each block.
        """
        blocks = absmax.numel()
        _require(codes, torch.uint8, blocks * BLOCK_NUMEL)
        _require(absmax, torch.float32, blocks)
        return CompiledState(
            codes=codes,
            absmax=absmax,
            values=code_map(_CPU, signed=signed).values.data_ptr(),
            steps=code_steps(signed=signed).data_ptr(),
            widen_blocks=partial(self._widen, self._parallel_for),
            narrow_blocks=partial(self._narrow, self._parallel_for),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledState:
    """Widens and narrows blocks of one state, as ``rounding`` does, without additional memory.

    ``values`` and ``steps`` are the addresses of tables that exist as long as the process.
    """

    codes: Tensor
    absmax: Tensor
    values: int
    steps: int
    widen_blocks: Callable[..., int]
    narrow_blocks: Callable[..., int]

    def widen(self, blocks: slice, out: Tensor) -> None:
        """Write the FP32 values of blocks to ``out``, 1-d, as ``rounding.widen`` does."""
        codes, absmax, count = self._place(blocks, out)
        _check(self.widen_blocks(count, codes, absmax, self.values, out.data_ptr()))

    def narrow(self, blocks: slice, values: Tensor, is_skipped: Tensor | None = None) -> None:
        """Round ``values``, 1-d, to blocks, as ``rounding.narrow`` does, but keep ``values`` unchanged."""
        codes, absmax, count = self._place(blocks, values)
        skip = None if is_skipped is None else is_skipped.data_ptr()
        _check(self.narrow_blocks(count, values.data_ptr(), self.steps, codes, absmax, skip))

    def _place(self, blocks: slice, wide: Tensor) -> tuple[int, int, int]:
        """Return the addresses of the blocks' codes and scales, and the number of blocks."""
        start, stop, _ = blocks.indices(self.absmax.numel())
        _require(wide, torch.float32, (stop - start) * BLOCK_NUMEL)
        codes = self.codes.data_ptr() + start * BLOCK_NUMEL
        return codes, self.absmax.data_ptr() + start * self.absmax.itemsize, stop - start


@cache
def code_steps(*, signed: bool) -> Tensor:
    """Return the table of the compiled code, i32[65536]: it gives the code of a number by one look-up and one addition.

    The upper half of the number's bits selects an element, to which the lower half is added; the code is the upper half
    of the sum. The element's upper half is the smaller of the two possible codes, and its lower half is chosen so that
    the sum carries exactly where the other code applies.
    """
    tables = code_map(_CPU, signed=signed)
    codes, bounds = tables.codes.numpy().astype(np.uint32), tables.bounds.numpy()
    halves = np.arange(codes.size, dtype=np.uint32)
    bits = bounds.view(np.uint32)
    has_bound = np.isfinite(bounds)
    if (bits[has_bound] >> 16 != halves[has_bound]).any():
        raise InternalError("a bound between two codes is not among the numbers that it divides")
    lower = bits & 0xFFFF
    # For negative numbers the lower halves are counted from the other end.
    lacks = np.where(halves >> 15, lower, 0xFFFF - lower)
    return torch.from_numpy((codes << 16 | np.where(has_bound, lacks, 0)).view(np.int32))


def open_rounding(program: Program, device: torch.device) -> CompiledRounding | None:
    """Return the compiled code where the CPU updates states of 8 bits; None elsewhere, and where there is no compiler.

    Without a compiler the first rank of the job warns.
    """
    updates = [op for op in program.ops() if isinstance(op, ops.OptimizerStep) and op.scales]
    is_on_cpu = device.type == "cpu" or any(
        op.stream in program.streams_off_device for op in updates
    )
    if not updates or not is_on_cpu:
        return None
    try:
        return CompiledRounding()
    except NoLibraryError as error:
        if HostShare.from_environment().rank == 0:
            warnings.warn(
                f"torch's operators round the states of 8 bits, several times as slowly as compiled code: {error}",
                KernelWarning,
                stacklevel=2,
            )
        return None


def _require(tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    """Raise InternalError for a tensor that the compiled code does not support."""
    is_plain = tensor.is_cpu and tensor.is_contiguous()
    if not is_plain or tensor.dtype is not dtype or tensor.numel() != numel:
        raise InternalError(
            f"compiled code rounds whole contiguous blocks on the CPU: {numel} elements of {dtype}, not "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )


def _check(code: int) -> None:
    if code != 0:
        raise InternalError(f"compiled rounding of states failed with code {code}")
