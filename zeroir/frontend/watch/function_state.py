"""The state of functions: their globals, closures, defaults and code, and the modules that they import."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType

from zeroir.frontend.source.imports import is_main
from zeroir.frontend.source.namespaces import ClosureVariables
from zeroir.frontend.watch.walk import NumberPlace, Walk


def add_global(walk: Walk, function: FunctionType, name: str, line: str) -> None:
    """Add a global that a function reads at this line."""
    space = function.__globals__
    if walk.is_stored(space, name):
        return
    value = space[name]
    module = function.__module__
    label = name if is_main(module) else f"{module}.{name}"
    label = walk.label(label, (id(space), name))
    if label not in walk.numbers:
        walk.quick.add_global(space, name, value)
    walk.lines.setdefault(label, line)
    walk.add(label, value, NumberPlace(space, name))


def add_imported(walk: Walk, name: str, line: str) -> None:
    """Add a module that a function imports, and the packages that it is in."""
    parts = name.split(".")
    for count_of_parts in range(1, len(parts) + 1):
        full_name = ".".join(parts[:count_of_parts])
        module = sys.modules.get(full_name)
        if module is not None:
            walk.lines.setdefault(full_name, line)
            walk.add(walk.label(full_name, id(module)), module)


def add_closure(walk: Walk, function: FunctionType) -> None:
    """Add the variables of a function's closure, its code and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        variables = ClosureVariables(function)
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if walk.is_stored(variables, name):
            continue
        label = _add_variable(walk, function, name, value, NumberPlace(variables, name))
        if label not in walk.numbers:
            walk.quick.add_cell(cell, value)
    _add_code(walk, function)
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    for name, value in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        _add_variable(walk, function, name, value)
    of_keywords = function.__kwdefaults__ or {}
    contents = dict(of_keywords)
    walk.quick.add_container(of_keywords, contents)
    for name, value in contents.items():
        _add_variable(walk, function, name, value, NumberPlace(of_keywords, name, contents))


def _add_code(walk: Walk, function: FunctionType) -> None:
    """Add a function's code, and which objects its defaults are, all of which may be replaced."""
    if function.__code__ is not walk.code.codes[function]:
        name = walk.label(f"{function.__qualname__}.__code__", id(function))
        walk.lines.setdefault(name, walk.code.line_of(function))
        walk.leaves[name] = (CodeType, id(function.__code__))
    for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
        walk.quick.add_attribute(function, attribute, getattr(function, attribute))


def _add_variable(
    walk: Walk, function: FunctionType, name: str, value: object, place: NumberPlace | None = None
) -> str:
    """Add a variable of a function, and return its name in messages."""
    label = f"{name} of {function.__qualname__}"
    # Functions that one function makes have the same name.
    label = walk.label(label, (id(function), name))
    walk.lines.setdefault(label, walk.code.line_of(function))
    walk.add(label, value, place)
    return label
