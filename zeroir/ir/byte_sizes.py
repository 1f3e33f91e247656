"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from zeroir.errors import UserError
from zeroir.ir.limits import MOST_BYTES

_AMOUNT = re.compile(
    r"(?P<number>[0-9]{1,30}(\.[0-9]{,30})?(e[0-9]{1,2})?) *((?P<prefix>[kmgt])(?P<binary>i?))?b?",
    re.IGNORECASE,
)


def parse_bytes(text: str) -> int:
    """Parse ``80GB``, ``512 MiB`` or a bare number of bytes.

    Raises:
        UserError: if the text is not such an amount.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"'{text:.60}' is no amount of memory; write it as 80GB, 512MiB or 1e9.")
    base = 1024 if match["binary"] else 1000
    amount = int(float(match["number"]) * base ** " kmgt".index((match["prefix"] or " ").lower()))
    if amount > MOST_BYTES:
        raise UserError(
            f"'{text}' is more memory than any machine has; write it as 80GB or 512MiB."
        )
    return amount


def format_bytes(count: int) -> str:
    """Format bytes in the decimal units that are usual for GPU memory and links: ``436.2 MB``."""
    return scaled(count, "B")


def scaled(count: int, unit: str) -> str:
    """Format an amount with the prefix of its unit: ``436.2 M`` and the unit."""
    if abs(count) < 1000:
        return f"{count} {unit}"
    size = float(count)
    for prefix in "kMGT":
        size /= 1000
        if abs(size) < 999.95:
            return f"{size:.1f} {prefix}{unit}"
    return f"{size:.1f} T{unit}"
