"""Every option that is a number has a limit, and says so where a number is beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.cli.conftest import Zeroir, assert_refused
from tests.cli.test_bad_input import LINE
from tests.support.stored_program import STORED
from zeroir.cli.app import app

COMMANDS = {
    "compile": ["line.py"],
    "check": ["line.py"],
    "plan": ["line.py"],
    "run": [str(STORED)],
    "profile": [str(STORED), "-o", "machine.toml"],
    "simulate": [str(STORED)],
    "estimate": ["--params", "1e9"],
}
SHARED = {"check": "compile", "plan": "compile"}
"""Commands that take all options of another one, with which they are tried."""


def number_options(command: str) -> dict[str, type[int | float]]:
    kinds = {int: int, float: float}
    return {
        argument.name: kinds[hint]
        for argument in app[command].assemble_argument_collection()
        for hint in (argument.hint, *get_args(argument.hint))
        if hint in kinds
    }


def cases() -> Iterator[tuple[str, str, str]]:
    for command in COMMANDS:
        other = SHARED.get(command)
        shared = {} if other is None else number_options(other)
        for option, kind in number_options(command).items():
            if option not in shared:
                yield command, option, "9" * 40 if kind is int else "1e300"


@pytest.mark.parametrize(("command", "option", "number"), list(cases()))
def test_a_number_beyond_every_limit(
    zeroir: Zeroir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    option: str,
    number: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(LINE)
    given = COMMANDS[command] if option != "--params" else []
    answer = zeroir(command, *given, option, number)
    if option == "--straggler":  # its limit is that of the machine that it slows down
        assert_refused(answer, "how slow the straggler is")
        return
    assert_refused(answer, option, "999" if number.startswith("9") else number)
    assert any(words in answer.err for words in ("less than", "must be <")), answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["line.py"]


def test_a_timeout_beyond_what_torch_takes(zeroir: Zeroir) -> None:
    answer = zeroir("run", STORED, "--timeout", "99999999999999")
    assert_refused(
        answer, "--timeout is 99999999999999, but should be less than or equal to 604800."
    )


@pytest.mark.slow
def test_more_micro_steps_than_are_simulated(zeroir: Zeroir, tmp_path: Path) -> None:
    model, program = tmp_path / "line.py", tmp_path / "line.zir"
    model.write_text(LINE)
    options = ["--world-size", "2", "--micro-steps", "2"]
    assert zeroir("compile", model, *options, "-o", program).exit_code == 0
    most = str(2**31 - 1)
    answer = zeroir("simulate", program, "--micro-steps", most)
    assert_refused(answer, "A step of 2,147,483,647 micro-steps has about", "choose fewer")
    answer = zeroir("plan", model, "--world-size", "2", "--micro-steps", most)
    assert_refused(answer, "A step of 2,147,483,647 micro-steps has about", "choose fewer")
