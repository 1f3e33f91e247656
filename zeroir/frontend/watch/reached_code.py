"""The code that a step of a model runs, as far as its text tells, and the names that this code mentions.

It begins with the forward methods of the model's modules, with hooks and with the loss, and follows every function that
these mention: globals, variables of closures, and methods of the model's classes by their names. What is not mentioned
in this code cannot enter the computation. Functions of Python and torch are followed only as methods of modules.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Final

from torch import nn

from zeroir.frontend._torch_hooks import HOOKS_OF_MODULES, gradient_hooks
from zeroir.frontend.source.generators import is_clock
from zeroir.frontend.source.imports import is_known_package
from zeroir.frontend.source.source_lines import is_users_file, line_of_code

_LOADS_GLOBAL: Final = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_LOADS_ATTRIBUTE: Final = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"))
_READS_ANY_NAME: Final = frozenset(("getattr", "vars", "globals", "eval", "exec", "__dict__"))
"""Names of functions and attributes by which code may read what it does not mention."""

_READS_ANY_GLOBAL: Final = frozenset(("globals", "eval", "exec"))
"""Names of functions by which code may read globals that only its texts mention."""

_OF_COMPARISONS: Final = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__")
_OF_TEXTS: Final = ("__format__", "__str__", "__repr__")
_COMPARES: Final = frozenset(("COMPARE_OP", "CONTAINS_OP"))
_FORMATS: Final = frozenset(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"))
_NOT_OF_STEPS: Final = frozenset(
    (
        *_OF_COMPARISONS,
        *_OF_TEXTS,
        *("__new__", "__init__", "__post_init__", "__del__", "__init_subclass__", "__set_name__"),
        *("__class_getitem__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
        *("__getnewargs__", "__getnewargs_ex__", "__copy__", "__deepcopy__", "__replace__"),
        *("__dir__", "__sizeof__"),
    )
)
"""Methods that Python calls when it makes, copies, compares or prints objects; it calls others whenever it computes."""


class _Mention(Enum):
    """How code mentions a name."""

    GLOBAL = auto()
    ATTRIBUTE = auto()
    IMPORT = auto()
    CALLED_BY_PYTHON = auto()


@dataclass(slots=True)
class ReachedCode:
    """The functions that a step may run, with the globals that each mentions and the modules that it imports.

    ``codes`` has the code of each function when it was reached. ``attributes`` maps the names of attributes, and texts
    that may be such names, to the line that mentions them; the user's lines win over those of libraries, and
    ``of_users`` are those that the user's own code mentions, and ``of_package`` those of each package.
    ``reads_any_name`` is whether the user's own code may read attributes that it does not mention; libraries do so for
    bookkeeping everywhere. ``objects`` are those that are called as functions, those whose methods are, and partial
    functions, with names for messages. ``clock_line`` is where the user's own code mentions a clock, or random bits of
    the system, if it does.
    """

    functions: list[FunctionType] = field(default_factory=list)
    codes: dict[FunctionType, CodeType] = field(default_factory=dict)
    globals_of: list[tuple[FunctionType, str, str]] = field(default_factory=list)
    imports: list[tuple[FunctionType, str, str]] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    of_users: set[str] = field(default_factory=set)
    of_package: dict[str, set[str]] = field(default_factory=dict)
    reads_any_name: bool = False
    clock_line: str = ""
    objects: list[tuple[str, object]] = field(default_factory=list)
    _own: frozenset[nn.Module] = frozenset()
    # Functions with the same code may have other closures. They are kept alive, so that no two of them share an id.
    _seen: dict[int, FunctionType] = field(default_factory=dict)
    _classes: set[type] = field(default_factory=set)
    # What these classes have by names that nothing mentions yet.
    _unmentioned: dict[str, list[object]] = field(default_factory=dict)
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
        reached._own = frozenset(() if model is None else model.modules())
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
                self._classes.add(each)
                is_known = is_known_package(each.__module__)
                for name, value in vars(each).items():
                    if name in self.attributes or _is_called_by_python(name, is_known=is_known):
                        self._add_method(value)
                    else:
                        self._unmentioned.setdefault(name, []).append(value)

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
            case functools.cached_property() | functools.partialmethod():
                self._add(value.func)
            case FunctionType():
                if id(value) in self._seen:
                    return
                self._seen[id(value)] = value
                self._waiting.append(value)
                if (wrapped := inspect.unwrap(value)) is not value:
                    self._add(wrapped)
            case nn.Module() if value in self._own:
                pass  # added with the model, but for what runs as it is
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

    def _add_method(self, value: object) -> None:
        # What a dataclass prints is for people.
        if not (
            isinstance(value, FunctionType)
            and value.__name__ == "__repr__"
            and inspect.unwrap(value).__code__.co_filename == "<string>"
        ):
            self._add(value)

    def _read(self, function: FunctionType) -> None:
        code = self.codes[function] = function.__code__
        is_torchs = is_known_package(function.__module__)
        is_users = is_users_file(code.co_filename)
        for name, kind, number in _mentioned_names(code):
            line = line_of_code(code, number)
            match kind:
                case _Mention.ATTRIBUTE:
                    self._mention_attribute(name, line)
                    package = (function.__module__ or "").partition(".")[0]
                    self.of_package.setdefault(package, set()).add(name)
                    if is_users:
                        self.of_users.add(name)
                        self._mention_clock(name, None, line)
                case _Mention.CALLED_BY_PYTHON if is_users:
                    self._mention_attribute(name, "")
                case _Mention.IMPORT if not is_torchs:
                    self._mention_import(function, name, line)
                case _Mention.GLOBAL if not is_torchs:
                    self._mention_global(function, name, line)
                case _:
                    pass
            if name in _READS_ANY_NAME and is_users:
                self.reads_any_name = True
            if name in _READS_ANY_GLOBAL and is_users:
                for word in sorted(_words_in(code) & function.__globals__.keys()):
                    self._mention_global(function, word, line)
        for value in [] if is_torchs else closure_values(function):
            self._follow_users(value)
            if is_users:
                self._mention_clock("", value, self.line_of(function))

    def _mention_global(self, function: FunctionType, name: str, line: str) -> None:
        if name in function.__globals__:
            self.globals_of.append((function, name, line))
            value = function.__globals__[name]
            self._follow_users(value)
            if is_users_file(function.__code__.co_filename):
                self._mention_clock(name, value, line)

    def _mention_import(self, function: FunctionType, name: str, line: str) -> None:
        if name.startswith("."):
            try:
                name = importlib.util.resolve_name(name, function.__globals__.get("__package__"))
            except ImportError:
                return
        self.imports.append((function, name, line))
        if is_users_file(function.__code__.co_filename):
            self._mention_clock(name, sys.modules.get(name), line)

    def _mention_clock(self, name: str, value: object, line: str) -> None:
        if not self.clock_line and is_clock(name, value):
            self.clock_line = line

    def mention(self, name: str) -> None:
        """Add the name of an attribute that code reads by an object, such as an ``attrgetter``."""
        self.of_users.add(name)
        self._mention_attribute(name, "")

    def _mention_attribute(self, name: str, line: str) -> None:
        if not self.attributes.get(name):
            self.attributes[name] = line
        for value in self._unmentioned.pop(name, ()):
            self._add_method(value)

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


def _is_called_by_python(name: str, *, is_known: bool) -> bool:
    """Return whether Python may call a method of a class without a mention; the class may be Python's or torch's."""
    if is_known:
        return name in ("__call__", "__getattr__")
    return name.startswith("__") and name.endswith("__") and name not in _NOT_OF_STEPS


def _words_in(code: CodeType) -> frozenset[str]:
    """Return the words in the texts of a function."""
    texts = [each for each in code.co_consts if isinstance(each, str)]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    words = (word for text in texts for word in re.findall(r"\w+", text))
    return frozenset(words).union(*map(_words_in, inner))


@cache
def _mentioned_names(code: CodeType) -> tuple[tuple[str, _Mention, int], ...]:
    """Return the names that a function mentions, in which way, and the number of the line."""
    names: dict[tuple[str, _Mention], int] = {}
    level = 0
    for instruction in dis.get_instructions(code):
        name, opcode = instruction.argval, instruction.opname
        line = None if instruction.positions is None else instruction.positions.lineno
        number = line or code.co_firstlineno
        if opcode == "LOAD_CONST" and isinstance(name, int):
            level = name  # an import has it before the names of its members
        if isinstance(name, CodeType):
            for inner, kind, inner_number in _mentioned_names(name):
                names.setdefault((inner, kind), inner_number)
        elif opcode in _COMPARES:
            names |= {(method, _Mention.CALLED_BY_PYTHON): number for method in _OF_COMPARISONS}
        elif opcode in _FORMATS:
            names |= {(method, _Mention.CALLED_BY_PYTHON): number for method in _OF_TEXTS}
        elif not isinstance(name, str):
            continue
        elif opcode == "IMPORT_NAME":
            names.setdefault((level * "." + name, _Mention.IMPORT), number)
        elif opcode in _LOADS_GLOBAL:
            names.setdefault((name, _Mention.GLOBAL), number)
            if name in ("str", "repr", "format"):
                names |= {(method, _Mention.CALLED_BY_PYTHON): number for method in _OF_TEXTS}
        elif opcode in _LOADS_ATTRIBUTE or (opcode == "LOAD_CONST" and name.isidentifier()):
            names.setdefault((name, _Mention.ATTRIBUTE), number)
    return tuple((name, kind, number) for (name, kind), number in names.items())
