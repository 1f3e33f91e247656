"""Damages programs and certificates, and looks whether ``tools.certificates`` accepts what it must refuse.

    python -m tools.damage_certificates --count 2000 --record docs/records/certificates.json

The programs and their damages are those of ``tools.mutants``. A damaged program gets a certificate of its own, which
says what the verifier's analyses say of it, true or not; the same one with altered claims; and that of the undamaged
program, with the digest of the damaged one. If ``zeroir verify`` refuses the program, each must be refused. For a
program that it accepts, the own certificate must be accepted, and an altered one may be. Exits with 1 on the other
outcomes, and on an error that is no refusal.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import msgpack

from tests.support.mutate import MUTATIONS
from tests.support.subjects import NAMES, subject
from tools import record_file
from tools.certificates.__main__ import check
from tools.certificates.spans import RefusedError
from tools.checker.reading import NoProgramError
from zeroir.artifact.file import Artifact, to_bytes
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.verify import Reference, verify
from zeroir.verify.certificate.certificate import certificate

OUTCOMES = (
    "both refuse",
    "both accept",
    "accepted, against a law",
    "refused, although it is valid",
    "another error",
)
_TRIES = 100
_ALTERATIONS = 3


class CertificateVerdict(NamedTuple):
    """What came of a certificate: of which damage and which certificate, an outcome, and why."""

    kind: str
    certificate: str
    outcome: str
    why: str = ""


def file_of(logical: Program, scheduled: Program) -> bytes:
    """The file with these programs."""
    return to_bytes(
        Artifact(
            logical=logical,
            scheduled=scheduled,
            model_path="model.py",
            model_sha256="",
            torch_version="",
            zeroir_version="",
        )
    )


def certified(logical: Program, scheduled: Program, data: bytes) -> Any:  # noqa: ANN401 - plain data
    """The certificate of a file, as plain data; None where the analyses cannot say anything of the program."""
    try:
        return msgpack.unpackb(msgpack.packb(certificate(scheduled, logical, data[20:52])))
    except Exception:  # noqa: BLE001 - a broken program may be anything
        return None


@cache
def certificate_of(name: str) -> bytes:
    """The certificate of an undamaged program."""
    made = subject(name)
    packed: bytes = msgpack.packb(certificate(made.scheduled, made.logical, b""))
    return packed


def verdict(data: bytes, claims: object) -> tuple[bool, str]:
    """Whether a certificate is accepted, and why it is not."""
    try:
        check(data, msgpack.packb(claims))
    except (RefusedError, NoProgramError) as error:
        return False, str(error)
    return True, ""


def altered(claims: Any, chance: Random) -> Any:  # noqa: ANN401 - plain data
    """A copy of a certificate in which one value, anywhere, is another one."""
    copied = msgpack.unpackb(msgpack.packb(claims))
    spots = list(_spots(copied))
    container, key = spots[chance.randrange(len(spots))]
    old = container[key]
    match old:
        case bool():
            container[key] = not old
        case int():
            container[key] = max(old + chance.choice([-64, -1, 1, 64]), -5)
        case list() if old and chance.random() < 0.5:
            del old[chance.randrange(len(old))]
        case list():
            old.extend(old[-1:] or [0])
        case _:
            other, place = spots[chance.randrange(len(spots))]
            container[key] = msgpack.unpackb(msgpack.packb(other[place]))
    return copied


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - plain data
    """Each place in lists and maps, but for the head of the certificate."""
    if isinstance(value, list | dict):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            if key not in {"format", "version", "program"}:
                yield value, key
                yield from _spots(value[key])


def judged(
    name: str, mutant: Program, kind: str, reference: Reference, chance: Random
) -> Iterator[CertificateVerdict]:
    """What comes of the certificates of a damaged program."""
    made = subject(name)
    report = verify(mutant, reference)
    try:
        data = file_of(made.logical, mutant)
    except UserError:
        return
    own = certified(made.logical, mutant, data)
    old = msgpack.unpackb(certificate_of(name))
    old["program"] = data[20:52]
    tried = [("its own", own)] if own is not None else []
    tried += [("the old one", old)] if not report.is_valid else []
    for which, claims in list(tried):
        tried += [(f"{which}, altered", altered(claims, chance)) for _ in range(_ALTERATIONS)]
    for which, claims in tried:
        try:
            is_accepted, why = verdict(data, claims)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
            yield CertificateVerdict(kind, which, OUTCOMES[4], repr(error))
            continue
        if report.is_valid:
            is_free = is_accepted or which.endswith("altered")
            yield CertificateVerdict(
                kind, which, OUTCOMES[1 if is_free else 3], "" if is_free else why
            )
        elif not is_accepted:
            yield CertificateVerdict(kind, which, OUTCOMES[0])
        else:
            first = report.render().splitlines()[0]
            yield CertificateVerdict(kind, which, OUTCOMES[2], first)


def damaged(name: str, chance: Random) -> tuple[str, Program] | None:
    """A damaged program, with the kind of the damage."""
    original = subject(name).scheduled
    for kind in chance.choices(sorted(MUTATIONS), k=_TRIES):
        mutant = MUTATIONS[kind](original, chance)
        if mutant is not None and mutant != original:
            return kind, mutant
    return None


def outcomes(
    names: Sequence[str], first: int, each: int, deadline: float
) -> Iterator[CertificateVerdict]:
    """Judge so many damages of each program; none begins after the deadline."""
    references = {name: Reference(subject(name).logical) for name in names}
    for seed in range(first, first + each):
        for name in names:
            chance = Random(f"{name} {seed}")
            found = damaged(name, chance)
            if found is None or time.monotonic() >= deadline:
                continue
            for outcome in judged(name, found[1], found[0], references[name], chance):
                if outcome.outcome not in OUTCOMES[:2]:
                    print(name, seed, *outcome, sep=": ")
                yield outcome


def main() -> int:
    """Judge certificates and print how often each outcome occurs."""
    parser = argparse.ArgumentParser(description="Damage programs and certificates.")
    parser.add_argument("--count", type=int, default=500, help="how many damaged programs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after this")
    parser.add_argument("--program", choices=NAMES, action="append", help="of this one alone")
    record_file.add_option(parser)
    arguments = parser.parse_args()
    names = arguments.program or NAMES
    each = -(-arguments.count // len(names))
    deadline = time.monotonic() + arguments.seconds
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes(names, arguments.first, each, deadline):
        counts.setdefault(outcome.certificate, Counter())[outcome.outcome] += 1
    shown = {**counts, "all": sum(counts.values(), Counter[str]())}
    rows = [
        [which, str(of.total()), *(str(of[outcome]) for outcome in OUTCOMES)]
        for which, of in shown.items()
    ]
    record_file.publish(
        arguments.record, "damage_certificates", ["certificate", "tried", *OUTCOMES], rows
    )
    return 1 if any(int(cell) for cell in rows[-1][4:]) else 0


if __name__ == "__main__":
    sys.exit(main())
