"""What objects, functions and modules add to while the state of a step's code is walked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Protocol

from zeroir.frontend.source.imports import is_known_package
from zeroir.frontend.source.namespaces import Namespace
from zeroir.frontend.source.outside_reads import OutsideReads
from zeroir.frontend.source.source_lines import is_users_file
from zeroir.frontend.watch.live_modules import LiveModules
from zeroir.frontend.watch.quick_comparison import QuickComparison
from zeroir.frontend.watch.reached_code import ReachedCode

Leaf = tuple[object, ...]

HOOK: Final = "hook"
"""The first element of the leaves of hooks."""

SETTING: Final = "setting"
"""The first element of the leaves of settings and functions of torch."""

FILE: Final = "file"
"""The first element of the leaves of files."""

FOLLOWED: Final = "a number that counts at every step"
"""The second element of the leaves of numbers that a program follows."""


@dataclass(slots=True)
class NumberPlace:
    """Where a number is: a key of a container, and the container's contents to compare with, if it is compared."""

    container: Namespace | dict[Any, object] | list[object] | deque[object]
    key: Any
    contents: Any = None

    @property
    def value(self) -> object:
        """The present value; None where there is none."""
        try:
            return self.container[self.key]
        except (IndexError, KeyError):
            return None

    def set(self, value: object) -> None:
        """Replace the number."""
        self.container[self.key] = value

    def expect(self, value: object) -> None:
        """Let a comparison of the container expect this value."""
        if self.contents is not None:
            self.contents[self.key] = value


class Walk(Protocol):
    """The state that is walked; see ``CodeState``. ``seen`` are all objects that it met, by their ids."""

    code: ReachedCode
    leaves: dict[str, Leaf]
    lines: dict[str, str]
    numbers: frozenset[str]
    live: LiveModules | None
    reads: OutsideReads
    quick: QuickComparison
    seen: dict[int, object]

    def add(self, name: str, value: object, place: NumberPlace | None = None) -> None:
        """Add a value, and what the code may read of it."""

    def add_object(self, name: str, value: object) -> None:
        """Add what the code may read of an object that has just been met."""

    def add_attributes(self, name: str, values: Mapping[str, object], owner: object) -> None:
        """Add those attributes of an object, a class or a Python module that the code of a step mentions."""

    def label(self, name: str, owner: object) -> str:
        """Return a name that nothing else has: this one, with a number where another owner has it."""

    def is_stored(self, container: object, key: object) -> bool:
        """Return whether the code only stores what is there."""


def is_users(function: FunctionType) -> bool:
    """Return whether a function is the user's own, whose globals and closure may change while a script runs."""
    filename = function.__code__.co_filename
    # Code without a file is typed at a prompt, or made by a class for itself.
    return not is_known_package(function.__module__) and (
        filename.startswith("<") or is_users_file(filename)
    )
