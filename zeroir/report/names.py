"""How quantities and long lists are spelled for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zeroir.errors import UserError

_AMOUNT = re.compile(
    r"(?P<number>[0-9]+(\.[0-9]*)?(e[0-9]{1,2})?) *((?P<prefix>[kmgt])(?P<binary>i?))?b?",
    re.IGNORECASE,
)


def format_bytes(count: int) -> str:
    """Bytes in the decimal units in which GPU memory and links are sold: ``436.2 MB``."""
    return _scaled(count, "B")


def parse_bytes(text: str) -> int:
    """The inverse of ``format_bytes``: ``80GB``, ``512 MiB`` or a bare number of bytes.

    Raises:
        UserError: where the text is no such amount.
    """
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise UserError(f"'{text}' is no amount of memory; write it as 80GB, 512MiB or 1e9.")
    base = 1024 if found["binary"] else 1000
    return int(float(found["number"]) * base ** " kmgt".index((found["prefix"] or " ").lower()))


def format_flops(count: int) -> str:
    """Floating-point operations: ``436.2 MFLOP``."""
    return _scaled(count, "FLOP")


def _scaled(count: int, unit: str) -> str:
    if abs(count) < 1000:
        return f"{count} {unit}"
    size = float(count)
    for prefix in "kMGT":
        size /= 1000
        if abs(size) < 999.95:
            return f"{size:.1f} {prefix}{unit}"
    return f"{size:.1f} T{unit}"


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shortened(names: Sequence[str]) -> list[str]:
    """The names, or of many the first three and the last two with … in between."""
    return list(names) if len(names) <= 6 else [*names[:3], "…", *names[-2:]]
