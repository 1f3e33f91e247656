"""The op that ARCHITECTURE.md adds works everywhere, and takes as few files as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("zeroir", "passes", "runtime")

TRAIN = """
from tests.passes.numbers import assert_equal, inputs, run
from tests.passes.example_programs import LOGICAL
from tests.passes.test_gates import GATES, gate
from tests.cost.support import machine
from zeroir.artifact.schema import decode, encode
from zeroir.cost.durations import Durations
from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program
from zeroir.report.schedule import schedule
from zeroir.verify import verify

text = (GATES / "paged.zir").read_text("utf-8")
text = text.replace("host state = momentum_buffer", "device state = momentum_buffer")
text = text.replace("to_host", "device_copy").replace("to_device", "device_copy")
program = parse(text)
copies = [op for op in program.ops() if isinstance(op, ops.DeviceCopy)]
assert len(copies) == 8, len(copies)
assert parse(print_program(program)) == program
assert decode(Program, encode(program)) == program
report = verify(program, LOGICAL)
assert report.is_valid, report.findings

late = text.replace("  wait !2", "  // wait !2", 1)
assert late != text
assert "Z1" in verify(parse(late), LOGICAL).findings[0].code

durations = Durations(program, machine(memory_bytes_per_s=1e3))
assert all(durations.seconds(op) > 0 for op in copies)
rows = [row for section in program.sections for row in schedule(program, section)]
assert sum(row.op == "device_copy" for row in rows) == len(copies)
batches = inputs(LOGICAL, 2, 1)
expected = run(gate("paged"), batches)
for seed in range(4):
    assert_equal(run(program, batches, seed), expected, range(2), "device_copy")
print("trained")
"""


def change() -> str:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    (block,) = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return str(block)


def changed_files(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)


def copy_of_the_product(folder: Path, diff: str) -> Path:
    """The product with the change applied."""
    for name in (*PRODUCT, "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    apply = ["git", "apply", "-C1", "-"]
    done = subprocess.run(
        apply, input=diff, cwd=folder, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, f"ARCHITECTURE.md's change no longer applies:\n{done.stderr}"
    return folder


def test_an_op_takes_few_files_of_the_product() -> None:
    product = [name for name in changed_files(change()) if name.split("/")[0] in PRODUCT]
    assert 0 < len(product) <= 4


@pytest.mark.slow
def test_the_new_op_is_printed_parsed_proved_costed_and_run(tmp_path: Path) -> None:
    product = copy_of_the_product(tmp_path, change())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (product, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        cwd=product,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.stdout == "trained\n", done.stderr


@pytest.mark.slow
def test_mypy_names_what_was_forgotten(tmp_path: Path) -> None:
    declaration, *_ = re.split(r"(?m)^(?=--- )", change().removeprefix("\n"))[1:]
    assert changed_files(declaration) == ["zeroir/ir/ops.py"]
    product = copy_of_the_product(tmp_path, declaration)
    # It imports the whole product, and so torch and transformers, which take mypy a minute.
    (product / "zeroir" / "__init__.py").write_text("")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--cache-dir",
            str(tmp_path / "cache"),
            "zeroir/cost/durations.py",
        ],
        cwd=product,
        text=True,
        capture_output=True,
        check=False,
    )
    assert re.search(r"durations\.py:\d+: error: .*assert_never.*DeviceCopy", done.stdout), (
        done.stdout
    )
