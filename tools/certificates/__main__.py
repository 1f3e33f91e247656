"""Checks a certificate: ``python -m tools.certificates PROGRAM.zir CERTIFICATE``.

Exits with 0 if the laws hold, with 1 if the certificate does not show it, and with 2 if a file cannot be read.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgpack

from tools.certificates.comparison import compare
from tools.certificates.order import check_order
from tools.certificates.repetition import repeated
from tools.certificates.sections import SectionCheck
from tools.certificates.spans import RefusedError, require
from tools.certificates.values import Claims
from tools.checker.header import check_header
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord, NoProgramError, read_bytes
from tools.checker.structure import check_structure

_FORMAT = ("zeroir certificate", 1)
_LARGEST = 2**30
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a claim of another form leads to."""


def check(program: bytes, certificate: bytes) -> None:
    """Check the certificate of a program file.

    Raises:
        NoProgramError: if one of them cannot be read.
        RefusedError: if a law does not follow.
    """
    artifact = read_bytes(program)
    require(len(certificate) <= _LARGEST, "the certificate is larger than 1 GiB")
    try:
        plain = msgpack.unpackb(certificate, strict_map_key=True)
        fields = plain["format"], plain["version"], plain["program"], plain["contents"]
        parts = {name: _parts(plain[name]) for name in ("logical", "scheduled")}
        repetition = [(name, None, None, of) for name, of in plain.get("repeated", [])]
        parts["repeated"] = _parts(repetition)
    except (ValueError, TypeError, LookupError, RecursionError, msgpack.UnpackException) as error:
        raise NoProgramError("is no certificate") from error
    if fields[:2] != _FORMAT:
        raise NoProgramError(f"has the format {fields[:2]}, and this checker reads {_FORMAT}")
    require(fields[2] == program[20:52], "the certificate is of another program")
    try:
        _check(artifact, Claims(fields[3]), parts)
    except _ERRORS as error:
        raise RefusedError(f"a claim has another form: {type(error).__name__}: {error}") from error


Parts = dict[str, tuple[Any, Any, Any]]
"""By section: the ways into it, the clocks of its ops and what they leave."""


def _parts(sections: list[tuple[str, Any, Any, Any]]) -> Parts:
    return {name: (ways, clocks, writes) for name, ways, clocks, writes in sections}


def _check(artifact: FileRecord, claims: Claims, parts: dict[str, Parts]) -> None:
    _check_locally(artifact)
    runs: list[dict[str, SectionCheck]] = []
    for name in ("logical", "scheduled"):
        names, of = Declarations(getattr(artifact, name)), parts[name]
        if name == "logical":
            _spread(names)
        require(of.keys() == names.sections.keys(), f"the {name} program has other sections")
        ways = {
            section: ([{e: (s, line) for e, s, line in way} for way in ways], clocks)
            for section, (ways, clocks, _) in of.items()
        }
        check_order(names, ways)
        runs.append({})
        for section in ("micro_step", "last_micro_step", "update", "evaluate", "save"):
            if section in of:
                before = runs[-1].get("last_micro_step") if section == "update" else None
                run = runs[-1][section] = SectionCheck(
                    names, names.sections[section], claims, before
                )
                run.run(of[section][2])
                run.leave()
        if "micro_step" in runs[-1]:
            steps = [runs[-1][s].contributions for s in ("micro_step", "last_micro_step")]
            require(steps[0] == steps[1], "the last micro-step has other contributions")
    names, logical = Declarations(artifact.scheduled), Declarations(artifact.logical)
    if names.program.interleaved > 1:
        _spread(logical)
        writes = {section: of for section, (_, _, of) in parts["repeated"].items()}
        runs[0] = repeated(names, logical, claims, writes)
    compare(*runs)


def _check_locally(artifact: FileRecord) -> None:
    """Examine each declaration and each op by itself, and what both programs declare; no claim is needed for that."""
    found: list[str] = []
    names, logical = Declarations(artifact.scheduled), Declarations(artifact.logical)
    for of in (logical, names):
        check_structure(of, found.append)
    check_header(names, logical, found.append)
    require(not found, "; ".join(found[:1]))


def _spread(names: Declarations) -> None:
    """Let a logical program run on as many ranks as its communicators say."""
    for comm in names.program.comms:
        names.axes[comm.axis] = comm.ranks or names.axes[comm.axis]
    names.ranks = math.prod(names.axes.values())


def main(arguments: list[str]) -> int:
    """Check a certificate and print one sentence."""
    if len(arguments) != 2:
        print("usage: python -m tools.certificates PROGRAM.zir CERTIFICATE", file=sys.stderr)
        return 2
    try:
        check(*(Path(path).read_bytes() for path in arguments))
    except OSError as error:
        print(f"'{error.filename}' cannot be read: {error.strerror}.", file=sys.stderr)
        return 2
    except NoProgramError as error:
        print(f"A file {error}.", file=sys.stderr)
        return 2
    except RefusedError as error:
        print(f"refused: {error}")
        return 1
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
