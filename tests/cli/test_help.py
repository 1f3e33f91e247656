"""The help, the reference of commands that is made from it, and the completion of shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import command_reference
from zeroir.cli.app import run_command
from zeroir.config import CompileOptions

TITLES = tuple(dict.fromkeys(row.option.group for row in CompileOptions.rows().values()))


def test_every_option_is_in_a_group_of_the_help() -> None:
    assert all(TITLES)


def test_the_help_lists_options_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compile", "--help"]) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"─ {title} ─") for title in TITLES]
    assert places == sorted(places)
    assert places[0] < printed.index("│ --stage INT") < places[1]
    assert places[-1] < printed.index("│ --minimum-loss-scale")


def test_the_reference_is_made_from_the_commands(*, update_golden: bool) -> None:
    text = command_reference.rendered()
    if update_golden:
        command_reference.PAGE.write_text(text, encoding="utf-8")
    assert command_reference.PAGE.read_text("utf-8") == text, (
        "run `python -m tools.command_reference`"
    )


def test_a_reader_of_the_help_may_end_at_once() -> None:
    command = ["bash", "-o", "pipefail", "-c", f"'{sys.executable}' -m zeroir show --help | true"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


_COMPLETE = """
COMP_WORDS=(zeroir {words}) COMP_CWORD={last}
"$(complete -p zeroir | sed -E 's/.*-F ([^ ]+) .*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.slow
def test_bash_completes_commands_options_and_their_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        ask = _COMPLETE.format(words=" ".join(words), last=len(words))
        bash = subprocess.run(
            ["bash", "--norc", "-c", script + ask], capture_output=True, text=True, check=True
        )
        return bash.stdout.split()

    assert completed("comp") == ["compile", "completion"]
    assert completed("compile", "--world") == ["--world-size"]
    assert completed("compile", "--precision", "f") == ["fp32", "fp16"]


_OTHER_SHELLS = {
    "zsh": (("zsh", "-f", "-c", 'eval "$(<&0)"; print ${_comps[zeroir]}'), ["_cyclopts_zeroir"]),
    "fish": (
        ("fish", "--no-config", "-c", 'source -; complete -C "zeroir compile --world"'),
        ["--world-size"],
    ),
}
"""A command that reads a script and asks what the shell has learnt, and the first words of its answer."""


@pytest.mark.slow
@pytest.mark.parametrize("shell", _OTHER_SHELLS)
def test_other_shells_complete_once_they_have_read_the_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["completion", shell]) == 0
    script = capsys.readouterr().out
    if shell == "zsh":
        assert re.findall(r"^ *compdef (.*)", script, re.M) == ["_cyclopts_zeroir zeroir"]
        assert "_cyclopts_zeroir() {" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command, learnt = _OTHER_SHELLS[shell]
    answer = subprocess.run(
        command,
        input=script,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr == ""
    assert [line.partition("\t")[0] for line in answer.stdout.splitlines()] == learnt
