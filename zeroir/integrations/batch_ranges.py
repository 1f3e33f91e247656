"""The sizes that batches of a data loader have: which of them differ from batch to batch, and in which range.

The first dimension of all tensors that share it is the dim ``rows``. The second one of tensors with a sequence of
integers in each row, and of others that share it, is the dim ``length``. Any other size that turns out to differ
becomes a dim, too. The largest value of a dim, for which memory is planned, is that of the batches so far, rounded up
to a power of two except for rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from zeroir.config.shapes import BatchShapes
from zeroir.errors import BatchError, UserError
from zeroir.ir.sizes import Size
from zeroir.torch_ops.batches import Batch, flatten

Sizes = Mapping[str, tuple[int, ...]]
"""The sizes of the tensors of a batch by path."""

Axis = tuple[str, int]
"""A dimension of a tensor of a batch."""

ROWS: Final = "rows"
_LENGTH: Final = "length"
_SIZE: Final = "size"
_FEWEST_POSITIONS: Final = 64
"""The smallest bound of a length, if the model has so many positions; less would hardly need less memory."""


def sizes_of(batch: Batch) -> Sizes:
    """Return the sizes of a batch.

    Raises:
        BatchError: if it is none, or a size is 0.
    """
    sizes = {path: tuple(tensor.shape) for path, tensor in flatten(batch).tensors.items()}
    for path, shape in sizes.items():
        if 0 in shape:
            raise BatchError(f"The batch's '{path}' is empty: it has the sizes {list(shape)}.")
    return sizes


def tokens_of(batch: Batch) -> frozenset[str]:
    """Return the paths of the tensors with a sequence of integers in each row."""
    return frozenset(
        path
        for path, tensor in flatten(batch).tensors.items()
        if tensor.ndim == 2 and not (tensor.is_floating_point() or tensor.is_complex())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRange:
    """The values of a dim, the multiple of it that sizes are, and the largest value of the batches so far."""

    least: int
    most: int
    seen: int
    factor: int = 1

    def value(self, number: int) -> int | None:
        """Return the dim's value where a size is ``number``; None where it has none."""
        value, rest = divmod(number, self.factor)
        return value if not rest and self.least <= value <= self.most else None


@dataclass(slots=True, kw_only=True)
class RangeLimits:
    """What is known of the sizes of a model's batches.

    Lengths are multiples of ``multiple`` and at most ``most_positions``, if the model has such a number. The
    others are what compiling has shown: axes that have one size in each program, with the reason; and axes with a limit
    of their own, so that their bound is not rounded up.
    """

    tokens: frozenset[str]
    multiple: int = 1
    most_positions: int | None = None
    fixed: dict[Axis, str] = field(default_factory=dict)
    exact: set[Axis] = field(default_factory=set)

    def is_length(self, axes: Sequence[Axis]) -> bool:
        """Return whether one of these axes is the length of a sequence of integers."""
        return any(path in self.tokens and index == 1 for path, index in axes)

    def reason(self, axis: Axis) -> str | None:
        """Return why an axis is no dim; None where it may be one."""
        return self.fixed.get(axis)

    def range_of(
        self,
        axes: Sequence[Axis],
        numbers: Sequence[int],
        earlier: SizeRange | None,
        *,
        is_rows: bool,
    ) -> SizeRange:
        """Return the range of the dim of some axes that have these numbers, and those of an earlier range."""
        factor = 1
        if earlier is not None:
            factor = earlier.factor
            numbers = [*numbers, earlier.seen * factor]
        elif self.is_length(axes):
            factor = self.multiple
        if any(number % factor for number in numbers):
            factor = 1
        seen = max(numbers)
        least, most = (1 if is_rows else min(2, *numbers)), seen
        if not (is_rows or self.exact.intersection(axes)):
            most = 1 << (seen - 1).bit_length()
            if self.is_length(axes):
                most = max(most, _FEWEST_POSITIONS)
                if self.most_positions is not None:
                    most = max(min(most, self.most_positions), seen)
        if earlier is not None:
            least = min(least, earlier.least * earlier.factor)
            most = max(most, earlier.most * earlier.factor)
        return SizeRange(
            least=-(-least // factor), most=most // factor, seen=seen // factor, factor=factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRanges:
    """The sizes of the batches that a program takes: each is a number, or the name of a dim with a range."""

    sizes: Mapping[str, tuple[int | str, ...]]
    dims: Mapping[str, SizeRange]

    @classmethod
    def given(cls, shapes: BatchShapes, example: Sizes) -> BatchRanges:
        """Return the ranges that a user gives; other sizes are the example's."""
        sizes: dict[str, tuple[int | str, ...]] = dict(example)
        dims: dict[str, SizeRange] = {}
        for path, shape in shapes.items():
            own: list[int | str] = []
            for index, size in enumerate(shape):
                linear = size.linear if isinstance(size, Size) else None
                if linear is None:
                    own.append(example[path][index] if size is None else size)
                    continue
                factor, dim, number = linear
                if number:
                    raise UserError(
                        f"The shapes have {size} at axis {index} of {path}, but loops of other libraries take dims and "
                        "multiples of dims alone: give this axis a dim of its own, or pad it."
                    )
                dims[dim.name] = SizeRange(
                    least=dim.minimum, most=dim.maximum, seen=dim.maximum, factor=factor
                )
                own.append(dim.name)
            sizes[path] = tuple(own)
        return cls(sizes=sizes, dims=dims)

    @classmethod
    def proposed(cls, seen: Sequence[Sizes], limits: RangeLimits) -> BatchRanges:
        """Return ranges for the first batches, which have the same tensors.

        Raises:
            UserError: if a dimension that has one size in each program differs among them.
        """
        rows = _numbers(seen, _first(seen[0]))
        lengths = {
            numbers
            for numbers in (_numbers(seen, (path, 1)) for path in limits.tokens & seen[0].keys())
            if min(numbers) > 1
        }
        sizes: dict[str, tuple[int | str, ...]] = {}
        for path, shape in seen[0].items():
            own: list[int | str] = list(shape)
            if shape and _numbers(seen, (path, 0)) == rows:
                own[0] = ROWS
            if len(shape) > 1 and _numbers(seen, (path, 1)) in lengths:
                own[1] = _LENGTH
            sizes[path] = tuple(own)
        return cls(sizes=sizes, dims={}).grown(seen, limits)

    def grown(self, seen: Sequence[Sizes], limits: RangeLimits) -> BatchRanges:
        """Return ranges that have room for further batches with the same tensors, too.

        Sizes that were equal so far share a dim as long as they are equal in these batches.

        Raises:
            UserError: if a dimension that has one size in each program differs among them.
        """
        sizes = {path: list(shape) for path, shape in self.sizes.items()}
        of_dims: dict[tuple[str, tuple[int, ...]], list[Axis]] = {}
        others: dict[Axis, tuple[int, tuple[int, ...]]] = {}
        for path, shape in self.sizes.items():
            for index, present in enumerate(shape):
                axis = path, index
                numbers = _numbers(seen, axis)
                reason = limits.reason(axis)
                if reason is not None:
                    sizes[path][index] = _only(numbers, axis, reason)
                elif isinstance(present, str):
                    of_dims.setdefault((present, numbers), []).append(axis)
                elif set(numbers) != {present}:
                    others[axis] = present, numbers
        earlier: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        known = list(of_dims)
        for axis, (present, numbers) in others.items():
            key = next(
                (key for key in known if key[1] == numbers and (key[0] == ROWS) == (not axis[1])),
                (f"{present}", numbers),
            )
            of_dims.setdefault(key, []).append(axis)
            earlier.setdefault(key, set()).add(present)
        dims: dict[str, SizeRange] = {}
        rows = _numbers(seen, _first(seen[0]))
        for key, axes in of_dims.items():
            name, numbers = key
            is_rows = axes[0][1] == 0 and numbers == rows
            new = limits.range_of(
                axes, (*numbers, *earlier.get(key, ())), self.dims.get(name), is_rows=is_rows
            )
            size: int | str = numbers[0]
            if new.least < new.most:
                kind = ROWS if is_rows else _LENGTH if limits.is_length(axes) else _SIZE
                size = _unused(kind, dims)
                dims[size] = new
            for path, index in axes:
                sizes[path][index] = size
        return BatchRanges(sizes={path: tuple(shape) for path, shape in sizes.items()}, dims=dims)

    def takes(self, batch: Sizes) -> bool:
        """Return whether a program with these sizes takes a batch."""
        if not self.has_tensors_of(batch):
            return False
        values: dict[str, int] = {}
        for path, shape in self.sizes.items():
            for size, number in zip(shape, batch[path], strict=True):
                if isinstance(size, int):
                    if size != number:
                        return False
                    continue
                value = self.dims[size].value(number)
                if value is None or values.setdefault(size, value) != value:
                    return False
        return True

    def has_tensors_of(self, batch: Sizes) -> bool:
        """Return whether a batch has the tensors of these sizes, with as many dimensions."""
        return {path: len(shape) for path, shape in self.sizes.items()} == {
            path: len(shape) for path, shape in batch.items()
        }

    def is_same(self, other: BatchRanges) -> bool:
        """Return whether a program with these ranges takes the same batches as one with the others."""
        own, others = (
            {name: (dim.least, dim.most, dim.factor) for name, dim in each.dims.items()}
            for each in (self, other)
        )
        return self.sizes == other.sizes and own == others

    def covers(self, earlier: BatchRanges) -> bool:
        """Return whether these ranges, which have grown from earlier ones, take whatever the earlier ones take."""
        return all(
            number == size if isinstance(size, int) else self.dims[size].value(number) is not None
            for path, shape in self.sizes.items()
            for size, present in zip(shape, earlier.sizes[path], strict=True)
            for number in earlier._ends(present)
        )

    def _ends(self, size: int | str) -> tuple[int, ...]:
        if isinstance(size, int):
            return (size,)
        each = self.dims[size]
        return each.least * each.factor, each.most * each.factor

    def axes_of(self, names: frozenset[str]) -> list[tuple[Axis, SizeRange]]:
        """Return the axes of the dims with these names, of all dims if none has such a name."""
        chosen = names & self.dims.keys() or self.dims.keys()
        return [
            ((path, axis), self.dims[size])
            for path, shape in self.sizes.items()
            for axis, size in enumerate(shape)
            if isinstance(size, str) and size in chosen
        ]

    def example(self) -> Sizes:
        """Return the sizes of a batch from which a program is captured.

        They are odd where possible, and differ, so that none is by chance that of another dim or a width of the model.
        """
        values: dict[str, int] = {}
        used = {size for shape in self.sizes.values() for size in shape if isinstance(size, int)}
        for name, each in self.dims.items():
            free = [
                value
                for value in range(max(each.least, 2), each.seen + 1)
                if value * each.factor not in used
            ]
            odd = [value for value in free if value % 2]
            values[name] = (odd or free or [each.seen])[-1]
            used.add(values[name] * each.factor)
        return {
            path: tuple(
                size if isinstance(size, int) else values[size] * self.dims[size].factor
                for size in shape
            )
            for path, shape in self.sizes.items()
        }

    @property
    def most_rows(self) -> int:
        """The most rows of a batch."""
        path, index = _first({path: (0,) * len(shape) for path, shape in self.sizes.items()})
        return self._ends(self.sizes[path][index])[-1]

    def __str__(self) -> str:
        ranges = [f"{name} {self._ends(name)[0]} to {self._ends(name)[1]}" for name in self.dims]
        return ", ".join(ranges) or "one size"

    def text(self) -> str:
        """Return the sizes as the option ``shapes``."""
        said: set[str] = set()
        rows: list[str] = []
        for path, shape in self.sizes.items():
            items: list[str] = []
            for size in shape:
                if isinstance(size, int):
                    items.append(str(size))
                    continue
                each = self.dims[size]
                item = size if each.factor == 1 else f"{each.factor}*{size}"
                if size not in said:
                    said.add(size)
                    item = f"{each.least}<={item}<={each.most}"
                items.append(item)
            if any(isinstance(size, str) for size in shape):
                rows.append(f"{path}: {', '.join(items)}")
        return "; ".join(rows)


def _first(batch: Sizes) -> Axis:
    """Return the axis whose size is the number of rows: the first one of the first tensor that has any.

    Raises:
        UserError: if no tensor has one.
    """
    path = next((path for path, shape in batch.items() if shape), None)
    if path is None:
        raise UserError("The batch has no rows: give tensors whose first dimension is the batch.")
    return path, 0


def _numbers(seen: Sequence[Sizes], axis: Axis) -> tuple[int, ...]:
    path, index = axis
    return tuple(batch[path][index] for batch in seen)


def _only(numbers: Sequence[int], axis: Axis, reason: str) -> int:
    """Return the one size that an axis has in all batches."""
    if len(set(numbers)) > 1:
        raise UserError(
            f"Dimension {axis[1]} of '{axis[0]}' is {min(numbers)} in a batch and {max(numbers)} in another one of the "
            f"same step, maybe on another rank, and one program cannot take both: {reason} Pad the batches alike, or "
            "leave out the last batch of an epoch (drop_last=True)."
        )
    return numbers[0]


def _unused(kind: str, names: Mapping[str, SizeRange]) -> str:
    return next(name for name in _numbered(kind) if name not in names)


def _numbered(kind: str) -> Iterator[str]:
    yield kind
    for number in count(2):
        yield f"{kind}_{number}"
