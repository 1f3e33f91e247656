"""The op that ARCHITECTURE.md adds works everywhere, and takes as few files as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.changed_product import (
    PRODUCT,
    apply,
    change,
    changed_files,
    copy_of_the_product,
    run_in,
)

TRAIN = """
from tests.passes.numbers import assert_equal, inputs, run
from tests.passes.example_programs import LOGICAL
from tests.passes.test_gates import GATES, gate
from tests.cost.support import machine
from zeroir.artifact.schema import pack, unpack
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
assert unpack(Program, pack(program)) == program
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


CHANGE = change("Adding an op")


def test_an_op_takes_few_files_of_the_product() -> None:
    product = [name for name in changed_files(CHANGE) if name.split("/")[0] in PRODUCT]
    assert 0 < len(product) <= 4


@pytest.mark.slow
def test_the_new_op_is_printed_parsed_proved_costed_and_run(tmp_path: Path) -> None:
    product = copy_of_the_product(tmp_path)
    apply(CHANGE, product)
    assert run_in(product, TRAIN) == "trained\n"


@pytest.mark.slow
def test_mypy_names_what_was_forgotten(tmp_path: Path) -> None:
    declaration, *_ = re.split(r"(?m)^(?=--- )", CHANGE.removeprefix("\n"))[1:]
    assert changed_files(declaration) == ["zeroir/ir/ops.py"]
    product = copy_of_the_product(tmp_path)
    apply(declaration, product)
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
