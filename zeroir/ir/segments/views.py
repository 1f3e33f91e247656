"""The ops that return views of a value's storage, and the elements of these views: offset, shape and strides.

Op and arguments alone determine a view. So the types that a program declares for views are always checked, and two
views of one storage are the same value exactly where offset, shape and strides are equal. The rules are those of
torch's operators of the same names.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from zeroir.ir.buffers import contiguous_stride, span_numel
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, NodeArg, Ref, TensorType
from zeroir.ir.sizes import quotient


class Part(NamedTuple):
    """The elements of a view: a tensor of ``kind`` that starts ``offset`` elements after its source does."""

    offset: int
    kind: TensorType


class ViewError(ValueError):
    """Torch would reject the call; the text says why."""


def is_view(op: str) -> bool:
    """Return whether the op's results always share the storage of its first argument."""
    return op in _RULES


def shares_storage(op: str) -> bool:
    """Return whether the op computes nothing: a view, or the same bytes as elements of another dtype."""
    return is_view(op) or op == BITCAST


def parts(node: Node, source: TensorType) -> tuple[Part, ...] | None:
    """Return the part of ``source``, the first argument, for each result of a view; None for an op that is not a view.

    Raises:
        ViewError: if the op does not accept these arguments.
    """
    rule = _RULES.get(node.op)
    if rule is None:
        return None
    given = dict(node.kwargs)
    if node.op == "aten.expand.default":
        given.pop("implicit", None)
    try:
        bound = _signature(rule).bind(source, *node.args[1:], **given)
    except TypeError as error:
        raise ViewError(f"takes other arguments: {error}") from error
    return tuple(rule(*bound.args, **bound.kwargs))


_signature: Final = cache(inspect.signature)


def mistyped(node: Node, types: Sequence[TensorType | None]) -> str | None:
    """Return how a view's declared types differ from those that its op produces, as the end of a sentence.

    None if equal.

    ``types`` are those of the segment's values; those that the node uses must exist.
    """
    if not shares_storage(node.op):
        return None
    source = node.args[0] if node.args else None
    kind = types[source.index] if isinstance(source, Ref) else None
    if kind is None:
        return "looks at no value"
    try:
        if node.op == BITCAST:
            expected: tuple[TensorType, ...] = (_bitcast(kind, *node.args[1:]),)
        else:
            expected = tuple(part.kind for part in parts(node, kind) or ())
    except ViewError as error:
        return str(error)
    if len(node.results) != len(expected):
        return f"has {len(node.results)} results where {len(expected)} are made"
    for declared, made in zip(node.results, expected, strict=True):
        if declared is None or not is_same_type(declared, made):
            return f"declares {_spell(declared)} where {_spell(made)} is made"
    return None


def is_same_type(first: TensorType, second: TensorType) -> bool:
    """Return whether two types have the same dtype and shape and equivalent strides."""
    return (first.dtype, first.shape) == (second.dtype, second.shape) and is_same_stride(
        first.shape, first.stride, second.stride
    )


def is_same_stride(shape: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether strides address the same elements: those of dimensions of one element do not matter."""
    if first == second:
        return True
    if len(first) != len(shape) or len(second) != len(shape):
        return False
    return 0 in shape or all(
        x == y for size, x, y in zip(shape, first, second, strict=True) if size > 1
    )


def view_stride(kind: TensorType, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a tensor viewed in another shape, as in ``torch.Tensor.view``.

    None if it is impossible.
    """
    if kind.numel == 0:
        return kind.stride if kind.shape == shape else contiguous_stride(shape)
    if not kind.shape:
        return (1,) * len(shape)
    stride = [0] * len(shape)
    at = len(shape) - 1
    # Dimensions that are contiguous in memory form one run, which the new dimensions must divide evenly.
    base, run, used = kind.stride[-1], 1, 1
    for d in range(len(kind.shape) - 1, -1, -1):
        run *= kind.shape[d]
        is_end = d == 0 or (kind.shape[d - 1] != 1 and kind.stride[d - 1] != run * base)
        if not is_end:
            continue
        while at >= 0 and (used < run or shape[at] == 1):
            stride[at] = used * base
            used *= shape[at]
            at -= 1
        if used != run:
            return None
        if d > 0:
            base, run, used = kind.stride[d - 1], 1, 1
    return tuple(stride) if at < 0 else None


# -------------------------------------------------------------------------------------------------------- arguments


def _int(arg: NodeArg) -> int:
    if isinstance(arg, bool) or not isinstance(arg, int):
        raise ViewError(f"takes {arg!r} where a number belongs")
    return arg


def _ints(arg: NodeArg) -> tuple[int, ...]:
    if not isinstance(arg, tuple):
        raise ViewError(f"takes {arg!r} where numbers belong")
    return tuple(_int(item) for item in arg)


def _dim(arg: NodeArg, rank: int) -> int:
    """Return a dimension, counted from the end where it is negative; a scalar counts as having a dimension 0."""
    dim, count = _int(arg), max(rank, 1)
    if not -count <= dim < count:
        raise ViewError(f"takes dimension {dim} of a tensor that has {rank}")
    return dim % count


def _divided(size: int, divisor: int) -> int:
    """Return a size divided by a positive number and rounded down, as a size where that is one."""
    rounded = quotient(size, divisor)
    return size // divisor if rounded is None else rounded


def _of(kind: TensorType, shape: Sequence[int], stride: Sequence[int]) -> TensorType:
    return TensorType(dtype=kind.dtype, shape=tuple(shape), stride=tuple(stride))


def _spell(kind: TensorType | None) -> str:
    if kind is None:
        return "nothing"
    strides = "" if kind.stride == contiguous_stride(kind.shape) else f" with strides {kind.stride}"
    return f"{kind.dtype}{list(kind.shape)}{strides}"


# ------------------------------------------------------------------------------------------------------------ rules


def _alias(x: TensorType) -> list[Part]:
    return [Part(0, x)]


def _expand(x: TensorType, size: NodeArg) -> list[Part]:
    shape = _ints(size)
    added = len(shape) - len(x.shape)
    if added < 0:
        raise ViewError(f"expands {len(x.shape)} dimensions to {len(shape)}")
    sizes, strides = [1] * added + list(x.shape), [0] * added + list(x.stride)
    for dim, wanted in enumerate(shape):
        if (wanted == -1 and dim >= added) or wanted == sizes[dim]:
            continue
        if sizes[dim] != 1 or wanted < 0:
            raise ViewError(f"expands dimension {dim} of {sizes[dim]} elements to {wanted}")
        sizes[dim], strides[dim] = wanted, 0
    return [Part(0, _of(x, sizes, strides))]


def _permute(x: TensorType, dims: NodeArg) -> list[Part]:
    order = [_dim(dim, len(x.shape)) for dim in _ints(dims)]
    if sorted(order) != list(range(len(x.shape))):
        raise ViewError(f"takes {list(_ints(dims))} as an order of {len(x.shape)} dimensions")
    return [Part(0, _of(x, [x.shape[d] for d in order], [x.stride[d] for d in order]))]


def _transpose(x: TensorType, dim0: NodeArg, dim1: NodeArg) -> list[Part]:
    first, second = (_dim(dim, len(x.shape)) for dim in (dim0, dim1))
    order = list(range(len(x.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permute(x, tuple(order))


def _t(x: TensorType) -> list[Part]:
    if len(x.shape) > 2:
        raise ViewError(f"transposes {len(x.shape)} dimensions")
    return _permute(x, tuple(reversed(range(len(x.shape)))))


def _squeeze(x: TensorType) -> list[Part]:
    return _without(x, [dim for dim, size in enumerate(x.shape) if size == 1])


def _squeeze_dim(x: TensorType, dim: NodeArg) -> list[Part]:
    return _squeeze_dims(x, (_int(dim),))


def _squeeze_dims(x: TensorType, dim: NodeArg) -> list[Part]:
    named = [_dim(number, len(x.shape)) for number in _ints(dim)]
    if len(set(named)) < len(named):
        raise ViewError(f"names a dimension twice: {list(_ints(dim))}")
    return _without(x, [d for d, size in enumerate(x.shape) if d in named and size == 1])


def _without(x: TensorType, dims: Sequence[int], offset: int = 0) -> list[Part]:
    """Return the tensor without these dimensions."""
    kept = [d for d in range(len(x.shape)) if d not in dims]
    return [Part(offset, _of(x, [x.shape[d] for d in kept], [x.stride[d] for d in kept]))]


def _unsqueeze(x: TensorType, dim: NodeArg) -> list[Part]:
    at = _dim(dim, len(x.shape) + 1)
    step = x.shape[at] * x.stride[at] if at < len(x.shape) else 1
    shape = (*x.shape[:at], 1, *x.shape[at:])
    return [Part(0, _of(x, shape, (*x.stride[:at], step, *x.stride[at:])))]


def _view(x: TensorType, size: NodeArg) -> list[Part]:
    shape = list(_ints(size))
    if shape.count(-1) == 1:
        others = math.prod(wanted for wanted in shape if wanted != -1)
        if others <= 0 or x.numel % others:
            raise ViewError(f"sees {x.numel} elements as {shape}")
        shape[shape.index(-1)] = x.numel // others
    if any(wanted < 0 for wanted in shape) or math.prod(shape) != x.numel:
        raise ViewError(f"sees {x.numel} elements as {shape}")
    stride = view_stride(x, tuple(shape))
    if stride is None:
        raise ViewError(f"cannot see {_spell(x)} as {shape} without a copy")
    return [Part(0, _of(x, shape, stride))]


def _unfold(x: TensorType, dimension: NodeArg, size: NodeArg, step: NodeArg) -> list[Part]:
    dim, length, distance = _dim(dimension, len(x.shape)), _int(size), _int(step)
    extent, stride = (x.shape[dim], x.stride[dim]) if x.shape else (1, 1)
    if not 0 <= length <= extent or distance < 1:
        raise ViewError(f"takes windows of {length} every {distance} of {extent} elements")
    if not x.shape:
        return [Part(0, _of(x, (length,), (1,)))]
    shape, strides = list(x.shape), list(x.stride)
    shape[dim], strides[dim] = _divided(extent - length, distance) + 1, distance * stride
    return [Part(0, _of(x, (*shape, length), (*strides, stride)))]


def _diagonal(
    x: TensorType, offset: NodeArg = 0, dim1: NodeArg = 0, dim2: NodeArg = 1
) -> list[Part]:
    rows, columns, shift = _dim(dim1, len(x.shape)), _dim(dim2, len(x.shape)), _int(offset)
    if rows == columns or len(x.shape) < 2:
        raise ViewError(f"takes the diagonal of dimensions {rows} and {columns}")
    down, right = max(-shift, 0), max(shift, 0)
    length = max(min(x.shape[rows] - down, x.shape[columns] - right), 0)
    start = down * x.stride[rows] + right * x.stride[columns] if length else 0
    ((_, rest),) = _without(x, [rows, columns])
    step = x.stride[rows] + x.stride[columns]
    return [Part(start, _of(x, (*rest.shape, length), (*rest.stride, step)))]


def _select(x: TensorType, dim: NodeArg, index: NodeArg) -> list[Part]:
    at, which = _dim(dim, len(x.shape)), _int(index)
    extent = x.shape[at] if x.shape else 0
    if not -extent <= which < extent:
        raise ViewError(f"selects element {which} of {extent}")
    return _without(x, [at], (which + extent if which < 0 else which) * x.stride[at])


def _slice(
    x: TensorType,
    dim: NodeArg = 0,
    start: NodeArg = None,
    end: NodeArg = None,
    step: NodeArg = 1,
) -> list[Part]:
    at, every = _dim(dim, len(x.shape)), _int(step)
    if not x.shape or every < 1:
        raise ViewError(f"slices {len(x.shape)} dimensions with step {every}")
    extent = x.shape[at]
    first, last = (
        min(max(bound + extent if bound < 0 else bound, 0), extent)
        for bound in (0 if start is None else _int(start), extent if end is None else _int(end))
    )
    length = max(-_divided(first - last, every), 0)
    shape, stride = list(x.shape), list(x.stride)
    shape[at], stride[at] = length, x.stride[at] * every
    return [Part(first * x.stride[at], _of(x, shape, stride))]


def _split(x: TensorType, split_size: NodeArg, dim: NodeArg = 0) -> list[Part]:
    at, size = _dim(dim, len(x.shape)), _int(split_size)
    extent = x.shape[at] if x.shape else 0
    if not x.shape or size < 0 or (size == 0 and extent > 0):
        raise ViewError(f"splits {extent} elements by {size}")
    if extent == 0:
        return [Part(0, x)]
    whole = -(-extent.__index__() // size.__index__()) - 1
    return _split_with_sizes(x, (*[size] * whole, extent - whole * size), at)


def _split_with_sizes(x: TensorType, split_sizes: NodeArg, dim: NodeArg = 0) -> list[Part]:
    at, sizes = _dim(dim, len(x.shape)), _ints(split_sizes)
    if not x.shape or any(size < 0 for size in sizes) or sum(sizes) != x.shape[at]:
        raise ViewError(f"splits dimension {at} of {list(x.shape)} into {list(sizes)}")
    parts: list[Part] = []
    for start, size in zip(itertools.accumulate((0, *sizes)), sizes, strict=False):
        shape = (*x.shape[:at], size, *x.shape[at + 1 :])
        parts.append(Part(start * x.stride[at], _of(x, shape, x.stride)))
    return parts


def _unbind(x: TensorType, dim: NodeArg = 0) -> list[Part]:
    at = _dim(dim, len(x.shape))
    if not x.shape:
        raise ViewError("unbinds a tensor without dimensions")
    return [part for index in range(x.shape[at]) for part in _select(x, at, index)]


def _strided(x: TensorType, size: NodeArg, stride: NodeArg, offset: NodeArg) -> list[Part]:
    shape, steps, start = _ints(size), _ints(stride), _int(offset)
    if len(shape) != len(steps) or min((*shape, *steps, start), default=0) < 0:
        raise ViewError(f"sees {list(shape)} elements at strides {list(steps)} from {start} on")
    end, extent = start + span_numel(shape, steps), span_numel(x.shape, x.stride)
    if 0 not in shape and end > extent:
        raise ViewError(f"sees {end} elements of {extent}")
    return [Part(start, _of(x, shape, steps))]


_RULES: Final[Mapping[str, Callable[..., list[Part]]]] = {
    "aten._unsafe_view.default": _view,
    "aten.alias.default": _alias,
    "aten.detach.default": _alias,
    "aten.diagonal.default": _diagonal,
    "aten.expand.default": _expand,
    "aten.lift_fresh.default": _alias,
    "aten.permute.default": _permute,
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze_dim,
    "aten.squeeze.dims": _squeeze_dims,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
    "aten.unbind.int": _unbind,
    "aten.unfold.default": _unfold,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.view.default": _view,
    "zeroir.strided.default": _strided,
}

BITCAST: Final = "aten.view.dtype"
"""It also shares the storage, but with elements of another dtype: its result is a value of its own."""


def _bitcast(x: TensorType, dtype: NodeArg = None) -> TensorType:
    if not isinstance(dtype, DType):
        raise ViewError(f"takes {dtype!r} where a dtype belongs")
    old, new = x.dtype.itemsize_bytes, dtype.itemsize_bytes
    if old == new:
        return TensorType(dtype=dtype, shape=x.shape, stride=x.stride)
    if not x.shape or x.stride[-1] != 1:
        raise ViewError(f"sees {_spell(x)} as elements of {new} bytes")
    if old > new:
        ratio = old // new
        strides = [step * ratio for step in x.stride[:-1]]
        length = x.shape[-1] * ratio
    else:
        ratio = new // old
        if x.shape[-1] % ratio or any(step % ratio for step in x.stride[:-1]):
            raise ViewError(f"sees {_spell(x)} as elements of {new} bytes")
        strides = [step // ratio for step in x.stride[:-1]]
        length = x.shape[-1] // ratio
    return TensorType(dtype=dtype, shape=(*x.shape[:-1], length), stride=(*strides, 1))
