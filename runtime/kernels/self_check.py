"""Compares each distinct kernel once with the plain form of its segment, before training.

A planned kernel reads and writes views of the memory that all buffers share, computes results in their destinations,
and omits copies. The plain form calls the segment's operators one by one on separate tensors. On the same random
numbers both must give the same results, except for a few roundings: at another address an operator may add in another
order.

Code of modules that runs as it is may have effects, so its calls are not compared. The memory of the first ones on real
batches is measured (``opaque_memory``).

The check runs before the buffers are initialised. It fills the arguments and destinations of a kernel, and zeroes the
persistent buffers afterwards. In addition to the buffers it needs the memory of one segment at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import View
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Binding, bindings
from zeroir.ir.segments.segment import Node, Ref, Segment, TensorType
from zeroir.ir.segments.views import BITCAST, is_view, shares_storage
from zeroir.runtime.device.driver import new_generator
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.calls import operator, resolver
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.kernels.differences import difference, is_beyond_noise, tolerance
from zeroir.runtime.kernels.opaque_memory import measure_next_calls
from zeroir.runtime.kernels.plain_form import OTHER_KERNELS, plain_results, separate, span
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.opaque import words_of
from zeroir.workspace.scratch.allowance import GROUPED_PRODUCTS

_SCALES: Final = (1.0, 2.0**-8)
"""Magnitudes of random numbers, tried in turn: repeated sums of the larger ones may leave no significant digit."""

_REFUSALS: Final = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions by which operators reject their arguments; those of libraries and models are written in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckResult:
    """The number of distinct kernels compared, and by segment the reason for each that could not be."""

    compared: int
    skipped: Mapping[str, str]


def check_kernels(local_ranks: LocalRanks, kernels: KernelBackend) -> SelfCheckResult:
    """Compare the kernels of the local ranks, whose buffers are not initialised yet, in the memory of the first rank.

    Raises:
        UserError: where the results of a kernel differ from the plain form's.
    """
    memory = local_ranks.memories[0]
    compared, skipped = 0, dict[str, str]()
    measured: set[tuple[str, str]] = set()
    with torch.no_grad():
        for op in _distinct(local_ranks, memory):
            segment = local_ranks.program.segment_by_name[op.segment]
            measure_next_calls(segment, memory.device, measured)
            reason = _compare(op, local_ranks, memory, kernels)
            if reason is None:
                compared += 1
            else:
                skipped[op.segment] = reason
    return SelfCheckResult(compared=compared, skipped=skipped)


def _distinct(local_ranks: LocalRanks, memory: RankMemory) -> Iterator[ops.Compute]:
    """Yield one call of each kernel: the one whose arguments have the largest offsets in memory."""
    # A digest ignores the workspaces that nodes declare, which are checked as well.
    kernels_by_name = {
        segment.name: (segment.digest(), tuple(node.workspace_bytes for node in segment.nodes))
        for segment in local_ranks.program.segments
    }
    calls: dict[tuple[Hashable, tuple[Binding | None, ...]], list[ops.Compute]] = {}
    for op in local_ranks.program.ops():
        if isinstance(op, ops.Compute):
            calls.setdefault((kernels_by_name[op.segment], tuple(bindings(op))), []).append(op)

    def smallest_offset(op: ops.Compute) -> int:
        return min((memory.offset_numel(argument.view) for argument in op.arguments), default=0)

    for kernel_calls in calls.values():
        yield max(kernel_calls, key=smallest_offset)


def _compare(
    op: ops.Compute, local_ranks: LocalRanks, memory: RankMemory, kernels: KernelBackend
) -> str | None:
    """Return why the call cannot be compared; None where kernel and plain form agree."""
    if words_of([local_ranks.program.segment_by_name[op.segment]]):
        return "code of a module runs in it as it is, which may have effects"
    call = _CheckedCall(
        op=op,
        segment=local_ranks.program.segment_by_name[op.segment],
        arguments=[memory.view(argument.view) for argument in op.arguments],
        destinations=[None if d is None else memory.view(d.view) for d in op.destinations],
    )
    views = [a.view for a in op.arguments] + [d.view for d in op.destinations if d is not None]
    reason: str | None = None
    try:
        for scale in _SCALES:
            reason = call.compare(local_ranks.kernel(op), scale, kernels)
            if reason is None:
                break
    except (torch.OutOfMemoryError, MemoryError):
        return "there is not enough memory beside the buffers"
    finally:
        memory.clear({view.region.buffer for view in views})
    return reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedCall:
    """A call of a segment, with its arguments and destinations in the memory of all buffers."""

    op: ops.Compute
    segment: Segment
    arguments: Sequence[Tensor]
    destinations: Sequence[Tensor | None]

    def compare(self, kernel: Kernel, scale: float, kernels: KernelBackend) -> str | None:
        """Return why numbers of this magnitude show nothing; None where kernel and plain form agree.

        Raises:
            UserError: where they differ.
        """
        self._fill(scale)
        try:
            expected = self._expected()
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            return f"its operators refuse random numbers: {(str(error) or repr(error)).splitlines()[0]}"
        kernel(self.arguments, self.destinations)
        gaps: dict[int, str] = {}
        for output, (wanted, result) in enumerate(zip(expected, self.destinations, strict=True)):
            if wanted is not None and result is not None:
                gap = difference(result, wanted, _allowed(self.segment, result, kernels))
                if gap is not None:
                    gaps[output] = gap
        if not gaps:
            return None
        results = {output: _present(self.destinations[output]).clone() for output in gaps}
        self._fill(scale)
        for argument in self.arguments:
            _disturb(argument)
        disturbed = self._expected()
        for output, gap in gaps.items():
            wanted, noisy = _present(expected[output]), _present(disturbed[output])
            if is_beyond_noise(results[output], wanted, noisy):
                raise UserError(
                    f"The kernel of segment @{self.op.segment}, as called for {self.op.unit}, computes something else "
                    f"than the segment's operators: result {output} of shape {list(wanted.shape)} {gap}. Nothing was "
                    "trained. Report this with the program; --no-self-check trains in spite of it."
                )
        return "rounding its arguments changes its results as much"

    def _fill(self, scale: float) -> None:
        """Fill the tensors with positive numbers, where most functions are defined, and with valid indices."""
        limits, group_rows = _index_limits(self.segment), _group_rows(self.segment)
        # Destinations come first, because one that overlaps an argument must contain the argument's numbers.
        for tensor in self.destinations:
            if tensor is not None:
                _randomise(tensor, scale, 1)
        for number, tensor in enumerate(self.arguments):
            _randomise(tensor, scale, limits.get(number, 1))
            if number in group_rows:
                _fill_group_ends(tensor, group_rows[number])
        for floats in _floats_in_bytes(self.segment, self.arguments):
            _fill_uniformly(floats, scale)

    def _expected(self) -> list[Tensor | None]:
        """Return the contents of the destinations according to the plain form."""
        device = next((x.device for x in self.destinations if x is not None), torch.device("cpu"))
        copies = [separate(argument) for argument in self.arguments]
        results = plain_results(self.segment, copies, device)
        # Several results may have one destination, such as the gradient of a tied parameter.
        held: dict[View, Tensor] = {}
        for result, destination, target in zip(
            results, self.op.destinations, self.destinations, strict=True
        ):
            if destination is None or target is None:
                continue
            if destination.mode is Mode.WRITE:
                held[destination.view] = result
            else:
                held[destination.view] = held.get(destination.view, target) + result
        return [None if d is None else held[d.view] for d in self.op.destinations]


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


# ---------------------------------------------------------------------------------------------------- random numbers


def _disturb(tensor: Tensor) -> None:
    """Change every floating-point number by one or two roundings."""
    memory = span(tensor)
    # Another code of 8 bits would be no rounding.
    if memory.dtype.is_floating_point and memory.itemsize > 1:
        generator = new_generator(memory.device).manual_seed(memory.numel())
        change = torch.empty_like(memory, dtype=torch.float32)
        eps = torch.finfo(memory.dtype).eps
        change.uniform_(1 - 2 * eps, 1 + 2 * eps, generator=generator)
        memory.mul_(change.to(memory.dtype))


def _randomise(tensor: Tensor, scale: float, limit: int) -> None:
    memory = span(tensor)
    numel = memory.numel()
    generator = new_generator(memory.device).manual_seed(numel + int(memory.storage_offset()))
    if memory.dtype == torch.float8_e4m3fn:
        _fill_uniformly(memory, scale)
    elif memory.dtype.is_floating_point:
        memory.uniform_(0.5 * scale, 1.5 * scale, generator=generator)
    elif memory.dtype == torch.bool:
        memory.copy_(torch.rand(numel, device=memory.device, generator=generator) < 0.5)
    else:
        memory.random_(limit, generator=generator)


def _fill_uniformly(tensor: Tensor, scale: float) -> None:
    """Fill a tensor of any layout with floats, also of 8 bits, which torch does not draw."""
    generator = new_generator(tensor.device).manual_seed(tensor.numel())
    wide = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    tensor.copy_(wide.uniform_(0.5 * scale, 1.5 * scale, generator=generator))


def _floats_in_bytes(segment: Segment, arguments: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the parts of integer arguments that the segment sees as floats, such as scales of quantised weights."""
    values: list[Tensor | None] = [
        None if argument.dtype.is_floating_point else argument for argument in arguments
    ]
    for node in segment.nodes:
        source = node.args[0] if node.args else None
        value = values[source.index] if isinstance(source, Ref) else None
        if value is None or not shares_storage(node.op):
            values += [None] * len(node.results)
            continue
        args = [resolver(arg, value.device)(values) for arg in node.args]
        kwargs = {name: resolver(arg, value.device)(values) for name, arg in node.kwargs}
        made = operator(node.op)(*args, **kwargs)
        seen = [made] if isinstance(made, Tensor) else list(made)
        if node.op == BITCAST and seen[0].dtype.is_floating_point:
            yield seen[0]
        values += seen


_LOOKUPS: Final[Mapping[str, tuple[int, int, int | None]]] = {
    "aten.embedding.default": (0, 1, 0),
    "aten.embedding_dense_backward.default": (2, 1, None),
    "aten.gather.default": (0, 2, None),
    "aten.index_select.default": (0, 2, None),
    "aten.nll_loss_forward.default": (0, 1, -1),
    "aten.nll_loss_backward.default": (1, 2, -1),
}
"""Ops that look up indices: the positions of the table and of the indices among the arguments, and the dimension.

Where the dimension is None, it is the argument after the tensor, or the first argument is the number of rows."""


def _index_limits(segment: Segment) -> dict[int, int]:
    """Return the exclusive upper limit of each input that is only used as indices, or as codes of 8 bits.

    For other integers only 0 is safe.
    """
    types = segment.types()
    sources = {number: number for number in range(len(segment.inputs))}
    limits: dict[int, int] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        results = range(first, first + len(node.results))
        first = results.stop
        refs = [ref.index for ref in node.refs()]
        if _keeps_integers(node) and refs[0] in sources:
            sources.update(dict.fromkeys(results, sources[refs[0]]))
            continue
        index = node.args[_LOOKUPS[node.op][1]] if node.op in _LOOKUPS else None
        for ref in refs:
            if ref in sources:
                is_looked_up = isinstance(index, Ref) and index.index == ref
                limit = _rows(node, types) if is_looked_up else _codes(node, types)
                limits[sources[ref]] = min(limits.get(sources[ref], limit), limit)
    return limits


def _keeps_integers(node: Node) -> bool:
    """Return whether the results are a part of the first argument, or the same bytes or numbers as integers."""
    if node.op in (BITCAST, "aten._to_copy.default"):
        return not any(kind is None or kind.dtype.is_floating for kind in node.results)
    return is_view(node.op)


def _codes(node: Node, types: Sequence[TensorType | None]) -> int:
    """Return the number of integers from 0 on that are safe where no index is looked up."""
    (first, *_) = node.refs()
    kind = types[first.index]
    is_code = kind is not None and kind.dtype in (DType.U8, DType.I8)
    return _CODES if is_code and node.op in (BITCAST, "aten._to_copy.default") else 1


_CODES: Final = 128
"""Codes that both signed and unsigned bytes have."""


def _group_rows(segment: Segment) -> dict[int, int]:
    """Return the number of rows in all groups, for each input that contains the ends of groups."""
    types = segment.types()
    rows: dict[int, int] = {}
    for node in segment.nodes:
        if node.op not in GROUPED_PRODUCTS:
            continue
        ends = dict(node.kwargs).get("offs", node.args[2] if len(node.args) > 2 else None)
        if isinstance(ends, Ref) and ends.index < len(segment.inputs):
            first, second = (types[arg.index] for arg in node.args[:2] if isinstance(arg, Ref))
            assert first is not None
            assert second is not None
            match len(first.shape), len(second.shape):
                case 2, 3:
                    rows[ends.index] = first.shape[0]
                case 3, 2:
                    rows[ends.index] = second.shape[1]
                case _:
                    rows[ends.index] = first.shape[-1]
    return rows


def _fill_group_ends(ends: Tensor, rows: int) -> None:
    """Fill a tensor with the ends of groups that contain all rows, where every second group is empty."""
    count = ends.numel()
    places = [rows * (group // 2 + 1) // -(-count // 2) for group in range(count)]
    ends.copy_(torch.tensor(places, dtype=ends.dtype).reshape(ends.shape))


def _rows(node: Node, types: Sequence[TensorType | None]) -> int:
    """Return the number of rows in the table."""
    position, _, dim = _LOOKUPS[node.op]
    table = node.args[position]
    if not isinstance(table, Ref):
        return table if isinstance(table, int) else 1
    kind, along = types[table.index], node.args[1] if dim is None else dim
    if kind is None or not kind.shape or not isinstance(along, int):
        return 1
    return max(kind.shape[along], 1)


# -------------------------------------------------------------------------------------------------------- comparison


def _allowed(segment: Segment, result: Tensor, kernels: KernelBackend) -> float | None:
    """Return the allowed difference relative to the largest element; None where one rounding can change any result."""
    is_reference = result.device.type == "cpu" and kernels is KernelBackend.EAGER
    if not result.dtype.is_floating_point:
        return 0.0 if is_reference else None
    return tolerance(segment) * (1.0 if is_reference else OTHER_KERNELS)
