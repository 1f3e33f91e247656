"""The shapes of a batch that depend on dims, as a text: ``input_ids: batch<=16, length<=8192; labels: batch, length``.

Each tensor of a batch that is named by its path has one item for each of its dimensions: a number, ``_`` for the number
of the example batch, a dim, or a multiple of one plus a number, such as ``8*blocks`` or ``length-1``. A dim's largest
value is said once, by ``<=``, and its smallest one, 1 otherwise, before it: ``2<=length<=8192``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from zeroir.errors import UserError
from zeroir.ir.analysis.instances import values_of_dims
from zeroir.ir.limits import MOST_COUNT
from zeroir.ir.program import Program
from zeroir.ir.sizes import RESERVED_NAMES, Dim, LinearSize, Size


class SizeClass(NamedTuple):
    """The values of a dim that leave this remainder when they are divided by this number."""

    modulus: int
    remainder: int

    def size(self, dim: Dim) -> int:
        """Return the values of a dim in this class as a size, of another dim where these are several."""
        added = (self.remainder - 1) % self.modulus + 1 - self.modulus
        least = -(-(dim.minimum - added) // self.modulus)
        most = (dim.maximum - added) // self.modulus
        if least >= most:
            return most * self.modulus + added
        name = f"{dim.name}_by_{self.modulus}"
        return Dim(name=name, minimum=least, maximum=most).size * self.modulus + added


BatchShapes = Mapping[str, tuple[int | None, ...]]
"""The sizes of each named tensor by its path; None is the size of the example batch."""

_ITEM: Final = re.compile(
    r"(?:(?P<minimum>\d{1,9})<=)?(?:(?P<factor>\d{1,9})\*)?(?P<name>[A-Za-z]\w*|_\w+)(?P<number>[+-]\d{1,9})?"
    r"(?:<=(?P<maximum>\d{1,10}))?",
    re.ASCII,
)

_VALUE: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>\d{1,10})", re.ASCII)


def parse_shapes(text: str) -> BatchShapes:
    """Return the shapes that a text describes.

    Raises:
        UserError: where it is none, gives a dim two ranges or no largest value.
    """
    rows: dict[str, list[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        path, colon, items = part.rpartition(":")
        if not colon or not path.strip():
            raise UserError(_explained(part, "has no path of a tensor before a colon"))
        if path.strip() in rows:
            raise UserError(f"The tensor {path.strip()} is named twice.")
        rows[path.strip()] = [item.replace(" ", "") for item in items.split(",")]
    if not rows:
        raise UserError(_explained(text, "names no tensor"))
    dims = _dims([item for items in rows.values() for item in items])
    return {path: tuple(_size(item, dims) for item in items) for path, items in rows.items()}


def of_classes(shapes: BatchShapes, classes: Mapping[str, SizeClass]) -> BatchShapes:
    """Return shapes in which the dims of these names take the values of a class alone."""
    if not classes:
        return shapes
    sizes = (size for shape in shapes.values() for size in shape if isinstance(size, Size))
    dims = {dim for size in sizes for dim in size.dims if dim.name in classes}
    of_dims = {dim: classes[dim.name].size(dim) for dim in dims}
    return {
        path: tuple(size.replaced(of_dims) if isinstance(size, Size) else size for size in shape)
        for path, shape in shapes.items()
    }


def shapes_text(shapes: BatchShapes) -> str:
    """Return the text of shapes, from which ``parse_shapes`` makes equal ones."""
    ranges = _places_of_ranges(shapes)
    rows: list[str] = []
    for path, sizes in shapes.items():
        items: list[str] = []
        for axis, size in enumerate(sizes):
            if not isinstance(size, Size):
                items.append("_" if size is None else str(size))
                continue
            factor, dim, number = _linear(size)
            item = dim.name if factor == 1 else f"{factor}*{dim.name}"
            item += f"{number:+}" if number else ""
            if ranges[dim.name] == (path, axis):
                smallest = "" if dim.minimum == 1 else f"{dim.minimum}<="
                item = f"{smallest}{item}<={dim.maximum}"
            items.append(item)
        if sizes:  # a number has none
            rows.append(f"{path}: {', '.join(items)}")
    return "; ".join(rows)


def _places_of_ranges(shapes: BatchShapes) -> dict[str, tuple[str, int]]:
    """Return where the range of each dim is said: at its first size without an added number, if there is one."""
    places: dict[str, tuple[str, int]] = {}
    plain: dict[str, tuple[str, int]] = {}
    for path, sizes in shapes.items():
        for axis, size in enumerate(sizes):
            if isinstance(size, Size):
                _, dim, number = _linear(size)
                places.setdefault(dim.name, (path, axis))
                if not number:
                    plain.setdefault(dim.name, (path, axis))
    return places | plain


def _linear(size: Size) -> LinearSize:
    linear = size.linear
    assert linear is not None  # nothing else is a shape of a batch
    return linear


def parse_values(text: str) -> dict[str, int]:
    """Return the values of dims that a text such as ``length=2048,rows=4`` gives.

    Raises:
        UserError: where it is none, or gives one of them twice.
    """
    values: dict[str, int] = {}
    for item in text.split(","):
        match = _VALUE.fullmatch(item.strip())
        if match is None:
            raise UserError(_explained(item.strip(), "is no value of a dim, such as length=2048"))
        if match["name"] in values:
            raise UserError(f"The dim {match['name']} has two values: leave one of them out.")
        values[match["name"]] = int(match["value"])
    return values


def values_given(program: Program, given: Mapping[str, int] | str | None) -> dict[str, int]:
    """Return the value of each dim of a program where some are given; the others have their largest.

    Raises:
        UserError: where the program has no such dim, or was not compiled for that value.
    """
    return values_of_dims(program, parse_values(given) if isinstance(given, str) else given or {})


def values_text(values: Mapping[str, int]) -> str:
    """Return values of dims as a person reads them: ``length 2,048, rows 4``."""
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


def _dims(items: list[str]) -> dict[str, Dim]:
    ranges: dict[str, dict[str, int]] = {}
    for item in items:
        match = _ITEM.fullmatch(item)
        if match is None:
            if item == "_" or re.fullmatch(r"\d{1,18}", item):
                continue
            raise UserError(_explained(item, "is neither a number nor a dim"))
        known = ranges.setdefault(match["name"], {})
        for end in ("minimum", "maximum"):
            if match[end] is None:
                continue
            value = int(match[end])
            if known.setdefault(end, value) != value:
                raise UserError(f"The dim {match['name']} has the {end} {known[end]} and {value}.")
    dims: dict[str, Dim] = {}
    for name, ends in ranges.items():
        if name in RESERVED_NAMES:
            raise UserError(
                f"A dim cannot be called {name}, which means something else in the text of a program."
            )
        if "maximum" not in ends:
            raise UserError(
                f"The dim {name} has no largest value, for which memory is planned: write {name}<=8192 once."
            )
        smallest, largest = ends.get("minimum", 1), ends["maximum"]
        if not 1 <= smallest < largest <= MOST_COUNT:
            raise UserError(
                f"The dim {name} is from {smallest} to {largest}, but should be from at least 1 to more than that, "
                f"{MOST_COUNT} at the most."
            )
        dims[name] = Dim(name=name, minimum=smallest, maximum=largest)
    return dims


def _size(item: str, dims: Mapping[str, Dim]) -> int | None:
    if item == "_":
        return None
    match = _ITEM.fullmatch(item)
    if match is None:
        return int(item)
    factor, number = int(match["factor"] or 1), int(match["number"] or 0)
    if factor == 0:
        raise UserError(_explained(item, "is 0 times a dim"))
    dim = dims[match["name"]]
    if factor * dim.minimum + number < 1:
        raise UserError(
            _explained(
                item,
                f"is less than 1 where {dim.name} is {dim.minimum}: give {dim.name} a larger smallest value",
            )
        )
    return dim.size * factor + number


def _explained(text: str, problem: str) -> str:
    return f"{text!r:.80} {problem}."
