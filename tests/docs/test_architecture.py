"""ARCHITECTURE.md names files that exist, every package, and all places that know of a feature."""

from __future__ import annotations

import re
import tokenize
from io import StringIO
from pathlib import Path

import pytest

from tests.ground.test_names import ROOT, modules

PAGE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
PACKAGES = re.findall(r"^\| (`.*`) \| .* \| (`.*`) \|$", PAGE, re.MULTILINE)
"""The cells of the table of packages: the packages of a row, and the files to begin with."""


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def test_its_paths_exist() -> None:
    text = re.sub(r"^\|.*$", "", PAGE, flags=re.MULTILINE)
    paths = {name for name in quoted(text) if re.fullmatch(r"[a-z_]+(/[a-z_]+)+(\.\w+)?/?", name)}
    assert len(paths) > 20
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_each_package_is_in_the_table_with_files_of_its_own() -> None:
    named = [name for packages, _ in PACKAGES for name in quoted(packages)]
    folders = [path.parent for path in (ROOT / "zeroir").glob("*/__init__.py")]
    assert {Path(name).name for name in named} == {folder.name for folder in folders}
    for packages, files in PACKAGES:
        homes = [ROOT / name for name in quoted(packages)]
        assert all(any((home / file).exists() for home in homes) for file in quoted(files))


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
    section = re.split(r"^##", PAGE.partition(title)[2], flags=re.M)[0]
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
