"""ARCHITECTURE.md adds one of the optimizers again from nothing, and all of it is in the files that it says."""

from __future__ import annotations

import re
import subprocess
from filecmp import cmpfiles
from pathlib import Path

import pytest

from tests.docs.changed_product import (
    PAGE,
    PRODUCT,
    ROOT,
    apply,
    change,
    changed_files,
    copy_of_the_product,
    run_in,
)

HEADING = "Adding an optimizer"
NAME = "lion"
NAMED = re.compile(rf"\b{NAME}\b", re.IGNORECASE)

WITHOUT = f"""
from pathlib import Path
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import Algorithm

assert {NAME!r} not in set(Algorithm)
options = {{"world_size": 2, "precision": "bf16", "optimizer": "adamw"}}
comparison = check_model({str(ROOT / "tests/support/models/odd_shapes.py")!r}, make_options(options), steps=2, seed=1)
print(comparison.is_equal)
try:
    make_options({{"optimizer": {NAME!r}}})
except UserError as error:
    print(error)
"""

WITH = f"""
import torch
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.deepspeed import translate

for options in (
    {{"stage": 3, "precision": "bf16"}},
    {{"stage": 1, "optimizer_bits": 8, "group": "tall:optimizer=muon"}},
    {{"stage": 2, "offload": "optimizer", "micro_steps": 2}},
):
    options = {{"optimizer": {NAME!r}, "world_size": 3, "weight_decay": 0.1, **options}}
    model = {str(ROOT / "tests/support/models/odd_shapes.py")!r}
    print(check_model(model, make_options(options), steps=2, seed=1).is_equal)
block = {{"type": "Lion", "params": {{"betas": [0.5, 0.6]}}}}
translation = translate({{"optimizer": block}}, given={{}}, world_size=2, example_batch_size=8)
print(translation.options["optimizer"], translation.options["beta2"])
"""


def without_the_optimizer(folder: Path) -> Path:
    """A copy of the product without its files, and without its lines in the catalogues and the grammar."""
    product = copy_of_the_product(folder)
    for name in ("zeroir/ir/optimizers", "runtime/optimizers"):
        (product / name / f"{NAME}.py").unlink()
        catalogue = product / name / "catalogue.py"
        lines = catalogue.read_text("utf-8").splitlines(keepends=True)
        catalogue.write_text("".join(line for line in lines if not NAMED.search(line)), "utf-8")
    grammar = product / "docs/ir.md"
    grammar.write_text(grammar.read_text("utf-8").replace(f' | "{NAME}"', ""), "utf-8")
    return product


def difference(before: Path, after: Path) -> str:
    """A unified diff, of folders beside each other, with one line of context."""
    command = ["git", "diff", "--no-index", "--no-color", "-U1", before.name, after.name]
    done = subprocess.run(command, cwd=before.parent, text=True, capture_output=True, check=False)
    text = re.sub(r"^(diff --git|index|new file mode) .*\n", "", done.stdout, flags=re.MULTILINE)
    for side, name in (("a", before.name), ("b", after.name)):
        text = text.replace(f" {side}/{name}/", f" {side}/")
    return text


def without_places(diff: str) -> str:
    """The diff without the numbers of lines, which other changes move."""
    return re.sub(r"^@@ .*", "@@", diff, flags=re.MULTILINE)


@pytest.fixture
def product(tmp_path: Path) -> Path:
    return without_the_optimizer(tmp_path / "before")


def test_the_page_shows_all_that_there_is_of_it(
    product: Path, tmp_path: Path, update_golden: bool
) -> None:
    whole = copy_of_the_product(tmp_path / "after")
    expected = difference(product, whole)
    if update_golden:
        PAGE.write_text(PAGE.read_text("utf-8").replace(change(HEADING), expected), "utf-8")
    assert without_places(change(HEADING)) == without_places(expected)
    changed = [name for name in changed_files(expected) if name.split("/")[0] in PRODUCT]
    assert 0 < len(changed) <= 4


def test_nothing_else_names_it(product: Path) -> None:
    files = [path for name in PRODUCT for path in (product / name).rglob("*.py")]
    assert len(files) > 300
    assert not [path for path in files if NAMED.search(path.read_text("utf-8"))]


@pytest.mark.slow
def test_without_the_change_nobody_knows_it_and_with_it_trains(product: Path) -> None:
    printed = run_in(product, WITHOUT).splitlines()
    assert printed[0] == "True", printed
    assert printed[1].startswith(f"--optimizer is {NAME}, but should be 'sgd', 'momentum', ")
    apply(change(HEADING), product)
    files = changed_files(change(HEADING))
    assert cmpfiles(product, ROOT, files, shallow=False) == (files, [], [])
    assert run_in(product, WITH) == "True\nTrue\nTrue\nlion 0.6\n"
