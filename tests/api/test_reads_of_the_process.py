"""What code reads of Python's own objects, of the process and of the file system counts at the next step."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from tests.api.living_net import require_counted

beta = 1.0
path = Path("unset")
number, memory = ctypes.c_double(1), bytearray(b"ab")
view = memoryview(memory)
event, lock, numbers = threading.Event(), threading.Lock(), queue.Queue[float]()
numbers.put(1.0)
logger = logging.getLogger("of a test")


class Base:
    """Has one factor."""

    def factor(self) -> float:
        return 1.0


class Other(Base):
    """Has another factor."""

    def factor(self) -> float:
        return 3.0


class OfClasses(type):
    """Has an attribute of classes that is computed."""

    @property
    def factor(cls) -> float:
        return cls.scale  # type: ignore[attr-defined,no-any-return]


class Scales(metaclass=OfClasses):
    """Its class has a factor."""

    scale = 1.0


class Computed:
    """Computes all attributes."""

    def __init__(self) -> None:
        vars(self)["values"] = {"factor": 1.0}

    def __getattr__(self, name: str) -> float:
        return vars(self)["values"][name]  # type: ignore[no-any-return]


given, computed, parser = Base(), Computed(), ConfigParser()
parser["a"] = {"factor": "1"}


def of_the_class() -> float:
    return given.factor()


def grow() -> None:
    (path.parent / "full").write_text("more")


def by_text() -> Any:  # noqa: ANN401
    return eval("3 * beta")  # noqa: S307


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[pytest.MonkeyPatch], object]]] = {
    "globals": (lambda: globals()["beta"], lambda m: m.setitem(globals(), "beta", 2.0)),
    "eval": (by_text, lambda m: m.setitem(globals(), "beta", 2.0)),
    "ctypes": (lambda: number.value, lambda _: setattr(number, "value", 2.0)),
    "view": (lambda: view[0], lambda _: memory.__setitem__(0, 1)),
    "event": (lambda: 2 if event.is_set() else 1, lambda _: event.set()),
    "lock": (lambda: 2 if lock.locked() else 1, lambda _: lock.acquire()),
    "queue": (lambda: numbers.queue[0], lambda _: numbers.queue.appendleft(2.0)),
    "logger": (
        lambda: 2 if logger.isEnabledFor(logging.DEBUG) else 1,
        lambda _: logger.setLevel(logging.DEBUG),
    ),
    "argv": (lambda: len(sys.argv), lambda m: m.setattr(sys, "argv", [*sys.argv, "x"])),
    "metaclass": (lambda: Scales.factor, lambda m: m.setattr(Scales, "scale", 2.0)),
    "computed": (lambda: computed.factor, lambda _: computed.values.update(factor=2.0)),  # type: ignore[attr-defined]
    "config": (lambda: float(parser["a"]["factor"]), lambda _: parser.set("a", "factor", "2")),
    "path": (lambda: 2 if path.exists() else 1, lambda _: path.touch()),
    "listing": (lambda: 1 + len(os.listdir(path.parent)), lambda _: path.touch()),  # noqa: PTH208
    "glob": (lambda: 1 + len([*path.parent.glob("*")]), lambda _: path.touch()),
    "size": (lambda: 1 + os.path.getsize(path.parent / "full"), lambda _: grow()),  # noqa: PTH202
    "folder": (lambda: len(os.getcwd()), lambda m: m.chdir("/")),  # noqa: PTH109
    "class": (of_the_class, lambda m: m.setattr(given, "__class__", Other)),
}


@pytest.mark.parametrize(("read", "change"), CHANGES.values(), ids=CHANGES)
def test_what_changes_counts_at_the_next_step(
    read: Callable[[], Any],
    change: Callable[[pytest.MonkeyPatch], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "path", tmp_path / "stop")
    (tmp_path / "full").touch()
    monkeypatch.chdir(tmp_path)

    require_counted(read, lambda: change(monkeypatch))
