"""Know, while a model runs, which module calls it is in and which line of the model it executes."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from zeroir.frontend._torch_private import annotated
from zeroir.frontend.joint import Call
from zeroir.frontend.regions import Checkpoint, line_of_caller

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_SITE = Path(sysconfig.get_paths()["purelib"])


@dataclass(frozen=True, slots=True)
class Note:
    """What a node carries: the module calls it happened in, the number of the torch function, ``file:line``."""

    calls: tuple[Call, ...]
    origin: int
    source: str


@dataclass
class Tracker:
    """Follows the module calls of one model through forward hooks.

    ``folder`` is where the model file lies; frames beyond the file ``stop``, which calls the model, are not its own.
    """

    folder: Path
    stop: str
    checkpoints: list[Checkpoint] = field(default_factory=list)
    _open: list[tuple[Checkpoint, int]] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _sources: dict[tuple[str, int], str] = field(default_factory=dict)
    _origin: int = 0

    def follow(self, model: nn.Module) -> None:
        """Install the hooks; they stand outside every other hook, so that casts count as part of their module."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(_Enter(self, name), prepend=True)
            module.register_forward_hook(_Leave(self), always_call=True)

    def restart(self) -> None:
        """Begin a forward."""
        self.checkpoints.clear()
        self._open.clear()
        self._calls.clear()
        self._counts.clear()
        self._origin = 0

    def enter(self, name: str) -> None:
        """A module's call begins."""
        if self._open and self._open[-1][1] == len(self._calls):
            self._open[-1][0].modules.append(name)
        self._calls.append(Call(module=name, count=self._counts[name]))
        self._counts[name] += 1

    def leave(self) -> None:
        """The innermost module's call ends."""
        self._calls.pop()

    def checkpoint(self) -> AbstractContextManager[None]:
        """Note an activation checkpoint; the modules that are called within are noted with it."""
        around = tuple(call.module for call in self._calls)
        checkpoint = Checkpoint(around=around, source=line_of_caller(self.folder))
        self.checkpoints.append(checkpoint)
        return self._within(checkpoint)

    @contextmanager
    def _within(self, checkpoint: Checkpoint) -> Iterator[None]:
        self._open.append((checkpoint, len(self._calls)))
        try:
            yield
        finally:
            self._open.pop()

    def around(self, func: Callable[..., object]) -> Callable[..., object]:
        """``func`` such that its nodes carry where they come from."""
        return annotated(func, self.note)

    def note(self) -> Note:
        """Where the model is now."""
        self._origin += 1
        return Note(calls=tuple(self._calls), origin=self._origin, source=self.line())

    def line(self) -> str:
        """``file:line`` of the innermost frame that belongs to a model rather than to torch or zeroir."""
        frame = sys._getframe(1)
        while frame is not None:
            filename = frame.f_code.co_filename
            if filename == self.stop:
                break
            if not filename.startswith(_SKIPPED) and not filename.startswith("<"):
                key = (filename, frame.f_lineno)
                if key not in self._sources:
                    self._sources[key] = f"{self._relative(filename)}:{frame.f_lineno}"
                return self._sources[key]
            if frame.f_back is None:
                break
            frame = frame.f_back
        return ""

    def _relative(self, filename: str) -> str:
        path = Path(filename)
        for base in (self.folder, _SITE):
            if path.is_relative_to(base):
                return path.relative_to(base).as_posix()
        return path.name


@dataclass(frozen=True)
class _Enter:
    tracker: Tracker
    name: str

    def __call__(self, _: nn.Module, __: object) -> None:
        self.tracker.enter(self.name)


@dataclass(frozen=True)
class _Leave:
    tracker: Tracker

    def __call__(self, _: nn.Module, __: object, ___: object) -> None:
        self.tracker.leave()
