"""Pages: damages to them are rejected by the law that each breaks, and nothing else is."""

from __future__ import annotations

import re
from random import Random

import pytest

from tests.support.edits import with_body
from tests.support.examples import IS_THOROUGH
from tests.support.lowering import codes
from tests.support.mutate_pages import OF_CODE
from tests.support.subjects import subject
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Role
from zeroir.ir.program import UPDATE, Program
from zeroir.ir.text import parse
from zeroir.passes.common.order import derive_waits
from zeroir.verify import verify
from zeroir.verify.laws import CODES

PAGED = ("paged", "stage 3, paged", "stage 1, paged, overlapped")
KINDS = [(code, kind) for code, mutations in OF_CODE.items() for kind in mutations]


SEEDS = range(6 if IS_THOROUGH else 3)


@pytest.mark.parametrize(("code", "kind"), KINDS)
@pytest.mark.parametrize("name", PAGED)
def test_a_damage_to_a_page_breaks_its_law(name: str, code: str, kind: str) -> None:
    made = subject(name)
    damaged = [OF_CODE[code][kind](made.scheduled, Random(seed)) for seed in SEEDS]
    mutants = [mutant for mutant in damaged if mutant is not None]
    if name == "paged" and not mutants:
        return  # Its slots are allocated once, so no page waits for a release.
    assert mutants
    for mutant in mutants:
        report = verify(mutant, made.logical)
        found = codes(report)
        # A wait also orders later ops.
        is_wait_lost = kind in ("use-page-early", "release-page-early", "share-slot")
        assert code in found if is_wait_lost else found == {code}, report.render()


def test_every_damage_is_done_to_a_schedule_of_the_pass() -> None:
    for code, kind in KINDS:
        assert OF_CODE[code][kind](subject("stage 3, paged").scheduled, Random(0)) is not None


def _without(program: Program, *indices: int) -> Program:
    """The program without these ops of its update, with the waits that the others need."""
    ops_left = enumerate(program.section_by_name[UPDATE].body)
    body = [op for index, op in ops_left if index not in indices]
    return derive_waits(with_body(program, UPDATE, body))


def _indices(program: Program, kind: type[ops.Op]) -> list[int]:
    """The ops of a kind in the update, transfers to and from pages alone."""
    pages = {buffer.name for buffer in program.buffers if buffer.role is Role.PAGE}
    return [
        index
        for index, op in enumerate(program.section_by_name[UPDATE].body)
        if isinstance(op, kind)
        and any(r.buffer in pages for r in (*effects(op).reads, *effects(op).accumulates))
    ]


@pytest.mark.parametrize("name", ["paged", "stage 3, paged"])
def test_a_page_that_nothing_changed_may_be_dropped(name: str) -> None:
    """Without its step a page is what its home still holds, and needs no write-back; the missing step is the error."""
    made = subject(name)
    (step, *_), (write_back, *_) = (
        _indices(made.scheduled, kind) for kind in (ops.OptimizerStep, ops.ToHost)
    )
    assert codes(_without(made.scheduled, write_back), made.logical) == {"Z502"}
    assert codes(_without(made.scheduled, step, write_back), made.logical) == {"Z403"}


@pytest.mark.parametrize("name", ["paged", "stage 3, paged"])
def test_a_lost_page_is_reported_once(name: str) -> None:
    made = subject(name)
    for index in _indices(made.scheduled, ops.ToHost):
        (finding,) = verify(_without(made.scheduled, index), made.logical).findings
        assert finding.code == "Z502"
        assert "after 1 updates" in finding.sentence


def test_the_laws_of_pages_are_asked_where_there_are_pages() -> None:
    paged = verify(subject("paged").scheduled)
    assert {"Z501", "Z502", "Z503"} <= paged.laws.keys()
    assert not {"Z501", "Z502", "Z503"} & verify(subject("stage 3").scheduled).laws.keys()


@pytest.mark.parametrize("code", ["Z501", "Z502", "Z503"])
def test_derived_waits_mend_the_order_of_pages(code: str) -> None:
    """The programs of the explanations lack a wait, for data or for the bound."""
    (text,) = re.findall(r"```zir\n(.*?)```", CODES[code].text, re.DOTALL)
    program = parse(text)
    assert codes(program) == {code}
    mended = verify(derive_waits(program))
    assert mended.is_valid, mended.render()
