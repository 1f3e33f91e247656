"""Limits of the size of a program, beyond any model: numbers cannot overflow, and checks cannot hang."""

from __future__ import annotations

from typing import Final

from zeroir.errors import OBEYED

MOST_RANKS: Final = 1_048_576
MOST_AXES: Final = 8
MOST_DIMS: Final = 32
MOST_STREAMS: Final = 64
MOST_COMMUNICATORS: Final = 64
MOST_ITEMS: Final = 1_000_000
"""The most items of any other kind that a program lists: ops, nodes, buffers, parameters and so on."""

MOST_LOCAL_RANKS: Final = 1_024
"""The most ranks that one command starts on a machine."""
MOST_COUNT: Final = 2**31 - 1
"""The largest number that an option may name: of micro-steps, units or steps."""
MOST_SIMULATED_OPS: Final = 1_000_000
"""The most ops of a simulated step: each takes some memory."""
LARGEST_SCALAR: Final = (2 - 2**-23) * 2.0**127
"""The largest value of a setting: scalars are FP32."""

MOST_DIMENSIONS: Final = 64
"""The most dimensions of a tensor, as in torch."""
MOST_ELEMENTS: Final = 2**48
"""The most elements of a buffer, a flat or a tensor, and the longest stride."""
MOST_BYTES: Final = 2**56
"""The most bytes of planned memory, of a segment's workspace, and of an amount that an option names."""

LONGEST_NAME: Final = 1_000
LONGEST_TEXT: Final = 100_000
"""The most characters of a text that is not a name: an option, the spec of a pass, a line of the model."""

LARGEST_FILE_BYTES: Final = 2**30
"""The largest body of a compiled program."""


def obeyed_character(text: str) -> str | None:
    """Return the first character that would control a terminal, such as ``U+001B``; None if there is none.

    These are control characters, line separators and those that change the direction of writing.
    """
    if text.isascii() and text.isprintable():
        return None
    match = OBEYED.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"
