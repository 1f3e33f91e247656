"""Write `docs/commands.md`, the reference of all commands, from the command line itself.

python -m tools.command_reference
"""

from __future__ import annotations

import re
from pathlib import Path

from zeroir.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_STARTED_AS = re.compile(r"^(zeroir[a-z ]*) -m \S+", re.MULTILINE)
_TITLE = "# zeroir\n"
_INTRODUCTION = """# Commands

`zeroir COMMAND --help` prints the same in a terminal. Every command ends with the exit codes of
[failures.md](failures.md#exit-codes). `python -m tools.command_reference` writes this page.
"""


def rendered() -> str:
    """The page's text."""
    reference = app.generate_docs(output_format="markdown")
    assert reference.startswith(_TITLE)
    # A usage line is no command that could run. In some of them cyclopts keeps a part of `python -m MODULE`.
    reference = reference.removeprefix(_TITLE).replace("```console\n", "```text\n")
    return _INTRODUCTION + _STARTED_AS.sub(r"\1", reference)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
