"""Tracks, while a model runs, which module calls are open and which line of the model is executed."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import fx, nn

from zeroir.frontend._torch_private import (
    Function,
    annotated,
    annotation_of,
)
from zeroir.frontend.capture.captured_graph import ModuleCall
from zeroir.frontend.capture.code_contexts import Checkpoint, line_of_caller
from zeroir.frontend.lowering.units import inside_of

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_SITE = Path(sysconfig.get_paths()["purelib"])


@dataclass(frozen=True, slots=True)
class NodeOrigin:
    """The annotation of a node: the open module calls, the number of the torch function's call, ``file:line``."""

    calls: tuple[ModuleCall, ...]
    number: int
    source: str


UNKNOWN_ORIGIN = NodeOrigin(calls=(), number=0, source="")
"""The origin of a node that the tracer created on its own."""


def origin_of(node: fx.Node) -> NodeOrigin:
    """Return the origin of a node; ``UNKNOWN_ORIGIN`` where the tracer created it on its own."""
    annotation = annotation_of(node)
    return annotation if isinstance(annotation, NodeOrigin) else UNKNOWN_ORIGIN


@dataclass
class OriginTracker:
    """Tracks the module calls of one model through forward hooks.

    ``folder`` is that of the model file. The file ``stop`` calls the model: its frame and the frames outside it are not
    the model's.
    """

    folder: Path
    stop: str
    checkpoints: list[Checkpoint] = field(default_factory=list)
    _open: list[tuple[Checkpoint, int]] = field(default_factory=list)
    _calls: list[ModuleCall] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _sources: dict[tuple[str, int], str] = field(default_factory=dict)
    _number: int = 0

    def install(self, model: nn.Module, opaque: Collection[str] = frozenset()) -> None:
        """Install hooks outside all other hooks, so that casts count as part of their module.

        Modules inside those that are ``opaque`` have none: their code runs in the program, too.
        """
        inside = tuple(map(inside_of, opaque))
        for name, module in model.named_modules():
            if name and name.startswith(inside):
                continue
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def restart(self) -> None:
        """Reset for a new forward."""
        self.checkpoints.clear()
        self._open.clear()
        self._calls.clear()
        self._counts.clear()
        self._number = 0

    def _enter(self, name: str, _: nn.Module, __: object) -> None:
        if self._open and self._open[-1][1] == len(self._calls):
            self._open[-1][0].modules.append(name)
        self._calls.append(ModuleCall(module=name, index=self._counts[name]))
        self._counts[name] += 1

    def _leave(self, _: nn.Module, __: object, ___: object) -> None:
        self._calls.pop()

    def checkpoint(self) -> AbstractContextManager[None]:
        """Record an activation checkpoint, and the modules that are called within it."""
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

    def around(self, func: Function) -> Callable[..., object]:
        """Return a function that calls ``func`` and annotates its nodes with their origin."""
        return annotated(func, self.origin)

    def running(self) -> str | None:
        """Return the name of the innermost module that is called now, empty for the model itself, if there is one."""
        return self._calls[-1].module if self._calls else None

    def origin(self) -> NodeOrigin:
        """Return the origin of the present call of a torch function."""
        self._number += 1
        return NodeOrigin(calls=tuple(self._calls), number=self._number, source=self.line())

    def line(self) -> str:
        """Return ``file:line`` of the innermost frame that belongs to a model rather than to torch or zeroir."""
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
