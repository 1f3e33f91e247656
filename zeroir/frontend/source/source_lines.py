"""The lines of the user's code that errors name: of an exception, of a definition, or of a call."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Final

from torch import nn

from zeroir.errors import UserError
from zeroir.frontend.source.imports import NOT_THE_USERS, is_in_a_library

_INSTALLED: Final = Path(sysconfig.get_paths()["purelib"])
_IN_INSTALLED: Final = f"{_INSTALLED}{os.sep}"


def line_in(error: BaseException, path: Path) -> str | None:
    """Return ``file:line`` of the innermost frame of an exception that is in ``path``; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{path}:{frame.lineno}" for frame in frames if Path(frame.filename) == path]
    return lines[-1] if lines else None


def line_of_error(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame of an exception outside Python, torch and zeroir.

    If that is a line of an installed package, the user's line that called it follows: ``transformers/…/modeling_x.py:90
    (called at train.py:12)``. Return None if there is no such frame.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.lineno is not None and _is_of_a_model(frame.filename)
    ]
    if not frames:
        return None
    innermost = _line(frames[-1].filename, frames[-1].lineno or 0)
    own = [frame for frame in frames if not is_in_a_library(frame.filename)]
    if not own or own[-1] is frames[-1]:
        return innermost
    return f"{innermost} (called at {_line(own[-1].filename, own[-1].lineno or 0)})"


def line_of_call() -> str:
    """Return the innermost ``file:line`` that runs, of a model or of the user; empty if no frame is theirs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_of_a_model(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def line_of_user() -> str:
    """Return ``file:line`` of the user's code that called zeroir; empty if no frame is the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        filename = frame.f_code.co_filename
        if is_users_file(filename):
            return _line(filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of_definition(definition: object) -> str:
    """Return ``file:line`` of a function, a method, or a class's constructor; empty if it is Python's or torch's."""
    while isinstance(definition, functools.partial):
        definition = definition.func
    definition = getattr(definition, "__func__", definition)
    if isinstance(definition, FunctionType):
        return line_of_code(definition.__code__)
    if not isinstance(definition, type):
        return line_of_definition(type(definition))
    functions = [f for f in vars(definition).values() if isinstance(f, FunctionType)]
    functions.sort(key=lambda function: function.__name__ != "__init__")
    return line_of_code(functions[0].__code__) if functions else ""


def line_of_forward(module: nn.Module) -> str:
    """Return ``file:line`` of a module's forward; empty if it is torch's."""
    return line_of_definition(type(module).forward)


def line_of_module(model: nn.Module, name: str) -> str:
    """Return ``file:line`` of the constructor of the submodule of this name, or of the nearest one around it.

    The modules of torch are skipped; the result is empty if all are torch's.
    """
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        try:
            owner = model.get_submodule(".".join(parts[:length]))
        except (
            AttributeError,
            RuntimeError,
        ):  # no module has this name, or one of them is TorchScript
            continue
        line = line_of_definition(type(owner))
        if line:
            return line
    return ""


@contextlib.contextmanager
def refusals_at(line: str | Callable[[], str]) -> Iterator[None]:
    """Prefix each UserError of the block, which names no line, with this one unless it is empty."""
    try:
        yield
    except UserError as error:
        place = line if isinstance(line, str) else line()
        if place:
            error.args = (f"{place}: {error}",)
        raise


def is_users_file(filename: str) -> bool:
    """Return whether code is the user's own, rather than that of Python or of an installed package."""
    return _is_of_a_model(filename) and not is_in_a_library(filename)


def _is_of_a_model(filename: str) -> bool:
    """Return whether code is the user's or of an installed package, rather than Python's, torch's or zeroir's."""
    if filename.startswith(NOT_THE_USERS):
        return False
    return filename.startswith(_IN_INSTALLED) or not is_in_a_library(filename)


def line_of_code(code: CodeType, number: int | None = None) -> str:
    """Return ``file:line`` of a line of a function, by default its first.

    It is empty if the function is Python's, torch's or zeroir's.
    """
    if not _is_of_a_model(code.co_filename):
        return ""
    return _line(code.co_filename, number or code.co_firstlineno)


def _line(filename: str, number: int) -> str:
    return f"{_shown(filename, os.getcwd())}:{number}"  # noqa: PTH109 - it is asked for each name of much code


@functools.cache
def _shown(filename: str, folder: str) -> str:
    """Return a file for messages: installed ones start at their package, those below the current folder there."""
    path = Path(filename)
    for base in (_INSTALLED, Path(folder)):
        if path.is_relative_to(base):
            path = path.relative_to(base)
            break
    return path.as_posix()
