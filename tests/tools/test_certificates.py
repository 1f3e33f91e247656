"""A small program accepts the certificates of valid programs alone, and imports nothing of zeroir."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import msgpack
import pytest

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.subjects import CAPTURED, NAMES, subject
from tools.certificates.__main__ import check
from tools.certificates.spans import RefusedError
from tools.certificates.values import Claims
from tools.checker.reading import NoProgramError
from tools.damage_certificates import (
    OUTCOMES,
    altered,
    certificate_of,
    certified,
    damaged,
    file_of,
    judged,
    verdict,
)
from zeroir.errors import UserError
from zeroir.ir.sizes import Dim
from zeroir.verify import Reference
from zeroir.verify.certificate.certificate import certificate, unsayable

QUICK = [name for name in NAMES if name not in CAPTURED]


def check_subject(name: str) -> None:
    made = subject(name)
    data = file_of(made.logical, made.scheduled)
    assert verdict(data, certified(made.logical, made.scheduled, data)) == (True, "")


@pytest.mark.parametrize("name", QUICK)
def test_a_valid_program_is_accepted(name: str) -> None:
    check_subject(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CAPTURED))
def test_a_valid_captured_program_is_accepted(name: str) -> None:
    check_subject(name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_accepted(stage: int) -> None:
    logical = mlp(blocks=3, precision="fp16", clip=1.0, micro_steps=2)
    scheduled = applied(logical, for_stage(stage, 4))
    data = file_of(logical, scheduled)
    assert verdict(data, certified(logical, scheduled, data)) == (True, "")


def test_a_program_with_dims_gets_no_certificate() -> None:
    made = subject("stage 0")
    sized = replace(made.scheduled, dims=(Dim(name="length", minimum=1, maximum=8),))
    assert unsayable(sized) == "sizes that depend on dims"
    with pytest.raises(UserError, match="it has sizes that depend on dims"):
        certificate(sized, made.logical, b"")


def check_damages(name: str, seed: int) -> None:
    made, chance = subject(name), Random(f"{name} {seed}")
    found = damaged(name, chance)
    if found is not None:
        kind, mutant = found
        for outcome in judged(name, mutant, kind, Reference(made.logical), chance):
            assert outcome.outcome in OUTCOMES[:2], f"{name} {seed}: {outcome}"


@pytest.mark.parametrize("name", QUICK)
def test_no_certificate_makes_a_broken_program_valid(name: str) -> None:
    for seed in range(2):
        check_damages(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_no_certificate_makes_any_broken_program_valid(name: str) -> None:
    for seed in range(2, 12):
        check_damages(name, seed)


def test_an_altered_certificate_is_refused_or_harmless() -> None:
    name = "stage 3, overlapped"
    made, chance = subject(name), Random(0)
    data = file_of(made.logical, made.scheduled)
    claims = certified(made.logical, made.scheduled, data)
    refused = [not verdict(data, altered(claims, chance))[0] for _ in range(60)]
    assert sum(refused) > 40  # others are claims that say less, or that nothing depends on


def test_one_number_cannot_stand_for_a_statistic_and_for_a_value() -> None:
    claims = Claims([])
    claims.mean(("value", 7, ()), 0, ("computed", 1))
    claims.mean(("value", 7, ()), 1, ("computed", 1))
    with pytest.raises(RefusedError, match="value 7"):
        claims.mean(("value", 7, ()), 0, ("computed", 2))
    with pytest.raises(RefusedError, match="value 7"):
        claims.mean(("value", 7, ()), 0, ("GradNorm", ()))


def test_a_clock_that_says_too_much_is_refused() -> None:
    made = subject("stage 3, overlapped")
    data = file_of(made.logical, made.scheduled)
    claims = certified(made.logical, made.scheduled, data)
    clocks = [clock for *_, of, _ in claims["scheduled"] for clock in of if clock is not None]
    for clock in clocks[::12]:
        for stream in range(len(clock)):
            clock[stream] += 1
            assert not verdict(data, claims)[0]
            clock[stream] -= 1
    assert verdict(data, claims) == (True, "")


def test_a_certificate_is_of_one_program() -> None:
    made = subject("stage 0")
    data = file_of(made.logical, made.scheduled)
    with pytest.raises(RefusedError, match="of another program"):
        check(data, certificate_of("stage 0"))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x00",
        b"\xff" * 40,
        msgpack.packb([1, 2]),
        msgpack.packb({"format": "zeroir certificate"}),
        msgpack.packb(
            {"format": "zeroir certificate", "version": 2, "program": b"", "contents": []}
        ),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_certificate_is_refused(damage: bytes) -> None:
    made = subject("stage 0")
    with pytest.raises(NoProgramError):
        check(file_of(made.logical, made.scheduled), damage)


def test_it_imports_nothing_of_zeroir() -> None:
    fair = {"tools.certificates", "tools.checker.reading", "tools.checker.program"}
    fair |= {"tools.checker.bounds"}
    fair |= {"tools.checker.structure", "tools.checker.header", "tools.checker.views"}
    for path in Path("tools/certificates").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                is_own = name in fair or name.startswith("tools.certificates.")
                assert is_own or top in {"msgpack"} | sys.stdlib_module_names, f"{path}: {name}"
