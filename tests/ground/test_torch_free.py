"""Whatever reads or rewrites programs starts without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "zeroir"

# A module that both import is loaded once: walking every package shows the modules nobody imports.
WALK = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if info.name.rpartition(".")[2] != "__main__":
            importlib.import_module(info.name)
            assert "torch" not in sys.modules, f"{info.name} imports torch"
    assert "torch" not in sys.modules, f"{name} imports torch"
"""

HELP = """
import sys
from zeroir.cli import main
for command in sys.argv[1:]:
    sys.argv = ["zeroir", command, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    assert "torch" not in sys.modules, f"the help of {command} imports torch"
"""

LOOK = """
import json, sys
from zeroir.cli.app import run_command
for command in json.loads(sys.argv[1]):
    assert run_command(command) == 0, command
    assert "torch" not in sys.modules, f"{command} imports torch"
"""


def _python(script: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


@pytest.mark.parametrize("name", ["zeroir", "zeroir.api"])
def test_the_public_api_is_light(name: str) -> None:
    _python(f"import sys, {name}; assert 'torch' not in sys.modules")


def test_no_module_imports_torch() -> None:
    names = ("errors", "ir", "artifact", "config", "cost", "passes", "report", "cli")
    _python(WALK, *[f"zeroir.{name}" for name in names if _exists(name)])


def test_help_is_shown_without_torch() -> None:
    commands = ("show", "compile", "check", "run", "simulate", "estimate", "export", "report")
    _python(HELP, *commands)


def test_the_help_of_show_loads_nothing_slow() -> None:
    """What it need not load takes most of a second where Python is slow."""
    slow = ("pydantic", "networkx", "numpy", "msgpack", "bokeh", "zeroir.ir.ops")
    _python(
        f"{HELP}assert not (found := [name for name in {slow} if name in sys.modules]), found",
        "show",
    )


def test_a_program_is_read_without_torch(tmp_path: Path) -> None:
    """Whatever looks at a compiled program, and neither runs it nor compares it with the model."""
    program = str(PACKAGE.parent / "tests" / "data" / "schema_1_0.zir")
    out = str(tmp_path / "out")
    commands = [
        ["show", program, "--passes"],
        ["show", program, "--pass", "1"],
        ["verify", program],
        ["diff", program, program],
        *(
            ["export", program, "--format", kind, "-o", out]
            for kind in ("chrome", "memory-snapshot", "graphviz")
        ),
        ["export", program, "--format", "flight-recorder", "-o", f"{out}.dumps"],
        ["report", program, "-o", out],
    ]
    _python(LOOK, json.dumps(commands))
