"""Every code has an explanation whose program breaks exactly that law."""

import re

import pytest

from zeroir.ir.program import Program
from zeroir.ir.text import parse
from zeroir.verify import LAWS, PROVED, verify
from zeroir.verify.explain import CODES, explain

BLOCK = re.compile(r"```zir\n(.*?)```", re.DOTALL)


def programs(code: str) -> list[Program]:
    return [parse(text) for text in BLOCK.findall(explain(code))]


@pytest.mark.parametrize("code", CODES)
def test_the_program_of_an_explanation_breaks_exactly_that_law(code: str) -> None:
    *references, program = programs(code)
    budget_bytes = 1000 if code == "Z301" else None
    report = verify(program, references[0] if references else None, budget_bytes)
    assert {finding.code for finding in report.findings} == {code}, report.render()
    if code in LAWS:
        broken = {
            law
            for law, said in report.laws.items()
            if said != PROVED and "not examined" not in said
        }
        assert broken == {code}


@pytest.mark.parametrize("code", CODES)
def test_an_explanation_says_what_and_what_to_do(code: str) -> None:
    text = explain(code)
    assert text.startswith(f"# {code}: {CODES[code].title}\n")
    assert CODES[code].remedy in text
    assert max(map(len, text.splitlines())) <= 200


def test_only_the_last_program_of_an_explanation_is_wrong() -> None:
    for code in CODES:
        for reference in programs(code)[:-1]:
            assert verify(reference).is_valid


def test_an_unknown_code_has_no_explanation() -> None:
    with pytest.raises(KeyError):
        explain("Z999")
