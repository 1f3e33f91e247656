"""The inputs of the formulas: the tensors and numbers of a node, and the bytes of their copies."""

from __future__ import annotations

from collections.abc import Sequence

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, NodeArg, Ref, TensorType
from zeroir.workspace.promotion import Operand

Types = Sequence[TensorType | None]
"""The types of a segment's values, by number."""


def tensor_of(arg: NodeArg, types: Types) -> TensorType:
    """Return the type of an argument that is a tensor."""
    assert isinstance(arg, Ref)
    kind = types[arg.index]
    assert kind is not None
    return kind


def result_of(node: Node) -> TensorType:
    """Return the type of a node's only result."""
    (kind,) = node.results
    assert kind is not None
    return kind


def numbers_of(arg: NodeArg) -> tuple[int, ...]:
    """Return the integers of an argument that is an integer or a tuple of them."""
    items = arg if isinstance(arg, tuple) else (arg,)
    return tuple(item for item in items if isinstance(item, int))


def operands_of(args: Sequence[NodeArg], types: Types) -> list[Operand]:
    """Return the types of tensors, and the dtypes of numbers, which torch converts to tensors."""
    operands: list[Operand] = []
    for arg in args:
        match arg:
            case Ref():
                operands.append(tensor_of(arg, types))
            case bool():
                operands.append(DType.BOOL)
            case int():
                operands.append(DType.I64)
            case float():
                operands.append(DType.F64)
            case _:
                pass
    return operands


def converted_bytes(operands: Sequence[Operand], common: DType) -> int:
    """Return the bytes of numbers as tensors, and of copies of all operands that are not of the common dtype."""
    size_bytes = 0
    for operand in operands:
        if isinstance(operand, TensorType):
            own, numel = operand.dtype, operand.numel
        else:
            own, numel = operand, 1
            size_bytes += own.itemsize_bytes
        size_bytes += 0 if own is common else numel * common.itemsize_bytes
    return size_bytes


def is_contiguous(kind: TensorType) -> bool:
    """Return whether a tensor is row-major without gaps."""
    return kind.numel == 0 or all(
        size == 1 or own == wanted
        for size, own, wanted in zip(
            kind.shape, kind.stride, contiguous_stride(kind.shape), strict=True
        )
    )


def dense_bytes(arg: NodeArg, types: Types) -> int:
    """Return the bytes of the copy of a tensor that must be row-major; none if it is."""
    kind = tensor_of(arg, types)
    return 0 if is_contiguous(kind) else kind.size_bytes
