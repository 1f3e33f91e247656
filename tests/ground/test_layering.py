"""Who may import whom, as `pyproject.toml` states it."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_follow_the_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


OF_THE_VERIFIER = {
    "zeroir.errors",
    "zeroir.ir",
    "zeroir.ir.allowlist",
    "zeroir.ir.bounds",
    "zeroir.ir.buffers",
    "zeroir.ir.contents",
    "zeroir.ir.copies",
    "zeroir.ir.definitions",
    "zeroir.ir.dtypes",
    "zeroir.ir.effects",
    "zeroir.ir.eight_bit_states",
    "zeroir.ir.factors",
    "zeroir.ir.held_elements",
    "zeroir.ir.mesh",
    "zeroir.ir.micro_batches",
    "zeroir.ir.operators",
    "zeroir.ir.ops",
    "zeroir.ir.output_paths",
    "zeroir.ir.program",
    "zeroir.ir.reports",
    "zeroir.ir.segment",
    "zeroir.ir.text.names",
    "zeroir.ir.text.print_ops",
    "zeroir.ir.views",
    "zeroir.memory.footprint",
}
"""What a program is, the limits and rules that it declares, its text, and the memory model for the budget alone.

The order of ops that passes, memory and costs derive is not among them: a proof that used it would share its errors.
"""


def test_the_verifier_shares_no_analysis_with_what_it_proves() -> None:
    imported: dict[str, set[str]] = {}
    for file in sorted((ROOT / "zeroir/verify").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)):
                    imported.setdefault(module, set()).add(file.name)
                case ast.Import(names=names):
                    for alias in names:
                        imported.setdefault(alias.name, set()).add(file.name)
    own = {name for name in imported if name.split(".")[:2] == ["zeroir", "verify"]}
    outside = {name for name in imported if name.split(".")[0] == "zeroir"} - own
    assert outside == OF_THE_VERIFIER, {
        name: imported.get(name) for name in outside ^ OF_THE_VERIFIER
    }
    assert imported["zeroir.memory.footprint"] == {"budget.py"}
