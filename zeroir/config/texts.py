"""Options as texts."""

from __future__ import annotations


def text_of(value: object, separator: str = ",") -> str:
    """The text of an option's value; the separator stands between the items of a list."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return separator.join(map(str, value))
        case _:
            return str(value)
