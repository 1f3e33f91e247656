"""What tests of the API share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.lowering import applied
from zeroir.ir.program import Program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.verify import Reference, VerificationError, verify


@pytest.fixture
def proofs_between_passes() -> None:
    """Ask for the proof after each pass, which whatever compiles a model has outside these tests."""


@pytest.fixture(autouse=True)
def one_proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove a program once all passes have run: that each pass leaves a proved one is what tests of passes say."""
    if "proofs_between_passes" not in request.fixturenames:
        monkeypatch.setattr(manager, "prove", _proved_at_the_end)


def _proved_at_the_end(
    program: Program, passes: Sequence[Pass], reference: Program | None = None
) -> manager.Proof:
    manager.check_contracts(program, passes)
    if reference is None and not program.passes:
        reference = program
    last = applied(program, tuple(passes))
    report = verify(last, None if reference is None else Reference(reference))
    if not report.is_valid:
        raise VerificationError(report)
    return manager.Proof(program=last, report=report)
