"""One word has one meaning: class names are unique in the product and its tools, and modules have plain names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.sources import nodes

ROOT = Path(__file__).parents[2]
TREES = ("zeroir", "passes", "runtime", "tools")

METAPHORS = frozenset(
    """
    amounts choices crossing draws early field fit give_way handout in_hand issuing joint kinds lent looks made offer
    orphans rehearsal roll_call scheduled taker tape waves weigh whereabouts words
    """.split()  # noqa: SIM905  a list of them is a page long
)
"""Names of modules and classes that do not say what they are."""


OPTIONS = ROOT / "zeroir" / "config"
"""Its objects have the names of the ops and passes that obey them, such as ``zeroir.Prefetch``."""


def modules() -> list[Path]:
    """Every Python file of the trees, without those below the links in ``zeroir``."""
    return [
        file
        for tree in TREES
        for file in sorted((ROOT / tree).rglob("*.py"))
        if not any(folder.is_symlink() for folder in file.parents)
    ]


@cache
def class_names(module: Path) -> tuple[str, ...]:
    """The names of all classes that a file defines."""
    return tuple(node.name for node in nodes(module) if isinstance(node, ast.ClassDef))


def _duplicates(modules: list[Path]) -> dict[str, list[str]]:
    """The files of each class name that several files define; leading underscores do not count."""
    files: dict[str, set[str]] = {}
    for module in modules:
        for name in class_names(module):
            files.setdefault(name.lstrip("_"), set()).add(str(module))
    return {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}


def test_class_names_are_unique() -> None:
    duplicates = _duplicates([module for module in modules() if module.parent != OPTIONS])
    report = [f"{name}: {', '.join(files)}" for name, files in sorted(duplicates.items())]
    assert not report, "\n".join(report)


def test_a_second_class_of_one_name_is_found(tmp_path: Path) -> None:
    for module, line in (("one", "class Ground: ..."), ("two", "class _Ground: ...")):
        (tmp_path / f"{module}.py").write_text(f"{line}\n")
    found = sorted(tmp_path.iterdir())
    assert _duplicates(found) == {"Ground": [str(module) for module in found]}


def _metaphors(files: list[Path]) -> list[str]:
    """The modules and classes whose whole name is a metaphor."""
    names = [
        (f"{file}{'' if name == file.stem else f': {name}'}", name)
        for file in files
        for name in (file.stem, *class_names(file))
    ]
    return [
        where
        for where, name in names
        if re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_") in METAPHORS
    ]


def test_modules_and_classes_are_named_after_what_they_hold() -> None:
    files = modules()
    assert not _metaphors(files)
    assert METAPHORS.isdisjoint(file.parent.name for file in files)


def test_a_metaphor_is_found(tmp_path: Path) -> None:
    module = tmp_path / "_in_hand.py"
    module.write_text("class _RollCall: ...\nclass Calls: ...\n")
    assert _metaphors([module]) == [str(module), f"{module}: _RollCall"]
