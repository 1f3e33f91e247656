"""The spelling of ops, as the text has it."""

from __future__ import annotations

import re
from functools import cache

from zeroir.ir.ops import Op


def op_name(op: Op) -> str:
    """The op's name in the text: ``AllGather`` is ``all_gather``."""
    return _snake(type(op).__name__)


@cache
def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def format_bytes(count: int) -> str:
    """Bytes in the decimal units in which GPU memory and links are sold."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
