"""The units that the option ``units`` of a pass names: by name, by pattern, or all that are repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.passes.base import listed

ALL_REPEATED: Final = "*"
_ROOT: Final = re.compile(r"root(\..*)?")
_PATTERN: Final = re.compile(r"[^\s{}|,=]+")
_MOST_LISTED: Final = 6


def check_patterns(patterns: Iterable[str], name: str) -> None:
    """Raise a UserError if these cannot be the option ``units`` of the pass ``name``."""
    listed_patterns = list(patterns)
    if not listed_patterns or not all(_PATTERN.fullmatch(pattern) for pattern in listed_patterns):
        raise UserError(
            f"The option `units` of `{name}` is names of units or patterns of them, such as `blocks.*`, "
            f"with | between them, not `{'|'.join(listed_patterns)}`."
        )


def matching(patterns: Iterable[str], program: Program, option: str) -> frozenset[str]:
    """Return the units that the patterns match by ``fnmatch``; ``*`` excludes the root's, which are not repeated.

    Raises:
        UserError: if a pattern names no unit; ``option`` is the option that the user wrote.
    """
    units = list(dict.fromkeys(op.unit for op in program.ops() if isinstance(op, ops.Compute)))
    matched: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_REPEATED:
            named = {unit for unit in units if not _ROOT.fullmatch(unit)}
        else:
            named = {unit for unit in units if fnmatchcase(unit, pattern)}
        if not named:
            some = listed(units[:_MOST_LISTED]) + (", …" if len(units) > _MOST_LISTED else "")
            raise UserError(f"`{option}` names no unit with `{pattern}`; the units are {some}.")
        matched |= named
    return frozenset(matched)
