"""Plain data as a pickle, for the viewers of PyTorch that read no other format.

The pickles that this module writes contain only the types below, so a reader loads no class and runs no code. Protocol
4 is the newest that the memory viewer reads.
"""

from __future__ import annotations

import pickle  # noqa: TID251  for writing only, after ``_plain``
from collections.abc import Mapping, Sequence
from typing import Final, assert_never

PROTOCOL: Final = 4

Plain = None | bool | int | float | str | Sequence["Plain"] | Mapping[str, "Plain"]


def dumps(value: Plain) -> bytes:
    """Pickle plain data: None, booleans, numbers, strings, lists (from sequences) and dicts (from mappings)."""
    return pickle.dumps(_plain(value), protocol=PROTOCOL)


def _plain(value: Plain) -> object:
    match value:
        case None | bool():
            return value
        case str():
            return str(value.encode(), "utf-8")
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case Sequence():
            return [_plain(item) for item in value]
        case _:
            assert_never(value)
