"""The capture for the most sizes of batches, where code lets the sizes of the example batch decide.

A trace makes the decisions of its own sizes, and what is true of the example's may be true of few others: padding to a
multiple of 8 makes one block of 7 words and several of 9; an even length has the remainder 0. So the source is traced
with other example batches, too, and for those sizes alone that have the example's remainders. Where none of these has
more than one size, as where a loop of Python takes one step for each word, the submodules that decide run as they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from zeroir.api.captured import Captured
from zeroir.config import CompileOptions
from zeroir.config.shapes import BatchShapes, SizeClass, parse_shapes
from zeroir.errors import ModelWarning, Remainders, ShapesError, UserError
from zeroir.ir.sizes import Dim

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource
    from zeroir.torch_ops.batches import Batch


def widest(
    source: ModelSource,
    options: CompileOptions,
    trace: Callable[[ModelSource, CompileOptions], Captured],
    *,
    takes_example: bool,
) -> Captured:
    """Trace a source for the most sizes; with ``takes_example`` those of the example are among them.

    Raises:
        ShapesError: where it can be traced for none, as it says of the example's.
    """
    refusal: ShapesError | None = None
    captures: list[_Capture] = []

    def add(other: ModelSource, reason: str = "") -> None:
        captures.append(_Capture.of(lambda: trace(other, options), reason))

    try:
        add(source)
        remainders = captures[0].captured.traced.remainders
    except ShapesError as error:
        refusal, remainders = error, error.remainders
    if refusal is not None or remainders is not None:
        given = _Given.of(source, options)
        if refusal is not None:
            for values in given.others(refusal.dims):
                with suppress(UserError):
                    add(given.at(values))
        classes = {} if remainders is None else given.classes(remainders)
        if remainders is not None and classes:
            for values in (given.values, given.largest(classes)):
                with suppress(UserError):
                    add(replace(given.at(values), classes=classes), _reason(classes, remainders))
                    break
        if takes_example:
            captures = [each for each in captures if each.takes(given.example)]
    if not captures:
        assert refusal is not None
        if refusal.module and options.units.opaque is None:
            with suppress(UserError):
                add(replace(source, runs_what_decides=True))
        if not captures:
            raise refusal
    return max(captures, key=lambda each: each.sizes).with_notes()


class _Capture(NamedTuple):
    """A capture and its notes."""

    captured: Captured
    notes: tuple[str, ...]

    @classmethod
    def of(cls, trace: Callable[[], Captured], reason: str) -> _Capture:
        """Trace; ``reason`` is a phrase on the sizes that the trace is for, if these are fewer."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=ModelWarning)
            captured = trace()
        notes: list[str] = []
        for each in caught:
            if issubclass(each.category, ModelWarning):
                notes.append(str(each.message))
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if reason:
            narrowings = (reason, *captured.traced.narrowings)
            captured = replace(captured, traced=replace(captured.traced, narrowings=narrowings))
            notes.append(f"{reason}. An engine compiles another program when it meets other sizes.")
        return cls(captured, tuple(notes))

    @property
    def sizes(self) -> int:
        """How many sizes of a batch it is for."""
        dims = self.captured.artifact.logical.dims
        return math.prod(dim.maximum - dim.minimum + 1 for dim in dims)

    def takes(self, batch: Batch) -> bool:
        """Return whether the sizes of a batch are among those."""
        from zeroir.runtime.execution.batch import has_other_sizes

        return not has_other_sizes(self.captured.artifact.logical, batch)

    def with_notes(self) -> Captured:
        """Return the capture after a warning for each note."""
        for note in self.notes:
            warnings.warn(note, ModelWarning, stacklevel=3)
        return self.captured


@dataclass(frozen=True, slots=True)
class _Given:
    """A source, the shapes of its batches, its example batch, and the values of dims in that, by name."""

    source: ModelSource
    shapes: BatchShapes
    example: Batch
    values: Mapping[str, int]
    dims: Mapping[str, Dim]

    @classmethod
    def of(cls, source: ModelSource, options: CompileOptions) -> _Given:
        from zeroir.frontend.capture.shapes import dim_env
        from zeroir.torch_ops.batches import flatten

        shapes: BatchShapes = {}
        if options.shapes is not None:
            shapes = parse_shapes(options.shapes)
        elif source.shapes is not None:
            shapes = source.shapes()
        example = source.batch()
        tensors = flatten(example).tensors
        env, _ = dim_env(shapes, {path: tuple(x.shape) for path, x in tensors.items()})
        examples = {} if env is None else env.examples
        return cls(
            source,
            shapes,
            example,
            {dim.name: value for dim, value in examples.items()},
            {dim.name: dim for dim in examples},
        )

    def at(self, values: Mapping[str, int]) -> ModelSource:
        """Return the source with an example batch in which dims have these values."""
        import torch

        from zeroir.api.checks.drawn_batches import with_sizes

        if values == self.values:
            return self.source
        chance = torch.Generator().manual_seed(0)
        batch = with_sizes(self.example, self.shapes, values, chance)
        return replace(self.source, batch=lambda: batch)

    def others(self, names: frozenset[str]) -> Iterator[Mapping[str, int]]:
        """Yield other values of the dims of these names: those beside the example's, and the largest."""
        dims = [dim for name, dim in self.dims.items() if name in names]
        if dims:
            beside = {dim.name: _beside(self.values[dim.name], dim) for dim in dims}
            yield {**self.values, **beside}
            yield {**self.values, **{dim.name: dim.maximum for dim in dims}}

    def classes(self, remainders: Remainders) -> dict[str, SizeClass]:
        """Return the values that have the remainders of the example's, by dim."""
        modulus = remainders.modulus
        return {
            name: SizeClass(modulus, self.values[name] % modulus)
            for name in remainders.dims
            if name in self.dims
        }

    def largest(self, classes: Mapping[str, SizeClass]) -> dict[str, int]:
        """Return the example's values, and the largest ones of dims that have these classes."""
        sizes = {name: each.size(self.dims[name]) for name, each in classes.items()}
        return {**self.values, **{name: int(size) for name, size in sizes.items()}}


def _beside(value: int, dim: Dim) -> int:
    return value + 1 if value < dim.maximum else value - 1


def _reason(classes: Mapping[str, SizeClass], remainders: Remainders) -> str:
    phrases = (f"{name} % {each.modulus} = {each.remainder}" for name, each in classes.items())
    return (
        f"{remainders.line} lets the sizes of the batch decide, and the program is right only where "
        f"{' and '.join(phrases)}"
    )
