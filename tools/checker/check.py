"""All checks of a file, in order: what is declared, then the order of ops, then values."""

from __future__ import annotations

from tools.checker.bounds import bounds_of
from tools.checker.dims import instances, shared_sizes
from tools.checker.header import check_header
from tools.checker.order import check_order, check_pending
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord
from tools.checker.structure import check_structure
from tools.checker.values import check_values


def findings(artifact: FileRecord) -> list[str]:
    """Return what is wrong with a file, one line each; a check runs only where those before it found nothing.

    Raises:
        NoProgramError: where a size is no polynomial of the dims.
    """
    if artifact.scheduled.dims != artifact.logical.dims:
        return ["the dims are not those of the logical program"]
    shared = []
    pairs = zip(instances(artifact.scheduled), instances(artifact.logical), strict=True)
    for scheduled, logical in pairs:
        found = _findings(Declarations(scheduled), Declarations(logical))
        if found:
            return found
        shared.append(shared_sizes(Declarations(scheduled)))
    is_fixed = all(sizes == shared[0] for sizes in shared)
    return [] if is_fixed else ["a size that all ranks share depends on a dim"]


def _findings(names: Declarations, logical: Declarations) -> list[str]:
    found: list[str] = []
    for part in (logical, names):
        check_structure(part, found.append)
    if not found:
        check_header(names, logical, found.append)
        check_pending(names, found.append)
    for part in (logical, names) if not found else ():
        check_order(part, found.append, bounds_of(part))
    if not found:
        check_values(names, logical.program, found.append)
    return found
