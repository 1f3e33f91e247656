"""The options of a compilation, as its programs keep them.

``zeroir.config`` declares options and reads what they mean. What stands below it knows their texts, as files have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

Pairs = tuple[tuple[str, str], ...]
"""Names and texts of the options that are set, sorted by name."""


class Options:
    """Options of a compilation. Two of them are equal if files store them alike."""

    __slots__ = ()

    @property
    def pairs(self) -> Pairs:
        """The names and texts that files store."""
        raise NotImplementedError

    @property
    def texts(self) -> Mapping[str, str]:
        """Texts by name."""
        return dict(self.pairs)

    def __eq__(self, other: object) -> bool:
        return self.pairs == other.pairs if isinstance(other, Options) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.pairs)


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOptions(Options):
    """Options of which only the texts are known, as of a program that was read from its text."""

    pairs: Pairs = ()

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Self:
        """Return options with these texts by name."""
        return cls(tuple(sorted(texts.items())))


NO_OPTIONS: Final = WrittenOptions()
