"""Sizes that depend on dims, which are stored as texts; an integer that none else is stands for the number of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from zeroir.errors import UserError
from zeroir.ir.size_text import UnknownDimError, parse_size
from zeroir.ir.sizes import Dim, Size

_FIRST_SIZE: Final = -(2**62)
"""Integers from here down are numbers of sizes."""

_MOST_SIZES: Final = 1 << 20


class StoredSizeError(ValueError):
    """A text that is no size; ``index`` is its place among the texts."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class SizeNumbers:
    """The sizes in data that is stored, in the order in which they were first numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Size, int] = {}

    def number(self, size: int) -> int:
        """Return the integer that stands for a size that depends on dims; a plain integer stands for itself."""
        if not isinstance(size, Size):
            return size
        return _FIRST_SIZE - self._numbers.setdefault(size, len(self._numbers))

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the sizes."""
        return tuple(map(str, self._numbers))


def stored_sizes(texts: Sequence[str], dims: Sequence[Dim]) -> Callable[[int], int]:
    """Return the inverse of ``SizeNumbers.number`` for these texts.

    Raises:
        StoredSizeError: where a text is no size that depends on these dims.
    """
    by_name = {dim.name: dim for dim in dims}
    sizes: list[int] = []
    for index, text in enumerate(texts[:_MOST_SIZES]):
        try:
            size = parse_size(text, by_name)
        except UserError as error:
            raise StoredSizeError(str(error), index) from None
        except UnknownDimError as error:
            raise StoredSizeError(
                f"a size names the dim '{error}', which is not declared", index
            ) from None
        if size is None or not isinstance(size, Size) or not -(2**62) < size.at_bound < 2**62:
            raise StoredSizeError(f"{text!r:.60} is no size that depends on dims", index)
        sizes.append(size)

    def sized(number: int) -> int:
        index = _FIRST_SIZE - number
        return sizes[index] if 0 <= index < len(sizes) else number

    return sized
