"""Which functions each test reaches, also in processes that it starts: the source says so itself, in a copy.

A result that is kept (``lru_cache``, a fixture of a module) counts for every test that uses it.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Hashable
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from tools.source_mutants import notes

_IMPORT: Final = "from tools.source_mutants.notes import note as _note"


def instrumented(source: str, module: str) -> str:
    """The source of a module whose functions note that they are called; nested ones count as those around them."""
    tree = ast.parse(source)
    lines = source.splitlines()
    added: dict[int, str] = {}
    header = tree.body[0].end_lineno or 0 if tree.body else 0
    for statement in tree.body:
        match statement:
            case ast.ImportFrom(module="__future__"):
                header = statement.end_lineno or 0
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                added |= _calls(statement, f"{module} {statement.name}")
            case ast.ClassDef():
                for member in statement.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                        added |= _calls(member, f"{module} {statement.name}.{member.name}")
    for number in sorted({*added, header}, reverse=True):
        lines.insert(number, added.get(number, _IMPORT))
    return "\n".join(lines) + "\n"


def _calls(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> dict[int, str]:
    """The lines to insert, by the number of lines before them."""
    calls = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        # A stub of one line has nothing to note.
        if body and body[0].lineno > node.lineno:
            first = min([body[0].lineno, *(item.lineno for item in _decorators(body[0]))])
            calls[first - 1] = f"{' ' * body[0].col_offset}_note({name!r})"
    return calls


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.decorator_list
        case _:
            return []


class ReachRecorder:
    """A plugin of pytest that writes, for each test, its duration and the functions that it has reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_fixture: dict[str, set[str]] = {}
        self._captures: list[list[object]] = []
        _count_kept_results()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """A test that is given the same value later has reached its functions, too."""
        with notes.noted() as functions:
            value = yield
        if request.scope != "function":
            self._by_fixture.setdefault(fixturedef.argname, set()).update(functions)
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Keep what was captured, so that judging captures it once."""
        captures = sys.modules.get("tests.support.captures")
        if captures is not None:
            self._list_captures(captures)
        done = yield
        (self._folder / "captures.json").write_text(json.dumps(self._captures))
        return done

    def _list_captures(self, captures: ModuleType) -> None:
        capture = captures._captured

        def listed(*key: object) -> object:
            spec, *others = key
            place = [os.path.relpath(str(spec)), *others]
            if place not in self._captures:
                self._captures.append(place)
            return capture(*key)

        vars(captures)["_captured"] = listed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write what a test has reached when it is over."""
        own = self._folder / "of-processes"
        own.write_text("")
        notes.follow(str(own))
        began = time.monotonic()
        with notes.noted() as functions:
            done = yield
        functions.update(own.read_text().split("\n")[:-1])
        for name in getattr(item, "fixturenames", ()):
            functions |= self._by_fixture.get(name, set())
        line = {
            "test": item.nodeid,
            "seconds": round(time.monotonic() - began, 3),
            "functions": sorted(functions),
        }
        with (self._folder / "reached.unfinished").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return done


def _count_kept_results() -> None:
    """Whoever takes a result that a function of the project or its tests has kept reaches what made it."""
    original = functools.lru_cache

    def lru_cache(maxsize: int | Callable[..., object] | None = 128, typed: bool = False) -> object:
        if callable(maxsize):
            return lru_cache()(maxsize)  # type: ignore[operator]

        def decorate(function: Callable[..., Hashable]) -> object:
            if not function.__module__.startswith(_KEEPERS):
                return original(maxsize, typed)(function)

            @original(maxsize, typed)
            def kept(*args: Hashable, **options: Hashable) -> tuple[object, set[str]]:
                with notes.noted() as functions:
                    return function(*args, **options), functions

            def replayed(*args: Hashable, **options: Hashable) -> object:
                value, functions = kept(*args, **options)
                notes.noted_here(functions)
                return value

            vars(replayed).update({name: getattr(kept, name) for name in _CACHE_METHODS})
            return functools.update_wrapper(replayed, function)

        return decorate

    setattr(functools, "lru_cache", lru_cache)  # noqa: B010 - types differ
    setattr(functools, "cache", lru_cache(maxsize=None))  # noqa: B010 - types differ


_KEEPERS = ("tests", *(f"zeroir.{name}" for name in ("api", "ir", "passes", "verify", "runtime")))
_CACHE_METHODS = ("cache_clear", "cache_info", "cache_parameters")
