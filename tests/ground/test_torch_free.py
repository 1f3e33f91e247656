"""Whatever reads or rewrites programs starts without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "zeroir"

# A module that both import is loaded once: walking every package shows the modules nobody imports.
WALK = """
import importlib, pkgutil, sys
name = sys.argv[1]
module = importlib.import_module(name)
for info in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
    if info.name.rpartition(".")[2] != "__main__":
        importlib.import_module(info.name)
assert "torch" not in sys.modules, f"{name} imports torch"
"""

HELP = """
import sys
from zeroir.cli import main
sys.argv = ["zeroir", sys.argv[1], "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert "torch" not in sys.modules, "it imports torch"
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


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ("artifact", "cli", "config", "cost", "errors", "ir", "passes", "report")
        if _exists(name)
    ],
)
def test_no_module_imports_torch(name: str) -> None:
    _python(WALK, f"zeroir.{name}")


@pytest.mark.parametrize("command", ["show", "compile", "check", "run"])
def test_help_is_shown_without_torch(command: str) -> None:
    _python(HELP, command)
