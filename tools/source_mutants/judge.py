"""Tests judge mutants, each in a process forked from one that has imported and collected everything.

The code of functions is replaced in the forked process, and the file in the copy of the source, for the processes that
tests start. A test that fails without the mutant, too, judges nothing.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import NoReturn

import pytest

from tools.source_mutants.packages import TESTS, modules
from tools.source_mutants.sample import Mutant, codes

_KEPT = ".unchanged"
_WALL_S_PER_CPU_S = 4
"""The machine may be busy with other things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one test reaches; ``names`` are those of the functions and their classes alone."""

    test: str
    functions: frozenset[str]
    names: frozenset[str]


def read_reach(file: Path) -> list[Reach]:
    """What each test reaches, as ``reach.ReachRecorder`` has written it; tests that reach little first."""
    lines = sorted(
        map(json.loads, file.read_text().splitlines()), key=lambda x: len(x["functions"])
    )
    found = []
    for line in lines:
        names = (name for function in line["functions"] for name in _names(function))
        functions = frozenset(map(sys.intern, line["functions"]))
        found.append(Reach(test=line["test"], functions=functions, names=frozenset(names)))
    return found


@cache
def _names(function: str) -> tuple[str, ...]:
    return tuple(map(sys.intern, function.partition(" ")[2].split(".")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests say of a mutant: it survived, or a test failed, hung or crashed, the last of ``run`` many.

    ``left`` tests of those that reach the function were not run, because the time was over.
    """

    outcome: str
    run: int
    left: int
    test: str | None = None


class MutantJudge:
    """A plugin of pytest that runs the collected tests on mutants only, and writes a line of JSON for each."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        reach: Sequence[Reach],
        folder: Path,
        seconds: float,
        hang_seconds: float,
    ) -> None:
        self._mutants, self._folder = mutants, folder
        self._seconds, self._hang_s = seconds, seconds + hang_seconds
        self._reach = reach
        self._unfit: set[str] = set()
        self._fit: set[str] = set()
        self._items: dict[str, pytest.Item] = {}
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge each mutant in place of running the tests."""
        assert not session.testsfailed, "the tests cannot be collected"
        self._items = {item.nodeid: item for item in session.items}
        self._reach = [reach for reach in self._reach if reach.test in self._items]
        self._capture()
        # Files change within a second, which compiled code does not notice.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        gc.unfreeze()
        found = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType:
                found[_place(each.__code__)].append(each)
        self._functions = found
        gc.freeze()
        with (self._folder / "verdicts.jsonl").open("a") as file:
            for mutant in self._mutants:
                verdict = self._judged(mutant)
                key = dict(zip(("module", "function", "diff"), mutant.key, strict=True))
                line = {
                    "package": mutant.package,
                    **key,
                    "seconds": self._seconds,
                    **asdict(verdict),
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
        return True

    def _capture(self) -> None:
        """Capture the models of the tests once; no mutant takes part in that."""
        captures = sys.modules.get("tests.support.captures")
        if captures is not None:
            for place, *key in json.loads((self._folder / "captures.json").read_text()):
                others = (tuple(x) if isinstance(x, list) else x for x in key)
                captures._captured(str(Path.cwd() / place), *others)

    def _judged(self, mutant: Mutant) -> Verdict:
        tests = self._ordered(mutant)
        if not tests:
            return Verdict(outcome="unreached", run=0, left=0)
        original = mutant.file.read_text("utf-8")
        with _written(mutant):
            verdict = self._run(tests, (original, mutant))
        if verdict.test is None or verdict.test in self._fit:
            return verdict
        if self._run([verdict.test], None).outcome == "survived":
            self._fit.add(verdict.test)
            return verdict
        self._unfit.add(verdict.test)
        return self._judged(mutant)

    def _ordered(self, mutant: Mutant) -> list[str]:
        """The tests that reach the function, those that may say most about it first.

        These reach what the changed lines name, too; then come the package's own, one variant of each after the other,
        and those that reach little else.
        """
        name = f"{mutant.module} {mutant.function}"
        places = tuple(f"{folder}/" for folder in TESTS[mutant.package])
        words = {word for line in _changed(mutant.diff) for word in re.findall(r"\w+", line)}
        ranks: list[tuple[int, int, int, str]] = []
        variants: Counter[str] = Counter()
        for reach in self._reach:
            if name in reach.functions and reach.test not in self._unfit:
                variants[reach.test.partition("[")[0]] += 1
                is_elsewhere = not reach.test.startswith(places)
                variant = variants[reach.test.partition("[")[0]] + 2 * is_elsewhere
                named = len(words & reach.names)
                ranks.append((-named, variant, len(reach.functions), reach.test))
        return [test for *_, test in sorted(ranks, key=lambda rank: rank[:3])]

    def _run(self, tests: Sequence[str], change: tuple[str, Mutant] | None) -> Verdict:
        """Run tests in a forked process to the first that fails."""
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiver)
            self._become(tests, change, sender)
        os.close(sender)
        deadline = time.monotonic() + self._hang_s * _WALL_S_PER_CPU_S
        status = None
        while status is None and time.monotonic() < deadline:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(0.01)
        # It leads a group, with all that its tests have started.
        _kill_group(pid)
        if status is None:
            os.waitpid(pid, 0)
        with os.fdopen(receiver, "rb") as pipe:
            run = len(pipe.read())
        if status == 0:
            return Verdict(outcome="survived", run=run, left=len(tests) - run)
        outcome = {None: "hung", -signal.SIGXCPU: "hung", 1: "failed"}.get(status, "crashed")
        last = tests[max(run - 1, 0)]
        return Verdict(outcome=outcome, run=run, left=0, test=last)

    def _become(
        self, tests: Sequence[str], change: tuple[str, Mutant] | None, sender: int
    ) -> NoReturn:
        """In the forked process: run the tests, with a byte to the parent before each."""
        os.setsid()
        soft = math.ceil(self._hang_s)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))
        code = 2
        try:
            if change is not None:
                self._patch(*change)
            code = self._first_failure(tests, sender)
        finally:
            os._exit(code)

    def _first_failure(self, tests: Sequence[str], sender: int) -> int:
        items = [self._items[test] for test in tests]
        session = items[0].session
        start = time.monotonic()
        for item, following in zip(items, [*items[1:], None], strict=True):
            used_s = max(sum(os.times()[:4]), (time.monotonic() - start) / _WALL_S_PER_CPU_S)
            if used_s > self._seconds:
                break
            os.write(sender, b".")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0

    def _patch(self, original: str, mutant: Mutant) -> None:
        new = codes(mutant.module_source, mutant.file)
        for place, code in codes(original, mutant.file).items():
            if place in new and new[place] != code:
                for function in self._functions.get((str(mutant.file), *place), ()):
                    function.__code__ = new[place]


def _changed(diff: str) -> list[str]:
    return [line for line in diff.splitlines() if line.startswith(("-", "+"))]


def _place(code: CodeType) -> tuple[str, str, int]:
    return str(Path(code.co_filename).resolve()), code.co_qualname, code.co_firstlineno


@contextmanager
def _written(mutant: Mutant) -> Iterator[None]:
    """The file with the change; afterwards as it was, with its time, so that its compiled code is valid again."""
    kept = mutant.file.with_suffix(_KEPT)
    shutil.copy2(mutant.file, kept)
    try:
        mutant.file.write_text(mutant.module_source, "utf-8")
        yield
    finally:
        kept.replace(mutant.file)


def restore(root: Path) -> None:
    """Put the file back that was changed when the process ended."""
    for _, file, _ in modules(root):
        kept = file.with_suffix(_KEPT)
        if kept.exists():
            kept.replace(file)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
