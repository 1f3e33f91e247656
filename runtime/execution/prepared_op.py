"""Ops that are ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PreparedOp = Callable[[], object]
"""An op with its tensors and its kernel, ready to run in every step."""


def one_after_the_other(prepared: Sequence[PreparedOp]) -> PreparedOp:
    """Return a function that calls several in order."""
    if len(prepared) == 1:
        return prepared[0]

    def run() -> None:
        for call in prepared:
            call()

    return run
