"""Every law has a file with a program that breaks exactly that law, and with the modules that check it."""

import re
from pathlib import Path

import pytest

from tests.support.lowering import codes
from zeroir.ir.program import Program
from zeroir.ir.text import parse
from zeroir.verify import LAWS, PROVED, verify
from zeroir.verify.laws import CODES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```zir\n(.*?)```", re.DOTALL)
TABLE = re.compile(r"(?<=<!-- laws -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def programs(code: str) -> list[Program]:
    return [parse(text) for text in BLOCK.findall(CODES[code].text)]


@pytest.mark.parametrize("code", CODES)
def test_the_program_of_a_law_breaks_exactly_that_law(code: str) -> None:
    *references, program = programs(code)
    budget_bytes = 1000 if code == "Z301" else None
    report = verify(program, references[0] if references else None, budget_bytes)
    assert codes(report) == {code}, report.render()
    if code in LAWS:
        broken = {
            law
            for law, said in report.laws.items()
            if said != PROVED and "not examined" not in said
        }
        assert broken == {code}


@pytest.mark.parametrize("code", CODES)
def test_a_law_names_every_module_that_checks_it(code: str) -> None:
    checking: set[str] = set()
    for module in (ROOT / "zeroir/verify").rglob("*.py"):
        # Lines that say when a law is asked for do not check it.
        lines = (line for line in module.read_text("utf-8").splitlines() if "asked" not in line)
        if any(f'"{code}"' in line for line in lines):
            checking.add(str(module.relative_to(ROOT)))
    assert set(CODES[code].modules) == checking
    assert max(map(len, CODES[code].text.splitlines())) <= 200


def test_only_the_last_program_of_a_law_is_wrong() -> None:
    for code in CODES:
        for reference in programs(code)[:-1]:
            assert verify(reference).is_valid


def test_the_documentation_lists_the_laws(update_golden: bool) -> None:
    path = ROOT / "docs/ir.md"
    page = path.read_text("utf-8")
    rows = [f"| {law.code} | {law.rules_out} |" for law in CODES.values()]
    table = "\n".join(["| code | what it rules out |", "|---|---|", *rows])
    if update_golden:
        page = TABLE.sub(lambda _: table, page)
        path.write_text(page, "utf-8")
    assert TABLE.findall(page) == [table]
