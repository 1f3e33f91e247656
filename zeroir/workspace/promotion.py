"""PyTorch's rules of type promotion: the dtype of a computation with operands of several dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import TensorType

Operand = TensorType | DType
"""A tensor, or the dtype of a Python number: bool, i64 or f64."""


def common_dtype(operands: Sequence[Operand]) -> DType:
    """Return the dtype that operands are converted to.

    Tensors with dimensions come first, then those without, then numbers.

    It equals ``torch.result_type``, where floats are of torch's default dtype, f32.
    """
    ranks: tuple[list[DType], list[DType], list[DType]] = ([], [], [])
    for operand in operands:
        if isinstance(operand, TensorType):
            ranks[0 if operand.shape else 1].append(operand.dtype)
        else:
            ranks[2].append(DType.F32 if operand is DType.F64 else operand)
    first, *others = (reduce(promoted, rank) for rank in ranks if rank)
    for lower in others:
        # A lower rank only changes an integer to a float, or a bool to a number.
        if first is DType.BOOL or (lower.is_floating and not first.is_floating):
            first = promoted(first, lower)
    return first


def promoted(a: DType, b: DType) -> DType:
    """Return the smallest dtype that can represent both, as ``torch.promote_types``."""
    if a is b:
        return a
    if a.is_floating != b.is_floating:
        return a if a.is_floating else b
    if {a, b} == {DType.F16, DType.BF16}:
        return DType.F32
    if {a, b} == {DType.U8, DType.I8}:
        return DType.I16
    # Of two integers of one size one is bool, which any other can represent.
    return max(a, b, key=lambda dtype: (dtype is not DType.BOOL, dtype.itemsize_bytes))
