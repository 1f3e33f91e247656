"""Names that a script chooses by patterns, as in ``fnmatch``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from zeroir.errors import UserError


def matching(names: Sequence[str], patterns: Sequence[str], kind: str) -> list[str]:
    """Return the names that match one of the patterns, in order; ``kind`` is what has these names.

    Raises:
        UserError: where no name matches a pattern.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            others = " and others" if len(names) > 3 else ""
            raise UserError(
                f"No {kind} has a name like {pattern}; there are {', '.join(names[:3])}{others}."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
