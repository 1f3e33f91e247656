"""Quantities and long lists as text."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(count: int) -> str:
    """Format bytes in the decimal units that are usual for GPU memory and links: ``436.2 MB``."""
    return _scaled(count, "B")


def format_flops(count: int) -> str:
    """Format floating-point operations: ``436.2 MFLOP``."""
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


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 rank``, ``4 ranks``, or ``2 passes`` if the plural is given."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def shortened(names: Sequence[str]) -> list[str]:
    """Return the names; of more than six only the first three, an ellipsis, and the last two."""
    return list(names) if len(names) <= 6 else [*names[:3], "…", *names[-2:]]
