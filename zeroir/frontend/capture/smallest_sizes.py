"""Dims whose ranges are narrowed, because code lets sizes decide what is computed.

A trace makes the decisions of its own sizes. So a dim is narrowed to the values around the example's for which they are
the same, with a note.

Code often treats a size of 1 apart and computes the same: it expands a tensor only where there are several rows. So the
model is traced again where the dim is 1. If that computes the same as the first trace says for 1, 1 is not left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Final, NamedTuple

from zeroir.errors import Remainders, ShapesError
from zeroir.frontend._torch_sizes import Assumption, DimEnv, DimRange, SplitError
from zeroir.frontend.capture.captured_graph import CapturedGraph
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import NodeArg, Ref, TensorType
from zeroir.ir.segments.size_numbers import SizeNumber
from zeroir.ir.sizes import Dim, Size

Traces = tuple[CapturedGraph | None, ...]
"""The graphs of a step and of an evaluation."""


class NarrowedDim(NamedTuple):
    """A dim with a smaller range than the user gives it, and why: the lines that decide, and what they decide.

    ``remainders`` are those that may decide, if any.
    """

    dim: Dim
    reason: str
    remainders: Remainders | None = None

    def note(self, on_other_sizes: str) -> str:
        """Return sentences that say so, the last of which is on batches of other sizes."""
        dim = self.dim
        return f"{self.reason}: the dim {dim.name} is from {dim.minimum} to {dim.maximum}. {on_other_sizes}"


def narrowed_dims(
    env: DimEnv,
    traces: Traces,
    trace: Callable[[Mapping[Dim, int]], Traces],
    place: str,
) -> dict[Dim, NarrowedDim]:
    """Return the dims for whose whole ranges the traces are not right, narrowed around the values of the example.

    ``trace`` returns the graphs where some dims have these values; ``traces`` are those where none has.

    Raises:
        ShapesError: where the example, or no other value of a dim, is in such a range.
    """
    try:
        ranges = env.ranges()
    except SplitError as error:
        raise _refusal(error.assumption, place) from None
    kept: list[Dim] = []
    for dim in [dim for dim, (least, _) in ranges.items() if (dim.minimum, least) == (1, 2)]:
        corners = [
            dict.fromkeys((dim, *others), 1)
            for count in range(len(kept) + 1)
            for others in combinations(kept, count)
        ]
        if all(_is_alike(env, traces, trace, values, ranges) for values in corners):
            kept.append(dim)
    narrowed: dict[Dim, NarrowedDim] = {}
    for dim, (least_of_trace, most) in ranges.items():
        least = 1 if dim in kept else least_of_trace
        new = Dim(name=dim.name, minimum=least, maximum=most)
        if new == dim:
            continue
        below = [DimRange(dim.minimum, most)] if least > dim.minimum else []
        above = [DimRange(least_of_trace, dim.maximum)] if most < dim.maximum else []
        failing = (env.first_failing({**ranges, dim: wider}) for wider in (*below, *above))
        reasons = list(dict.fromkeys(reason for reason in failing if reason is not None))
        if not least <= env.examples[dim] <= most or least == most:
            raise _refusal(reasons[0], place)
        lines = list(dict.fromkeys(each.line or place for each in reasons))
        narrowed[dim] = NarrowedDim(
            new,
            f"{' and '.join(lines)} {'lets' if len(lines) == 1 else 'let'} the sizes of the batch decide, and the "
            f"program is right only where {' and '.join(each.text for each in reasons)}",
            next(filter(None, (each.remainders(place) for each in reasons)), None),
        )
    return narrowed


@contextmanager
def assumptions_first(env: DimEnv | None, place: str) -> Iterator[None]:
    """Within the block, where a size is refused, name the assumption that leaves a dim one value, if there is one.

    Code that turns a size into a plain number, as ``int`` does, computes other sizes from it.

    Raises:
        ShapesError: where a size is refused.
    """
    try:
        yield
    except ShapesError:
        if env is not None:
            assumption = _decisive(env)
            if assumption is not None:
                raise _refusal(assumption, place) from None
        raise


def _decisive(env: DimEnv) -> Assumption | None:
    """Return an assumption that holds for no range of dims, or for one value of a dim only; None without one."""
    try:
        ranges = env.ranges()
    except SplitError as error:
        return error.assumption
    for dim, (least, most) in ranges.items():
        if least == most:
            return env.first_failing({**ranges, dim: DimRange.of(dim)})
    return None


def _refusal(assumption: Assumption, place: str) -> ShapesError:
    return ShapesError(
        f"{assumption.line or place} lets the sizes of the batch decide: the program would be right only where "
        f"{assumption.text}. Narrow the dims to that, or express it without a decision.",
        assumption.dims,
        assumption.remainders(place),
        assumption.module,
    )


def _is_alike(
    env: DimEnv,
    traces: Traces,
    trace: Callable[[Mapping[Dim, int]], Traces],
    values: Mapping[Dim, int],
    ranges: Mapping[Dim, DimRange],
) -> bool:
    """Return whether traces where dims have these values, and others the values of their ranges, compute the same."""
    with env.other_trace():
        try:
            others = trace(values)
        except (Exception, SystemExit):  # noqa: BLE001 - a model may raise any error at a size of 1
            return False
        if env.first_failing(ranges) is not None:
            return False
    numbers: dict[_Computation, int] = {}
    return [_results(joint, values, numbers) for joint in traces] == [
        _results(joint, {}, numbers) for joint in others
    ]


_Computation = tuple[object, ...]


def _results(
    joint: CapturedGraph | None, values: Mapping[Dim, int], numbers: dict[_Computation, int]
) -> object:
    """Return the numbers of a graph's results where dims have these values; equal ones have equal elements in order."""
    if joint is None:
        return None
    number_of: dict[int, int] = {}
    types = [None if kind is None else _type(kind, values) for kind in joint.types]

    def number(*computation: object) -> int:
        return numbers.setdefault(computation, len(numbers))

    def comparable(arg: NodeArg) -> object:
        match arg:
            case Ref():
                return number_of[arg.index], types[arg.index]
            case tuple():
                return tuple(comparable(item) for item in arg)
            case Size() | SizeNumber():
                return comparable_number(arg.replaced(values))
            case _:
                return comparable_number(arg)

    def comparable_number(arg: object) -> object:
        # 1, 1.0 and True are equal, and not the same argument.
        return arg if isinstance(arg, Size | SizeNumber) else (type(arg).__name__, arg)

    for each in joint.inputs:
        of_input = (each.kind, each.name if each.data is None else "", each.data)
        number_of[each.value] = number(of_input, types[each.value])
    for node in joint.nodes:
        operand = next(node.refs(), None)
        if operand is not None and node.op in _KEEP_ORDER and len(node.results) == 1:
            before, after = types[operand], types[node.results[0]]
            if before is not None and after is not None and before.has_elements_of(after):
                number_of[node.results[0]] = number_of[operand]
                continue
        args = tuple(comparable(arg) for arg in node.args)
        kwargs = tuple((name, comparable(arg)) for name, arg in node.kwargs)
        for position, result in enumerate(node.results):
            number_of[result] = number(node.op, args, kwargs, types[result], position)
    return [
        [("loss", number_of[joint.loss])],
        *(
            [(name, number_of[value], types[value]) for name, value in pairs]
            for pairs in (joint.gradients, joint.mutations, joint.outputs)
        ),
    ]


class _Type(NamedTuple):
    """A tensor's dtype and shape; its layout decides no value."""

    dtype: DType
    shape: tuple[int, ...]

    def has_elements_of(self, other: _Type) -> bool:
        """Return whether both have equally many elements of one dtype."""
        return self.dtype == other.dtype and math.prod(self.shape) == math.prod(other.shape)


def _type(kind: TensorType, values: Mapping[Dim, int]) -> _Type:
    shape = (size.replaced(values) if isinstance(size, Size) else size for size in kind.shape)
    return _Type(kind.dtype, tuple(shape))


_KEEP_ORDER: Final = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "view.default",
            "_unsafe_view.default",
            "alias.default",
            "clone.default",
            "_to_copy.default",
        ),
        *("expand.default", "slice.Tensor", "select.int", "sum.dim_IntList"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default"),
    )
)
"""Operators whose result has the operand's elements, in order, where it has equally many of the same dtype.

A sum over dimensions of size 1 turns -0.0 into 0.0, which compare as equal.
"""
