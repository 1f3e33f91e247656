"""What ARCHITECTURE.md says of where features are known is complete."""

from __future__ import annotations

import re
import tokenize
from io import StringIO
from pathlib import Path

import pytest

from tests.ground.test_names import ROOT, modules

SECTIONS = {
    "### States of 8 bits": (
        r"eight_bit|BLOCK_NUMEL|EIGHT_BITS|\w*optimizer_bits|StateForm|form_of\w*|rounded_states|scales|ABSMAX|CODED_\w+|[Cc]oded\w+",
        # Scales of something else.
        {
            "runtime/execution/executor.py",
            "zeroir/quantize.py",
            "zeroir/torch_ops/replaced/interpolation.py",
        },
    ),
    "### The speculative update": (
        r"\w*[Ss]peculat\w*|SPECULATED\w+|redo|redone_s|is_redone|REDO|CommitStep|SpeculativeStep|guess|guessed|guesses",
        # The lists of all ops and of all passes.
        {"zeroir/ir/ops.py", "passes/catalogue.py"},
    ),
}


def has_name(path: Path, pattern: str) -> bool:
    """Whether the code of a file, without its comments and texts, has a name of the pattern."""
    text = path.read_text("utf-8")
    if re.search(rf"\b({pattern})\b", text) is None:
        return False
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return any(t.type == tokenize.NAME and re.fullmatch(pattern, t.string) for t in tokens)


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_names_every_file_that_knows_of_a_feature_and_no_other(title: str) -> None:
    pattern, others = SECTIONS[title]
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    section = re.split(r"^##", page.partition(title)[2], flags=re.M)[0]
    named = {name for name in re.findall(r"`([\w/.]+)`", section) if "/" in name or "." in name}
    files = [path.relative_to(ROOT) for path in modules() if has_name(path, pattern)]
    found = {
        str(file): {
            name for name in named if f"/{file}".endswith(f"/{name}") or f"{name}/" in str(file)
        }
        for file in files
        if file.parts[0] != "tools"
    }
    assert {file for file, names in found.items() if not names} == others
    assert set().union(*found.values()) == named
