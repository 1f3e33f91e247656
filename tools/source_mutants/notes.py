"""What instrumented functions call: the functions that were called, for the test that runs.

Processes that a test starts append to a file, which their environment names; they may be killed at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

FILE = "ZEROIR_REACHED_FUNCTIONS"
_OWNER = "ZEROIR_REACHED_FUNCTIONS_OWNER"
_innermost: list[set[str]] = [set()]


def note(function: str) -> None:
    """A function was called."""
    functions = _innermost[-1]
    if function in functions:
        return
    functions.add(function)
    file = os.environ.get(FILE)
    if file is not None and os.environ[_OWNER] != str(os.getpid()):
        with open(file, "a", encoding="utf-8") as notes:  # noqa: PTH123 - every process imports this
            notes.write(f"{function}\n")


@contextmanager
def noted() -> Iterator[set[str]]:
    """The functions that are called in the block; those around it have called them, too."""
    functions: set[str] = set()
    _innermost.append(functions)
    try:
        yield functions
    finally:
        _innermost.pop()
        _innermost[-1] |= functions


def noted_here(functions: set[str]) -> None:
    """Functions whose results are used again count as called."""
    _innermost[-1] |= functions


def follow(file: str) -> None:
    """Have the processes that this one starts append to a file."""
    os.environ.update({FILE: file, _OWNER: str(os.getpid())})
