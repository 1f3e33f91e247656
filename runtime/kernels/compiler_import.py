"""Calls torch's meta kernels without importing torch's compiler, which takes a second or more on every rank.

Many of these kernels are Python functions that are excluded from compilation. Their first call imports the compiler
only to be excluded (``torch._compile._disable_dynamo``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final, TypeVar

F = TypeVar("F", bound=Callable[..., object])

_COMPILER: Final = "torch._dynamo"
_NOTED: Final = "__dynamo_disable"
"""The attribute of a function in which torch stores its excluded version after the first call."""


@contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Within the block, calls of functions that are excluded from compilation do not import the compiler.

    A function that needs the compiler for anything else still imports it.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = _StandIn(_COMPILER)
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class _StandIn(ModuleType):
    """Replaces the compiler's module until any attribute other than ``disable`` is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._called: list[Callable[..., object]] = []

    def disable(self, function: F, *_: object, **__: object) -> F:
        self._called.append(function)
        return function

    def leave(self) -> None:
        """Restore the state before any such function was called."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        for function in self._called:
            vars(function).pop(_NOTED, None)

    def __getattr__(self, name: str) -> object:
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)
