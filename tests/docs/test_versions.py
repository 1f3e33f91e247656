"""The versions of Python and torch that the project declares are those that the documents say were run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, Field

ROOT: Final = Path(__file__).parents[2]


class Metadata(BaseModel):
    requires_python: str = Field(alias="requires-python")
    classifiers: list[str]
    dependencies: list[str]


PYPROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
METADATA: Final = Metadata.model_validate(PYPROJECT["project"])


def _minor_versions(specifiers: SpecifierSet, major: int) -> list[str]:
    """The versions ``major.minor`` that the specifiers admit."""
    admitted = [f"{major}.{minor}" for minor in range(100) if f"{major}.{minor}" in specifiers]
    assert 0 < len(admitted) < 99, f"{specifiers} has no bound at one end"
    return admitted


def _pythons() -> list[str]:
    return _minor_versions(SpecifierSet(METADATA.requires_python), 3)


def _torches() -> list[str]:
    requirements = [Requirement(text) for text in METADATA.dependencies]
    (torch,) = (requirement for requirement in requirements if requirement.name == "torch")
    return _minor_versions(torch.specifier, 2)


def _rows() -> list[list[str]]:
    """The cells of the table of versions: Python, torch, what was run, with what result."""
    page = (ROOT / "docs" / "measurements.md").read_text("utf-8")
    (section,) = re.findall(r"^## Versions\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def _ordered(versions: set[str]) -> list[str]:
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def test_the_classifiers_are_the_versions_that_pip_admits() -> None:
    prefix = "Programming Language :: Python :: "
    classified = [text.removeprefix(prefix) for text in METADATA.classifiers if prefix in text]
    assert classified == _pythons()


def test_every_version_that_pip_admits_has_a_row_with_a_result() -> None:
    rows = _rows()
    assert all(len(row) == 4 and all(row) for row in rows)
    assert _ordered({python for python, *_ in rows}) == _pythons()
    torches = {".".join(torch.split(".")[:2]) for _, torch, *_ in rows}
    assert _ordered(torches) == _torches()


def test_the_readme_and_the_tools_name_the_same_versions() -> None:
    pythons, torches = _pythons(), _torches()
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    named = f"Python {pythons[0]} to {pythons[-1]} and torch {torches[0]} to {torches[-1]}"
    assert named in readme
    tools = PYPROJECT["tool"]
    assert tools["mypy"]["python_version"] == pythons[0]
    assert tools["ruff"]["target-version"] == f"py{pythons[0].replace('.', '')}"
