"""The tool that measures how many mutants of the source the tests notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from filelock import FileLock

from tools.mutate_source import app
from tools.source_mutants.sample import sample
from tools.source_mutants.verdicts import Line

ROOT: Final = Path(__file__).parents[2]
TEST: Final = "tests/test_it.py::test_"
SOURCE: Final = '''"""Arithmetic."""


class Account:
    def __init__(self, amount):
        self.amount = amount

    @property
    def is_empty(self):
        return self.amount == 0

    def is_large(self):
        return self.amount > 10


def total(accounts):
    def amount(account):
        return account.amount

    return sum(amount(account) for account in accounts)


def unused(first, second):
    return first - second


def printed(account):
    print(account.amount + 1)
'''
TESTS: Final = """import functools
import subprocess
import sys

import pytest

from passes.accounts import Account, printed, total


@functools.cache
def empty():
    return Account(0).is_empty


def test_first():
    assert empty()


def test_empty():
    assert empty()
    assert not Account(1).is_empty


def test_large():
    assert Account(20).is_large()
    assert not Account(5).is_large()


def test_total():
    assert total([Account(1), Account(2)]) == 3


def test_printed():
    command = "from passes.accounts import *; printed(Account(1))"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert ran.stdout == "2\\n"


@pytest.mark.slow
def test_left_out():
    assert not Account(10).is_large()
    assert Account(11).is_large()
"""


ENDLESS: Final = """
def waited(limit):
    number = 0
    while number < limit:
        number += 1
    return number
"""
WAITING: Final = """from passes.accounts import waited

def test_waited():
    waited(2)
"""


def project(folder: Path, source: str = SOURCE, tests: str = TESTS) -> Path:
    files = {"passes/__init__.py": "", "passes/accounts.py": source, "tests/test_it.py": tests}
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    options = "[tool.pytest.ini_options]\npythonpath = ['.']\ntestpaths = ['tests']\n"
    (folder / "pyproject.toml").write_text(options + "markers = ['slow', 'gpu']\n")
    return folder


def measured(folder: Path, *options: str) -> str:
    """What the tool prints of the project in the folder."""
    command = [sys.executable, "-m", "tools.mutate_source", str(folder / "measured"), *options]
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def verdicts(folder: Path) -> list[Line]:
    lines = (folder / "measured" / "verdicts.jsonl").read_text().splitlines()
    return list(map(Line.model_validate_json, lines))


def outcomes(lines: Sequence[Line]) -> dict[str, tuple[str, str | None]]:
    """Outcomes and tests by the line that a mutant has in the place of another."""
    changed = {line.key: re.search(r"^\+ *(.*)$", line.diff, re.MULTILINE) for line in lines}
    return {match[1]: (line.outcome, line.test) for line in lines if (match := changed[line.key])}


@pytest.mark.slow
def test_tests_judge_the_functions_that_they_reach(tmp_path: Path) -> None:
    printed = measured(project(tmp_path), "--record", str(tmp_path / "record.json"))
    lines = verdicts(tmp_path)
    found = outcomes(lines)
    # A property, and a result that an earlier test has kept.
    assert found["return self.amount == 1"] == ("failed", f"{TEST}first")
    assert found["return self.amount != 0"] == ("failed", f"{TEST}first")
    assert {line.function for line in lines if line.test == f"{TEST}total"} == {"total"}
    # In a process that the test has started.
    assert found["print(account.amount - 1)"] == ("failed", f"{TEST}printed")
    # Nothing calls it; only a slow test would notice.
    assert found["return first + second"] == ("unreached", None)
    survivors = ["return self.amount >= 10", "return self.amount > 11"]
    for survivor in survivors:
        assert found[survivor] == ("survived", None)
    for survivor in (*survivors, "return first + second"):
        assert f"\n+    {survivor}\n" in printed
    assert printed.count("\n+") == 3
    record = json.loads((tmp_path / "record.json").read_text())
    rows = {row[0]: row[1:] for row in record["rows"]}
    expected = [str(len(lines)), str(len(lines) - 3), "3", "1", "0"]
    assert rows["passes"][:-1] == expected
    assert rows["all"] == rows["passes"]
    assert rows["verify"] == ["0", "0", "0", "0", "0", "-"]
    # A second call judges what the first has not.
    file = tmp_path / "measured" / "verdicts.jsonl"
    *kept, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept) + last[:20])
    measured(tmp_path)
    again = verdicts(tmp_path)
    assert again == lines


@pytest.mark.slow
def test_a_test_that_does_not_end_has_noticed_the_mutant(tmp_path: Path) -> None:
    measured(project(tmp_path, ENDLESS, WAITING), "--seconds", "1", "--hang-seconds", "1")
    found = outcomes(verdicts(tmp_path))
    assert found["number = 1"] in (("hung", f"{TEST}waited"), ("survived", None))
    assert found["number -= 1"] == ("hung", f"{TEST}waited")
    assert found["number = None"] == ("failed", f"{TEST}waited")
    assert found["number += 2"] == ("survived", None)


def test_functions_that_have_not_changed_have_the_same_mutants(tmp_path: Path) -> None:
    before = list(sample(project(tmp_path / "before"), 0, 5))
    other = SOURCE.replace("first - second", "first // second + 3").replace("Arith", "\n\nArith")
    after = {mutant.key for mutant in sample(project(tmp_path / "after", other), 0, 1000)}
    assert len(before) == 5
    assert {mutant.key for mutant in before if mutant.function != "unused"} <= after
    others = list(sample(tmp_path / "before", 1, 5))
    assert [mutant.key for mutant in others] != [mutant.key for mutant in before]


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(SystemExit, match=rf"^Another process uses '{tmp_path}': wait for it"),
    ):
        app([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("option", ["--count=0", "--seconds=-1"])
def test_numbers_that_mean_nothing_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        app([str(tmp_path / "measured"), option])
    assert ended.value.code != 0
    assert not (tmp_path / "measured").exists()
