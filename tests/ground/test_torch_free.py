"""Whatever reads or rewrites programs starts without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from tests.artifact.test_released import make
from tests.support.stored_modules import write_checkpoint
from tests.support.stored_program import STORED
from zeroir import artifact as artifacts

PACKAGE = Path(__file__).parents[2] / "zeroir"

# A module that both import is loaded once: walking every package shows the modules nobody imports.
WALK = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[3]):
    module = importlib.import_module(name)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if info.name.rpartition(".")[2] != "__main__":
            importlib.import_module(info.name)
            assert "torch" not in sys.modules, f"{info.name} imports torch"
    assert "torch" not in sys.modules, f"{name} imports torch"
"""

HELP = """
import json, sys
from zeroir.cli import main
given = list(sys.argv)
for command in json.loads(given[1]):
    sys.argv = ["zeroir", command, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    assert "torch" not in sys.modules, f"the help of {command} imports torch"
sys.argv = given
"""

LOOK = """
import json, sys
from zeroir.cli.app import run_command
for command in json.loads(sys.argv[2]):
    assert run_command(command) == 0, command
    assert "torch" not in sys.modules, f"{command} imports torch"
"""


def _python(script: str, *arguments: object) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script, *map(json.dumps, arguments)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeroir", "zeroir.api"])
def test_the_public_api_is_light(name: str) -> None:
    _python(f"import sys, {name}; assert 'torch' not in sys.modules")


def test_commands_collect_garbage() -> None:
    """They begin without, but training goes on for months."""
    _python(
        "import gc, sys; from zeroir import cli; from zeroir.cli import app; "
        "app.run_command = lambda _: 0 if gc.isenabled() else 1; cli.main()"
    )


def test_the_help_of_show_loads_nothing_slow() -> None:
    """What it need not load takes most of a second where Python is slow."""
    slow = ("pydantic", "networkx", "numpy", "msgpack", "msgspec", "bokeh", "zeroir.ir.ops")
    _python(
        f"{HELP}assert not (found := [name for name in {slow} if name in sys.modules]), found",
        ["show"],
    )


@pytest.mark.parametrize(
    ("commands", "slow"),
    [
        (
            ["explain Z101", "explain"],
            ("pydantic", "networkx", "numpy", "msgpack", "msgspec", "bokeh"),
        ),
        (["verify {}", "diff {} {}"], ("networkx", "numpy", "bokeh", "zeroir.passes.catalogue")),
        (["show {}"], ("bokeh", "zeroir.passes.catalogue")),
    ],
)
def test_what_looks_at_programs_loads_nothing_that_it_does_not_need(
    commands: list[str], slow: tuple[str, ...]
) -> None:
    lines = [[word.format(STORED) for word in command.split()] for command in commands]
    _python(
        f"{LOOK}assert not (found := [name for name in {slow} if name in sys.modules]), found",
        [],
        lines,
    )


@pytest.mark.slow
def test_help_programs_and_modules_need_no_torch(tmp_path: Path) -> None:
    """Help, whatever looks at a compiled program and neither runs it nor compares it with the model, and all modules.

    In one process, since what one of them has imported needs not be imported for the next.
    """
    helping = ["compile", "run", "report", "checkpoint"]
    names = ("errors", "ir", "artifact", "config", "cost", "passes", "report", "cli", "checkpoint")
    program, out = str(tmp_path / "program.zir"), str(tmp_path / "out")
    artifacts.save(
        make(), Path(program)
    )  # Its passes are of this version, so what they did can be shown.
    checkpoint = str(tmp_path / "checkpoints" / "step-00000001")
    write_checkpoint(Path(checkpoint), nn.Linear(2, 3))
    commands = [
        ["show", program, "--passes"],
        ["verify", program],
        ["diff", program, program],
        *(
            ["export", program, "--format", kind, "-o", f"{out}.{kind}"]
            for kind in ("chrome", "memory-snapshot", "graphviz")
        ),
        ["export", program, "--format", "flight-recorder", "-o", f"{out}.dumps"],
        ["report", program, "-o", out],
        ["checkpoint", "ls", str(tmp_path / "checkpoints")],
        ["checkpoint", "show", checkpoint],
        ["checkpoint", "verify", checkpoint],
        ["checkpoint", "diff", checkpoint, checkpoint],
    ]
    modules = [f"zeroir.{name}" for name in names if _exists(name)]
    _python(HELP + LOOK + WALK, helping, commands, modules)
