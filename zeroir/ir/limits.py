"""How large a program may be: far beyond any model, and small enough that nothing overflows or takes for ever."""

from __future__ import annotations

import re
from typing import Final

MOST_RANKS: Final = 1_048_576
MOST_AXES: Final = 8
MOST_STREAMS: Final = 64
MOST_COMMUNICATORS: Final = 64
MOST_ITEMS: Final = 1_000_000
"""Of each other kind that a program lists: ops, nodes, buffers, parameters and so on."""

MOST_COUNT: Final = 2**31 - 1
"""Of what options count: micro-steps, units, steps."""

MOST_DIMENSIONS: Final = 64
"""Of a tensor, as in torch."""
MOST_ELEMENTS: Final = 2**48
"""Of a buffer, a flat or a tensor; strides are no longer either."""
MOST_BYTES: Final = 2**56
"""Of planned memory, of a segment's workspace and of amounts that options name."""

LONGEST_NAME: Final = 1_000
LONGEST_TEXT: Final = 100_000
"""In characters, of texts that are no names: options, specs of passes, lines of the model."""

LARGEST_FILE_BYTES: Final = 2**30
"""Of a compiled program's body."""

_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def obeyed_character(text: str) -> str | None:
    """The first character that a terminal obeys instead of showing it, as ``U+001B``; None where there is none.

    These are control characters, line separators and those that turn the direction of writing.
    """
    if text.isascii() and text.isprintable():
        return None
    match = _OBEYED.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"
