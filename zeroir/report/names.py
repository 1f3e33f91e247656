"""Quantities and long lists as text."""

from __future__ import annotations

from collections.abc import Sequence

from zeroir.ir.byte_sizes import scaled


def format_flops(count: int) -> str:
    """Format floating-point operations: ``436.2 MFLOP``."""
    return scaled(count, "FLOP")


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 rank``, ``4 ranks``, or ``2 passes`` if the plural is given."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def shortened(names: Sequence[str]) -> list[str]:
    """Return the names; of more than six only the first three, an ellipsis, and the last two."""
    return list(names) if len(names) <= 6 else [*names[:3], "…", *names[-2:]]
