"""The code that a step of a model runs, as far as its text tells, and the names that this code mentions.

It begins with the forward methods of the model's modules, with hooks and with the loss, and follows every function that
these mention: globals, variables of closures, and methods of the model's classes by their names. What is not mentioned
in this code cannot enter the computation. Functions of Python and torch are followed only as methods of modules.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Final

from torch import nn

from zeroir.frontend._torch_hooks import HOOKS_OF_MODULES, gradient_hooks
from zeroir.frontend.source.imports import is_known_package
from zeroir.frontend.source.source_lines import is_users_file, line_of_code

_LOADS_GLOBAL: Final = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_LOADS_ATTRIBUTE: Final = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"))
_READS_ANY_NAME: Final = frozenset(("getattr", "vars", "globals", "eval", "exec", "__dict__"))
"""Names of functions and attributes by which code may read what it does not mention."""


@dataclass(slots=True)
class ReachedCode:
    """The functions that a step may run. ``globals_of`` has the globals that each mentions.

    ``attributes`` maps the names of attributes, and texts that may be such names, to the line that mentions them; the
    user's lines win over those of libraries, and ``of_users`` are those that the user's own code mentions, and
    ``of_package`` those of each package. ``reads_any_name`` is whether the user's own code may read attributes that it
    does not mention; libraries do so for bookkeeping everywhere. ``objects`` are those that are called as functions,
    those whose methods are, and partial functions, with names for messages.
    """

    functions: list[FunctionType] = field(default_factory=list)
    globals_of: list[tuple[FunctionType, str, str]] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    of_users: set[str] = field(default_factory=set)
    of_package: dict[str, set[str]] = field(default_factory=dict)
    reads_any_name: bool = False
    objects: list[tuple[str, object]] = field(default_factory=list)
    # Functions with the same code may have other closures. They are kept alive, so that no two of them share an id.
    _seen: dict[int, FunctionType] = field(default_factory=dict)
    _classes: dict[type, None] = field(default_factory=dict)
    _waiting: list[FunctionType] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module | None,
        functions: Iterable[object],
        without: Container[nn.Module] = (),
    ) -> ReachedCode:
        """Return what a step of this module runs, with the user's other ``functions``, such as the loss.

        The forward of submodules ``without`` is left out.
        """
        reached = cls()
        for function in functions:
            reached._add(function)
            if isinstance(function, nn.Module):
                reached._object(function)
        if model is not None:
            reached._add_module(model, without)
        reached.follow()
        return reached

    def mentions(self, name: str) -> bool:
        """Return whether an attribute of this name may be read."""
        return self.reads_any_name or name in self.attributes

    @property
    def size(self) -> tuple[int, int]:
        """Numbers that grow whenever the code is found to mention more."""
        return len(self.attributes) + len(self.of_users), len(self._seen)

    def line_of(self, function: FunctionType) -> str:
        """Return ``file:line`` of a function."""
        return line_of_code(function.__code__)

    def add_class(self, kind: type) -> None:
        """Add a class of objects that the code uses: those of its methods that are mentioned count."""
        for each in kind.__mro__:
            if each not in self._classes and each not in (object, nn.Module):
                self._classes[each] = None
                for name, value in vars(each).items():
                    if name in self.attributes or name in ("__call__", "__getattr__"):
                        self._add(value)

    def reach(self, value: object) -> None:
        """Add a function of the user's, or a module, that the code calls by the name of what holds it."""
        if isinstance(value, functools.partial | nn.Module):
            self._add(value)
        else:
            self._follow_users(value)
        self.follow()

    def follow(self) -> None:
        """Follow everything that was added, to the end."""
        while self._waiting:
            function = self._waiting.pop()
            self.functions.append(function)
            self._read(function)

    def _add_module(self, whole: nn.Module, without: Container[nn.Module] = ()) -> None:
        """Add a module with its submodules; the forward of those ``without`` is left out."""
        for kind in dict.fromkeys(map(type, whole.modules())):
            self.add_class(kind)
        for kind in dict.fromkeys(type(m) for m in whole.modules() if m not in without):
            self._add(getattr(kind, "forward", None))
        for hook in hooks_of(whole):
            self._add(hook)

    def _add(self, value: object) -> None:
        match value:
            case functools.partial():
                self._add(value.func)
                self._object(value)
                for each in (*value.args, *value.keywords.values()):
                    self._add(each)
            case MethodType():
                self._add(value.__func__)
                self._object(value.__self__)
            case staticmethod() | classmethod():
                self._add(value.__func__)
            case property():
                self._add(value.fget)
            case functools.cached_property():
                self._add(value.func)
            case FunctionType():
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._waiting.append(value)
                if (wrapped := inspect.unwrap(value)) is not value:
                    self._add(wrapped)
            case nn.Module():
                self._add_module(value)
            case type() | ModuleType():
                pass
            case _ if callable(value) and not is_known_package(type(value).__module__):
                self.add_class(type(value))
                self._object(value)

    def _object(self, value: object) -> None:
        if all(value is not known for _, known in self.objects):
            self.objects.append((type(value).__name__, value))

    def _read(self, function: FunctionType) -> None:
        code = function.__code__
        is_torchs = is_known_package(function.__module__)
        for name, is_global, number in _mentioned_names(code):
            line = line_of_code(code, number)
            if not is_global:
                self._mention_attribute(name, line)
                package = (function.__module__ or "").partition(".")[0]
                self.of_package.setdefault(package, set()).add(name)
                if is_users_file(code.co_filename):
                    self.of_users.add(name)
            elif not is_torchs:
                self._mention_global(function, name, line)
            if name in _READS_ANY_NAME and is_users_file(code.co_filename):
                self.reads_any_name = True
        for value in [] if is_torchs else closure_values(function):
            self._follow_users(value)

    def _mention_global(self, function: FunctionType, name: str, line: str) -> None:
        if name in function.__globals__:
            self.globals_of.append((function, name, line))
            self._follow_users(function.__globals__[name])

    def _mention_attribute(self, name: str, line: str) -> None:
        is_new = name not in self.attributes
        if is_new or not self.attributes[name]:
            self.attributes[name] = line
        if is_new:
            for kind in self._classes:
                if name in vars(kind):
                    self._add(vars(kind)[name])

    def _follow_users(self, value: object) -> None:
        """Follow a function, or a class, that code mentions, unless it is Python's or torch's."""
        if isinstance(value, type):
            if not is_known_package(value.__module__):
                self.add_class(value)
                self._add(vars(value).get("__init__"))
        elif not is_known_package(getattr(value, "__module__", None)):
            self._add(value)


def closure_values(function: FunctionType) -> Iterator[object]:
    """Yield the values of the variables that a function shares with the code around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def hooks_of(model: nn.Module) -> Iterator[Callable[..., object]]:
    """Yield the hooks of a module, of its submodules and of their parameters."""
    for module in model.modules():
        for hooks in HOOKS_OF_MODULES:
            yield from vars(module).get(hooks, {}).values()
    for parameter in model.parameters():
        yield from gradient_hooks(parameter)


@cache
def _mentioned_names(code: CodeType) -> tuple[tuple[str, bool, int], ...]:
    """Return the names that a function mentions: the name, whether it is a global, and the number of the line."""
    names: dict[tuple[str, bool], int] = {}
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        if isinstance(name, CodeType):
            for inner, is_global, number in _mentioned_names(name):
                names.setdefault((inner, is_global), number)
        elif isinstance(name, str) and (
            kind in _LOADS_GLOBAL
            or kind in _LOADS_ATTRIBUTE
            or (kind == "LOAD_CONST" and name.isidentifier())
        ):
            line = None if instruction.positions is None else instruction.positions.lineno
            names.setdefault((name, kind in _LOADS_GLOBAL), line or code.co_firstlineno)
    return tuple((name, is_global, number) for (name, is_global), number in names.items())
