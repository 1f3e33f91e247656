"""All checks of a file, in order: what is declared, then the order of ops, then values."""

from __future__ import annotations

from tools.checker.bounds import bounds_of
from tools.checker.header import check_header
from tools.checker.order import check_order, check_pending
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord
from tools.checker.structure import check_structure
from tools.checker.values import check_values


def findings(artifact: FileRecord) -> list[str]:
    """Return what is wrong with a file, one line each; a check runs only where those before it found nothing."""
    found: list[str] = []
    names, logical = Declarations(artifact.scheduled), Declarations(artifact.logical)
    for part in (logical, names):
        check_structure(part, found.append)
    if not found:
        check_header(names, logical, found.append)
        check_pending(names, found.append)
    for part in (logical, names) if not found else ():
        check_order(part, found.append, bounds_of(part))
    if not found:
        check_values(names, artifact.logical, found.append)
    return found
