"""One word has one meaning: class names are unique in the product and its tools, and modules have plain names."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import nodes

ROOT = Path(__file__).parents[2]
TREES = ("zeroir", "passes", "runtime", "tools")

METAPHORS = frozenset(
    {
        "choices",
        "draws",
        "early",
        "field",
        "fit",
        "kinds",
        "looks",
        "rehearsal",
        "tape",
        "waves",
        "words",
    }
)
"""Module names that do not say what their module holds."""


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


def _duplicates(modules: list[Path]) -> dict[str, list[str]]:
    """The files of each class name that several files define; leading underscores do not count."""
    files: dict[str, set[str]] = {}
    for module in modules:
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name.lstrip("_"), set()).add(str(module))
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


def test_modules_are_named_after_what_they_hold() -> None:
    metaphors = {
        str(module.relative_to(ROOT))
        for module in modules()
        if METAPHORS & {module.stem.lstrip("_"), module.parent.name}
    }
    assert not metaphors, sorted(metaphors)
