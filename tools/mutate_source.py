"""Measure how many mutants of the source the fast tests notice.

    python -m tools.mutate_source FOLDER --record docs/records/source-mutants.json

FOLDER gets a copy of the repository, the current folder, in which mutants are made and judged: the state at the first
call is measured, and later calls go on from there. Another state is measured in another folder; functions that have not
changed have the same mutants there. First every test runs once, in a copy that notes which functions each test reaches.
Then each mutant is judged by the tests that reach its function, to the first failure. Survivors are printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import pytest
from cyclopts import App, Parameter
from cyclopts.validators import Number
from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from tools import record_file
from tools.source_mutants.judge import MutantJudge, read_reach, restore
from tools.source_mutants.packages import PACKAGES, modules
from tools.source_mutants.reach import ReachRecorder, instrumented
from tools.source_mutants.sample import Mutant, sample
from tools.source_mutants.verdicts import Line, read_verdicts

NOT_COPIED: Final = (".git", ".venv", "build", ".*_cache", "__pycache__", ".hypothesis")
HEAD: Final = (
    *("package", "made", "noticed", "survived"),
    *("of them unreached", "with tests left", "share"),
)
FAST: Final = "not slow and not gpu"

app = App(name="python -m tools.mutate_source", help=__doc__.partition("\n")[0])


@app.default
def measure(
    folder: Path,
    *,
    count: Annotated[int, Parameter(validator=Number(gte=1))] = 200,
    seed: int = 0,
    seconds: Annotated[float, Parameter(validator=Number(gt=0))] = 20,
    hang_seconds: Annotated[float, Parameter(validator=Number(gt=0))] = 20,
    record: Path | None = None,
) -> None:
    """Measure how many mutants of the source the fast tests notice.

    Args:
        folder: Folder of the copies and the verdicts; made where there is none.
        count: Mutants of each package.
        seed: Another seed chooses other mutants.
        seconds: Processor time for the tests of one mutant. Survivors that had less are judged again.
        hang_seconds: Processor time beyond that after which a test hangs; four times as long on the clock.
        record: JSON file for the table.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        sys.exit(f"Another process uses '{folder}': wait for it, or name another folder.")
    with lock:
        lines = _measured(folder, count, seed, seconds, hang_seconds)
    _publish(lines, record)


def _measured(
    folder: Path, count: int, seed: int, seconds: float, hang_seconds: float
) -> list[Line]:
    """The verdicts on the sample, after those that were missing."""
    if not (folder / "reached.jsonl").exists():
        instrumented_copy = _copy(folder, "instrumented")
        for _, file, module in modules(instrumented_copy):
            file.write_text(instrumented(file.read_text("utf-8"), module), "utf-8")
        _copy(folder, "source")
        _start(instrumented_copy, "reach", folder)
        (folder / "reached.unfinished").rename(folder / "reached.jsonl")
    _start(folder / "source", "judge", folder, count, seed, seconds, hang_seconds)
    lines = read_verdicts(folder / "verdicts.jsonl")
    mutants = [mutant.key for mutant in _sample(folder, count, seed)]
    return [lines[key] for key in mutants if key in lines]


@app.command(show=False)
def reach(folder: Path) -> None:
    """Record in the copy, which is the current folder, what each test reaches."""
    (folder / "reached.unfinished").unlink(missing_ok=True)
    ended = pytest.main(_pytest_options(folder), [ReachRecorder(folder)])
    sys.exit(0 if ended == pytest.ExitCode.TESTS_FAILED else ended)


@app.command(show=False)
def judge(folder: Path, count: int, seed: int, seconds: float, hang_seconds: float) -> None:
    """Judge mutants in the copy, which is the current folder."""
    restore(Path.cwd())
    lines = read_verdicts(folder / "verdicts.jsonl")
    mutants = [
        mutant
        for mutant in _sample(folder, count, seed)
        if (line := lines.get(mutant.key)) is None or (line.left and line.seconds < seconds)
    ]
    if mutants:
        reached = read_reach(folder / "reached.jsonl")
        judging = MutantJudge(mutants, reached, folder, seconds, hang_seconds)
        sys.exit(pytest.main(_pytest_options(folder), [judging]))


def _copy(folder: Path, name: str) -> Path:
    """A copy of the current folder in FOLDER, which may be inside it."""
    patterns = shutil.ignore_patterns(*NOT_COPIED)

    def left_out(parent: str, names: list[str]) -> set[str]:
        own = {folder.name} if Path(parent).resolve() == folder.parent else set()
        return {*patterns(parent, names), *own}

    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(Path.cwd(), folder / name, symlinks=True, ignore=left_out)
    return folder / name


def _start(copy: Path, command: str, *arguments: object) -> None:
    path = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tools.mutate_source", command, *map(str, arguments)]
    # What went wrong has been printed.
    if code := subprocess.run(words, cwd=copy, env=environment, check=False).returncode:
        sys.exit(code)


def _pytest_options(folder: Path) -> list[str]:
    places = ["--basetemp", str(folder / "tests"), "-p", "no:cacheprovider"]
    return ["-q", "-m", FAST, "--hypothesis-seed=0", *places]


def _sample(folder: Path, count: int, seed: int) -> list[Mutant]:
    """The mutants, which are made once."""
    file = folder / f"sample-{seed}-{count}.json"
    kind = TypeAdapter(list[Mutant])
    if not file.exists():
        made = list(sample(folder / "source", seed, count))
        file.write_bytes(kind.dump_json(made))
    return kind.validate_json(file.read_bytes())


def _publish(lines: Sequence[Line], record: Path | None) -> None:
    """Print the survivors, and the table, which the record has, too."""
    for line in lines:
        if not line.is_noticed:
            print(f"{line.module} {line.function}: {line.run} tests ran, {line.left} did not")
            print(f"{line.diff}\n")
    rows = [
        _row(package, [line for line in lines if line.package == package]) for package in PACKAGES
    ]
    rows.append(_row("all", lines))
    record_file.publish(record, "mutate_source", HEAD, rows)


def _row(name: str, lines: Sequence[Line]) -> list[str]:
    noticed = sum(line.is_noticed for line in lines)
    unreached = sum(line.outcome == "unreached" for line in lines)
    cut = sum(line.outcome == "survived" and line.left > 0 for line in lines)
    share = f"{noticed / len(lines):.1%}" if lines else "-"
    return [name, *map(str, (len(lines), noticed, len(lines) - noticed, unreached, cut)), share]


if __name__ == "__main__":
    app()
