"""The hooks before a commit and the hosted workflow name only commands that exist, and run what `make check` runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml
from pydantic import BaseModel, Field

ROOT: Final = Path(__file__).parents[2]
CONSTRAINTS: Final = (ROOT / "constraints.txt").read_text("utf-8")


class Hook(BaseModel):
    id: str
    language: str
    entry: str


class Repository(BaseModel):
    repo: str
    hooks: list[Hook]


class Hooks(BaseModel):
    repos: list[Repository]


class Step(BaseModel):
    uses: str | None = None
    run: str | None = None
    options: dict[str, str] = Field(default_factory=dict, alias="with")


class Job(BaseModel):
    steps: list[Step]


class Workflow(BaseModel):
    jobs: dict[str, Job]
    env: dict[str, str]


HOOKS: Final = Hooks.model_validate(
    yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
)
WORKFLOW: Final = Workflow.model_validate(
    yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
)


def _recipe(target: str) -> str:
    """The commands of a target of the Makefile; an error where there is none."""
    result = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _static_checks(commands: list[str]) -> set[str]:
    """Each tool with its subcommand: `ruff format`, `mypy`."""
    checks = set[str]()
    for command in commands:
        words = shlex.split(command)
        if words and words[0].startswith(".venv/bin/"):
            name = words[0].removeprefix(".venv/bin/")
            has_subcommand = len(words) > 1 and not words[1].startswith("-")
            checks.add(f"{name} {words[1]}" if has_subcommand else name)
    return checks


def test_the_hooks_are_the_static_checks_of_make_check() -> None:
    entries = [hook.entry for repository in HOOKS.repos for hook in repository.hooks]
    commands = [line for line in _recipe("check").splitlines() if ".venv/bin/python" not in line]
    assert _static_checks(entries) == _static_checks(commands)
    for repository in HOOKS.repos:
        assert repository.repo == "local"
        assert {hook.language for hook in repository.hooks} == {"system"}


@pytest.mark.parametrize("hook", [h for r in HOOKS.repos for h in r.hooks], ids=lambda h: h.id)
def test_every_hook_calls_a_pinned_tool(hook: Hook) -> None:
    program, *arguments = shlex.split(hook.entry)
    tool = Path(program).name
    assert (Path(sys.executable).parent / tool).exists()
    package = "import-linter" if tool == "lint-imports" else tool
    assert re.search(rf"^{package}==", CONSTRAINTS, re.M)
    usage = [str(Path(sys.executable).parent / tool), *arguments, "--help"]
    assert subprocess.run(usage, capture_output=True, check=False).returncode == 0


def test_every_command_of_the_workflow_is_a_target() -> None:
    targets = []
    for job in WORKFLOW.jobs.values():
        for step in job.steps:
            assert (step.uses is None) != (step.run is None)
            if step.run is not None:
                make, target = shlex.split(step.run)
                assert make == "make"
                assert _recipe(target)
                targets.append(target)
    assert {"check", "test"} <= set(targets)


def test_the_workflow_runs_the_python_and_the_torch_that_the_makefile_installs() -> None:
    (python,) = re.findall(
        r"^PYTHON \?= python(\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    versions = {
        step.options["python-version"]
        for job in WORKFLOW.jobs.values()
        for step in job.steps
        if step.uses is not None and step.uses.startswith("actions/setup-python@")
    }
    assert versions == {python}
    assert WORKFLOW.env["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
    assert re.search(r"^torch==[0-9.]+$", CONSTRAINTS, re.M), "a local version would fix the build"
