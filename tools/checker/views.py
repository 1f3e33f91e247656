"""The operators that only see a tensor's memory in another way: the strides of their results, and the first element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

Sight = tuple[list[int], list[int], int]
"""Shape, strides, and the number of elements before the first one."""


def seen(
    op: str, shape: Sequence[int], stride: Sequence[int], arguments: Sequence[object]
) -> Sight | None:
    """Return how a view's result lies in the memory of its operand; None for operators that are no such views."""
    rule = _RULES.get(op)
    if rule is None:
        return None
    try:
        return rule(list(shape), list(stride), arguments)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return None


def _same(shape: list[int], stride: list[int], _: Sequence[object]) -> Sight:
    return shape, stride, 0


def _transposed(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    first, second = _integers(arguments) if arguments else (0, len(shape) - 1)
    for of in (shape, stride):
        of[first], of[second] = of[second], of[first]
    return shape, stride, 0


def _turned(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    return _transposed(shape, stride, arguments) if len(shape) == 2 else (shape, stride, 0)


def _permuted(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    order = _integers(_items(arguments[0]))
    return [shape[i] for i in order], [stride[i] for i in order], 0


def _unsqueezed(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    (at,) = _integers(arguments)
    at = at + len(shape) + 1 if at < 0 else at
    return [*shape[:at], 1, *shape[at:]], [*stride[:at], 0, *stride[at:]], 0


def _squeezed(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    chosen = arguments[0] if arguments else ("list", tuple(range(len(shape))))
    dims = _integers([chosen] if isinstance(chosen, int) else _items(chosen))
    gone = {d % max(len(shape), 1) for d in dims}
    kept = [i for i in range(len(shape)) if i not in gone or shape[i] != 1]
    return [shape[i] for i in kept], [stride[i] for i in kept], 0


def _expanded(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    sizes = _integers(_items(arguments[0]))
    more = len(sizes) - len(shape)
    shape, stride = [1] * more + shape, [0] * more + stride
    steps = [0 if old == 1 else step for old, step in zip(shape, stride, strict=True)]
    return [old if new == -1 else new for old, new in zip(shape, sizes, strict=True)], steps, 0


def _selected(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    dim, index = _integers(arguments)
    skipped = (index % shape[dim]) * stride[dim]
    del shape[dim], stride[dim]
    return shape, stride, skipped


def _sliced(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight:
    given = [a if isinstance(a, int) else None for a in arguments]
    axis, start, stop, step = [*given, *(0, None, None, None)[len(given) :]]
    axis = axis or 0
    chosen = range(shape[axis])[slice(start, stop, step)]
    skipped = chosen.start * stride[axis] if shape[axis] else 0
    shape[axis] = len(chosen)
    stride[axis] *= chosen.step
    return shape, stride, skipped


def _reshaped(shape: list[int], stride: list[int], arguments: Sequence[object]) -> Sight | None:
    """The strides of ``view``: each run of dimensions that lie in one piece is divided anew."""
    sizes = _integers(_items(arguments[0]))
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // -math.prod(sizes)
    if math.prod(sizes) != math.prod(shape) or not math.prod(shape):
        return None
    old = [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
    runs: list[tuple[int, int]] = []
    for size, step in old:
        if runs and runs[-1][1] == size * step:
            runs[-1] = (runs[-1][0] * size, step)
        else:
            runs.append((size, step))
    steps: list[int] = []
    left, step = 1, 0
    for size in reversed(sizes):
        if left == 1 and size != 1:
            left, step = runs.pop()
        if left % size:
            return None
        steps.append(step if size != 1 else 0)
        left, step = left // size, step * size
    return sizes, steps[::-1], 0


def _integers(values: Sequence[object]) -> list[int]:
    return [v for v in values if isinstance(v, int)]


def _items(argument: object) -> Sequence[object]:
    match argument:
        case ("list", tuple() as items):
            return items
    raise TypeError


_RULES: Final[Mapping[str, Callable[[list[int], list[int], Sequence[object]], Sight | None]]] = {
    "aten.alias.default": _same,
    "aten.detach.default": _same,
    "aten.t.default": _turned,
    "aten.transpose.int": _transposed,
    "aten.permute.default": _permuted,
    "aten.unsqueeze.default": _unsqueezed,
    "aten.squeeze.default": _squeezed,
    "aten.squeeze.dim": _squeezed,
    "aten.squeeze.dims": _squeezed,
    "aten.expand.default": _expanded,
    "aten.select.int": _selected,
    "aten.slice.Tensor": _sliced,
    "aten.view.default": _reshaped,
    "aten._unsafe_view.default": _reshaped,
}
