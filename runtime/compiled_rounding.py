"""The functions of ``eight_bit_states`` as compiled code for tensors on the CPU: one pass over the elements for each.

The bits are those of torch's operators: all arithmetic is products, quotients and comparisons, and each rounds by
itself. So it is of no consequence which rank has a compiler. The code is ``eight_bit_rounding.cpp``; it divides the
blocks among the calling thread's threads as torch's operators do.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from zeroir.errors import InternalError, KernelWarning
from zeroir.ir import ops
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.program import Program
from zeroir.runtime.eight_bit_states import code_map
from zeroir.runtime.kernels.compile_pool import HostShare
from zeroir.runtime.kernels.cpp_library import NoLibraryError, load_cpp_library

_SOURCE: Final = Path(__file__).with_name("eight_bit_rounding.cpp")
_CPU: Final = torch.device("cpu")


class CompiledRounding:
    """Widens and narrows states on the CPU, with the arguments of ``eight_bit_states`` but for the scratch memory.

    Tensors are contiguous. It takes no memory.

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
            # The symbols of a library are also looked up in the libraries that it is linked with.
            parallel_for = ctypes.CDLL(torch._C.__file__).torch_parallel_for
        except (OSError, AttributeError) as error:
            raise NoLibraryError(str(error)) from error
        self._parallel_for = ctypes.cast(parallel_for, pointer)

    def widen(self, codes: Tensor, absmax: Tensor, out: Tensor, *, signed: bool) -> None:
        """See ``eight_bit_states.widen``."""
        values = code_map(_CPU, signed=signed).values
        blocks = _blocks(codes, absmax, out)
        _check(
            self._widen(self._parallel_for, blocks, *map(_address, (codes, absmax, values, out)))
        )

    def narrow(
        self,
        values: Tensor,
        codes: Tensor,
        absmax: Tensor,
        *,
        signed: bool,
        is_skipped: Tensor | None = None,
    ) -> None:
        """See ``eight_bit_states.narrow``; ``values`` stay as they are."""
        blocks = _blocks(codes, absmax, values)
        tensors = map(_address, (values, code_steps(signed=signed), codes, absmax))
        skip = None if is_skipped is None else _address(is_skipped)
        _check(self._narrow(self._parallel_for, blocks, *tensors, skip))


@cache
def code_steps(*, signed: bool) -> Tensor:
    """The table of the compiled code, i32[65536]: the code of a number from its bits, by one look-up and one sum.

    The upper half of the bits chooses an element, to which the lower half is added; the code is the upper half of the
    sum. The element is the smaller of the half's two codes, and below it what the lower half lacks to the other one.
    """
    tables = code_map(_CPU, signed=signed)
    codes, bounds = tables.codes.numpy().astype(np.uint32), tables.bounds.numpy()
    halves = np.arange(codes.size, dtype=np.uint32)
    bits = bounds.view(np.uint32)
    has_bound = np.isfinite(bounds)
    if (bits[has_bound] >> 16 != halves[has_bound]).any():
        raise InternalError("a bound between two codes is not among the numbers that it divides")
    lower = bits & 0xFFFF
    # The lower halves of negative numbers are counted from the other end.
    lacks = np.where(halves >> 15, lower, 0xFFFF - lower)
    return torch.from_numpy((codes << 16 | np.where(has_bound, lacks, 0)).view(np.int32))


def open_rounding(program: Program, device: torch.device) -> CompiledRounding | None:
    """The compiled code where the CPU updates states of 8 bits; None elsewhere, and where there is no compiler.

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


def _blocks(codes: Tensor, absmax: Tensor, values: Tensor) -> int:
    """The number of blocks of tensors that the compiled code may be called with."""
    tensors = (codes, absmax, values)
    numel = absmax.numel() * BLOCK_NUMEL
    dtypes = (torch.uint8, torch.float32, torch.float32)
    if (
        codes.numel() != numel
        or values.numel() != numel
        or any(t.device != _CPU or not t.is_contiguous() for t in tensors)
        or tuple(t.dtype for t in tensors) != dtypes
    ):
        raise InternalError(
            f"compiled code rounds whole contiguous blocks on the CPU, not {numel} elements in {codes.shape}"
        )
    return absmax.numel()


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _check(code: int) -> None:
    if code != 0:
        raise InternalError(f"compiled rounding of states failed with code {code}")
