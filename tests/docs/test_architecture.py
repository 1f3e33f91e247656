"""ARCHITECTURE.md names files that exist, and every package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
