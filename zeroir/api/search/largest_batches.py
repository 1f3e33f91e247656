"""The largest batches of a program with dims that fit a memory: how large each size may be, within its range.

Memory is planned at the bound, so batches of at most some sizes need the memory of a program that is for at most these.
Such a program is made from the captured one by narrowing its dims, for which the capture stays right, and lowered and
measured for each try.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from zeroir.config import options_of, replaced
from zeroir.config.shapes import parse_shapes, shapes_text
from zeroir.errors import UserError
from zeroir.ir.analysis.instances import narrowed, narrowed_size
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import Program
from zeroir.ir.sizes import Size
from zeroir.workspace.segments import corrected

_HALVINGS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Batches of at most these sizes, by dim, fit together: a rank needs ``needed_bytes`` for all of them."""

    sizes: Mapping[str, int]
    needed_bytes: int

    @property
    def elements(self) -> int:
        """The product of the sizes, such as the tokens of a batch."""
        return prod(self.sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatches:
    """The largest batches that fit a memory, each by itself: the first with the longest range of the last dims.

    Each limit is that of another program. ``is_all`` says that the memory suffices for all that the shapes allow.
    ``elements`` is the product of both sizes of all batches that fit, by each limit; None unless there are two dims,
    and the longest range of the second one fits.
    """

    limits: tuple[Limit, ...]
    budget_bytes: int
    is_all: bool
    elements: int | None

    def __str__(self) -> str:
        """Return the sentence: ``rows × length ≤ 24,576 fits 80.0 GB``."""
        sizes = self.limits[0].sizes
        if self.elements is None:
            what = ", ".join(f"{name} ≤ {size:,}" for name, size in sizes.items())
        else:
            what = f"{' × '.join(sizes)} ≤ {self.elements:,}"
        end = ", all that the shapes allow" if self.is_all else ""
        return f"{what} fits {format_bytes(self.budget_bytes)}{end}"

    def narrowed(self, logical: Program) -> Program:
        """Return a captured program for batches of at most the first limit."""
        return narrowed_capture(logical, self.limits[0].sizes)


def largest_batches(
    logical: Program, needed_bytes: Callable[[Program], int | None], budget_bytes: int
) -> LargestBatches:
    """Search the largest batches of a captured program; ``needed_bytes`` returns None for a program that does not fit.

    The first dim of the batch, as a rule that of rows, is made as large as possible where the others have their largest
    values. If none of its values fits, it has its smallest, and the next dim is searched; then it is made as large as
    fits beside that. With two dims, the same is done where the second one has the half, the quarter and the eighth of
    its first limit, and then the second one is searched where the first has its largest.

    Raises:
        UserError: if the program has no dims, or not even the smallest batches fit.
    """
    dims = {dim.name: dim for dim in logical.dims}
    if not dims:
        raise UserError(
            "The model has no dims, so all batches have one shape: give it some with --shapes to search the largest."
        )
    order = list(
        dict.fromkeys(
            dim.name
            for binding in logical.inputs
            for size in binding.shape
            if isinstance(size, Size)
            for dim in size.dims
        )
    )

    def limit(sizes: Mapping[str, int]) -> Limit | None:
        needed = needed_bytes(narrowed_capture(logical, sizes))
        return None if needed is None else Limit(sizes=sizes, needed_bytes=needed)

    def largest(name: str, others: Mapping[str, int]) -> Limit | None:
        """Return the largest value of a dim that fits beside others, by bisection."""
        others = {each: others.get(each, 0) for each in order}  # in the order of the batch
        best = limit({**others, name: dims[name].maximum})
        if best is not None:
            return best
        best = limit({**others, name: dims[name].minimum})
        fitting, excessive = dims[name].minimum, dims[name].maximum
        while best is not None and excessive - fitting > 1:
            middle = (fitting + excessive) // 2
            tried = limit({**others, name: middle})
            if tried is None:
                excessive = middle
            else:
                best, fitting = tried, middle
        return best

    sizes = {name: dims[name].maximum for name in order}
    first: Limit | None = None
    shortened: list[str] = []
    for name in order:
        first = largest(name, sizes)
        if first is not None:
            break
        sizes[name] = dims[name].minimum
        shortened.append(name)
    if first is None:
        smallest = ", ".join(f"{name} {dims[name].minimum:,}" for name in order)
        raise UserError(
            f"Not even the smallest batches ({smallest}) fit {format_bytes(budget_bytes)}: use more ranks, a lower "
            "precision or more memory."
        )
    for name in shortened:
        first = largest(name, first.sizes) or first
    limits = [first]
    is_all = all(first.sizes[name] == dims[name].maximum for name in order)
    if len(order) == 2 and first.sizes[order[0]] < dims[order[0]].maximum:
        rows, length = order
        for halvings in range(1, _HALVINGS + 1):
            shorter = first.sizes[length] >> halvings
            if shorter < dims[length].minimum:
                break
            found = largest(rows, {length: shorter})
            if found is None or found.sizes[rows] == dims[rows].maximum:
                break
            limits.append(found)
        shortest = largest(length, {rows: dims[rows].maximum})
        limits += [] if shortest is None else [shortest]
    has_longest = first.sizes[order[-1]] == dims[order[-1]].maximum
    return LargestBatches(
        limits=tuple(limits),
        budget_bytes=budget_bytes,
        is_all=is_all,
        elements=(
            min(limit.elements for limit in limits) if len(order) == 2 and has_longest else None
        ),
    )


def narrowed_capture(logical: Program, sizes: Mapping[str, int]) -> Program:
    """Return the captured program for batches of at most these sizes, as if it had been captured for them."""
    options = options_of(logical)
    assert options.shapes is not None
    shapes = {
        path: tuple(None if size is None else narrowed_size(size, sizes) for size in of_path)
        for path, of_path in parse_shapes(options.shapes).items()
    }
    options = replaced(options, shapes=shapes_text(shapes))
    program = replace(narrowed(logical, sizes), options=options)
    # Segments declare their memory at the bound.
    return corrected(program)
