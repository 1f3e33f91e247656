"""ARCHITECTURE.md adds an option again from nothing: its declaration, and the code that obeys it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.changed_product import (
    PRODUCT,
    ROOT,
    apply,
    change,
    changed_files,
    copy_of_the_product,
    run_in,
)

CHANGE = change("Adding an option")

WITHOUT = """
from zeroir.config import make_options
from zeroir.errors import UserError

try:
    make_options({"unshard_bytes": 10**6})
except UserError as error:
    print(error)
"""

WITH = f"""
import sys
from pathlib import Path

import zeroir
from zeroir.api.compiling import compile_model, load_program
from zeroir.cli import main

model = {str(ROOT / "tests/support/models/odd_shapes.py")!r}
compiled = compile_model(model, world_size=2, unshard=zeroir.Unshard(most_bytes=10**6))
assert any("1000000" in step for step in compiled.program.passes), compiled.program.passes
assert " unshard_bytes=1000000 " in compiled.text().partition("\\n")[0]

config = Path("options.toml")
config.write_text("unshard_bytes = 1000000\\n")
assert compile_model(model, world_size=2, config=config).text() == compiled.text()

file = Path("written.zir")
sys.argv = ["zeroir", "compile", model, "--world-size=2", "--unshard-bytes=1000000", f"-o{{file}}"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
loaded = load_program(file)
assert loaded.text() == compiled.text()
assert loaded.options.unshard == compiled.options.unshard
print("obeyed")
"""


def test_an_option_is_its_declaration_and_the_code_that_obeys_it() -> None:
    product = [name for name in changed_files(CHANGE) if name.split("/")[0] in PRODUCT]
    assert len(product) == 2
    assert "zeroir/config/" in product[1]


@pytest.mark.slow
def test_without_the_change_nobody_knows_it_and_with_it_all_do(tmp_path: Path) -> None:
    product = copy_of_the_product(tmp_path)
    apply(CHANGE, product, is_taken_out=True)
    printed = run_in(product, WITHOUT)
    assert printed.startswith("There is no option --unshard-bytes;"), printed
    apply(CHANGE, product)
    for name in changed_files(CHANGE):
        assert (product / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")
    printed = run_in(product, WITH)
    assert printed.splitlines()[-1] == "obeyed", printed
