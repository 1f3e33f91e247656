"""The state outside a program's tensors that its capture could read, at one time.

It consists of the attributes of modules, their mode, hooks and submodules, which parameters are trained, and of the
globals, variables of closures and class attributes that the code of a step mentions, with the objects in them. Tensors
outside the module count by their identity and their version, which every change in place raises.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, TypeGuard, cast

from torch import Tensor, nn

from zeroir.frontend._torch_hooks import (
    HOOKS_OF_MODULES,
    global_hooks,
    gradient_hooks,
    version_of,
)
from zeroir.frontend.source.generators import is_consumed
from zeroir.frontend.source.imports import is_known_package, is_main
from zeroir.frontend.source.namespaces import (
    PLAIN,
    ClassAttributes,
    ClosureVariables,
    Namespace,
    PlaceId,
    SlotAttributes,
    place_id,
)
from zeroir.frontend.source.outside_reads import (
    NOTHING_READ,
    OutsideReads,
    contents_of_file,
    state_of_file,
)
from zeroir.frontend.source.source_lines import is_users_file
from zeroir.frontend.watch.contents import (
    checksum_of,
    contents_of_cache,
    digest,
    held_by,
    names_read_by,
)
from zeroir.frontend.watch.live_modules import LiveModules
from zeroir.frontend.watch.quick_comparison import MISSING, QuickComparison
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.torch_settings import replaceable, settings_read
from zeroir.torch_ops.followed_numbers import is_number, text_of

Leaf = tuple[object, ...]

_BY_IDENTITY: Final = (type, FunctionType, BuiltinFunctionType, ModuleType)
_OF_TORCH: Final = frozenset(vars(nn.Module()))
_MOST_ITEMS: Final = 10_000
"""Larger containers hold data: their items count as values, or as which objects they are."""

_NAMESPACES: Final = (SimpleNamespace, argparse.Namespace)
"""Python's own classes for objects whose attributes are the user's."""

_OF_ENVIRONMENT: Final = frozenset(("environ", "getenv"))
"""The attributes of ``os`` by which code reads the environment."""

_VALUES: Final = (bool, int, float, str, list, dict, tuple, set, deque)
"""Classes of what a script may set in modules of Python and torch; their other objects do not change."""

_PLAIN_VALUES: Final = (bool, int, float, str, type(None))
_LONGEST_PLAIN_VALUE: Final = 200

HOOK: Final = "hook"
"""The first element of the leaves of hooks."""


SETTING: Final = "setting"
"""The first element of the leaves of settings and functions of torch."""


FILE: Final = "file"
"""The first element of the leaves of files."""


FOLLOWED: Final = "a number that counts at every step"
"""The second element of the leaves of numbers that a program follows."""


@dataclass(slots=True)
class NumberPlace:
    """Where a number is: a key of a container, and the container's contents to compare with, if it is compared."""

    container: Namespace | dict[Any, object] | list[object] | deque[object]
    key: Any
    contents: Any = None

    @property
    def value(self) -> object:
        """The present value; None where there is none."""
        try:
            return self.container[self.key]
        except (IndexError, KeyError):
            return None

    def set(self, value: object) -> None:
        """Replace the number."""
        self.container[self.key] = value

    def expect(self, value: object) -> None:
        """Let a comparison of the container expect this value."""
        if self.contents is not None:
            self.contents[self.key] = value


@dataclass(slots=True)
class CodeState:
    """The state at one time: ``leaves`` are comparable values by their names in messages.

    ``lines`` has the line of the user's code that reads the value of a name, and ``tensors`` and ``modules`` are those
    outside the module's own, ``consumed`` the objects that reading changes. ``places`` has where numbers are; a program
    follows those in ``numbers``, of which only the type counts. What the code only stores, at the places ``stored``,
    does not count. Of the modules ``live`` only what other code reads does, and the hooks around their forward.
    """

    code: ReachedCode
    leaves: dict[str, Leaf] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    consumed: list[tuple[str, object]] = field(default_factory=list)
    places: dict[str, NumberPlace] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    stored: frozenset[PlaceId] = frozenset()
    live: LiveModules | None = None
    reads: OutsideReads = NOTHING_READ
    quick: QuickComparison = field(default_factory=QuickComparison)
    _followed: frozenset[int] = frozenset()
    _labels: dict[str, object] = field(default_factory=dict)
    # They are kept alive, so that no two of them share an id.
    _seen: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module | None,
        code: ReachedCode,
        followed: Iterable[Tensor] = (),
        numbers: frozenset[str] = frozenset(),
        stored: frozenset[PlaceId] = frozenset(),
        live: LiveModules | None = None,
        reads: OutsideReads = NOTHING_READ,
    ) -> CodeState:
        """Return the present state of a module, and of the code of its steps.

        Of the tensors that are ``followed`` only the identity counts, and of these ``numbers`` only the type. The
        places ``stored`` do not count, but what the code ``reads`` outside Python's objects does.
        """
        ids = frozenset(map(id, followed))
        while True:
            codes = (code,) if live is None else (code, live.code)
            mentioned = [each.size for each in codes]
            state = cls(
                code,
                numbers=numbers,
                stored=stored,
                live=live,
                reads=reads,
                _followed=ids,
            )
            state._walk(model)
            # Objects that it met may have methods that mention more.
            if [each.size for each in codes] == mentioned:
                return state

    @property
    def plain_values(self) -> dict[str, str]:
        """The numbers, texts and Nones by their names, as ``repr`` writes them, where that is short."""
        return {
            name: text
            for name, (kind, *rest) in self.leaves.items()
            for text in rest
            if kind in _PLAIN_VALUES and isinstance(text, str) and len(text) <= _LONGEST_PLAIN_VALUE
        }

    def _walk(self, model: nn.Module | None) -> None:
        if model is not None:
            self._module_tree(model, "", is_own=True)
        for name, value in self.code.objects:
            self._add(self._label(name, id(value)), value)
        for function, name, line in self.code.globals_of:
            if name in function.__globals__ and is_users(function):
                self._global(function, name, line)
        for function, name, line in self.code.imports:
            if is_users(function):
                self._imported(name, line)
        for function in self.code.functions:
            if is_users(function):
                self._closure(function)
        if self.reads.variables or not self.code.of_users.isdisjoint(_OF_ENVIRONMENT):
            self._environment()
        for path, line in self.reads.paths.items():
            name = f"The path {path}"
            self.lines[name] = line
            self.leaves[name] = (FILE, "exists" if Path(path).exists() else "is missing")
            self.quick.add_computed(Path(path).exists)
        for path, line in self.reads.files.items():
            name = f"The file {path}"
            self.lines[name] = line
            self.leaves[name] = (FILE, contents_of_file(path))
            self.quick.add_computed(partial(state_of_file, path))
        for expression, read in settings_read(self.code.of_users):
            self.leaves[expression] = (SETTING, str(read()))
            self.quick.add_computed(read)
        modules = [each for each in self._seen.values() if _is_of_torch(each)]
        for expression, space, key, present in replaceable(self.code.of_users, modules):
            self._replaceable(expression, space, key, present)
        for number, hook in enumerate(global_hooks()):
            self._seen[id(hook)] = hook
            self.leaves[f"all modules.hooks[{number}]"] = (HOOK, id(hook))
        self.quick.add_computed(global_hooks)

    def _replaceable(self, name: str, space: Mapping[str, object], key: str, value: object) -> None:
        """Add a function of torch that a script may replace."""
        self.leaves[name] = (SETTING, type(value), id(value))
        self._seen[id(value)] = value
        self.quick.add_global(space, key, value)

    def _environment(self) -> None:
        """Add the variables of the process's environment that the user's code mentions, or has read."""
        for name in sorted({*self.code.of_users, *self.reads.variables} & os.environ.keys()):
            label = f"os.environ[{name!r}]"
            self.lines.setdefault(label, self.reads.variables.get(name, ""))
            self.leaves[label] = (str, repr(os.environ[name]))
        encoded = vars(os.environ)["_data"]
        self.quick.add_container(encoded, dict(encoded))

    def _label(self, name: str, owner: object) -> str:
        """Return a name that nothing else has: this one, with a number where another owner has it."""
        for number in count(1):
            label = name if number == 1 else f"{name} ({number})"
            known = self._labels.get(label, MISSING)
            if known == owner or (known is MISSING and label not in self.leaves):
                self._labels[label] = owner
                return label
        raise AssertionError("numbers do not end")

    def _is_stored(self, container: object, key: object) -> bool:
        return bool(self.stored) and place_id(container, key) in self.stored

    def _module_tree(self, model: nn.Module, prefix: str, *, is_own: bool) -> None:
        """Add a module with its submodules; tensors of the model's own are the program's, those of others count."""
        # Objects in attributes may refer to the modules themselves.
        self._seen.update((id(module), module) for module in model.modules())
        for name, module in model.named_modules():
            path = f"{prefix}.{name}".strip(".")
            self._module(path, module)
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    full = f"{path}.{key}".strip(".")
                    if tensor is None or not is_own:
                        self._add(full, tensor)
                        continue
                    self._seen[id(tensor)] = tensor
                    self.leaves[full] = (Tensor, id(tensor))
                    if isinstance(tensor, nn.Parameter):
                        self.leaves[f"{full}.requires_grad"] = (tensor.requires_grad,)
                        self.quick.add_parameter(tensor)
                        self._gradient_hooks(full, tensor)
        live = () if self.live is None else self.live.modules
        traced = {base for m in model.modules() if m not in live for base in type(m).__mro__}
        for kind in dict.fromkeys(base for m in model.modules() for base in type(m).__mro__):
            if is_known_package(kind.__module__):
                forward = vars(kind).get("forward")
                if forward is not None:
                    self._replaceable(
                        f"{kind.__qualname__}.forward", vars(kind), "forward", forward
                    )
            else:
                label = self._label(kind.__name__, id(kind))
                forward = vars(kind).get("forward")
                if kind in traced and isinstance(forward, FunctionType):
                    self._add(f"{label}.forward", forward)  # It is called without a mention.
                self._attributes(label, vars(kind), kind)

    def _module(self, path: str, module: nn.Module) -> None:
        own = vars(module)
        contents = dict(own)
        self.leaves[f"{path}.training".strip(".")] = (module.training,)
        self._seen[id(type(module))] = type(module)
        self.leaves[f"{path}.__class__".strip(".")] = (type, id(type(module)))
        self.quick.add_instance(module)
        for name, child in module._modules.items():
            self._seen[id(child)] = child
            self.leaves[f"{path}.{name}".strip(".")] = (nn.Module, type(child).__name__, id(child))
        for kind in ("_modules", "_parameters", "_buffers"):
            self.quick.add_container(own[kind], dict(own[kind]))
        if isinstance(module, nn.ModuleDict):
            self.leaves[f"{path}.keys()".strip(".")] = (list, repr(list(module._modules)))
            self.quick.add_computed(lambda: list(module._modules))
        live = self.live
        if live is None or module not in live.modules:
            self.quick.add_container(own, contents)
            self._hooks(path, own)
        else:
            self.quick.add_computed(lambda: module.training)
            if module in live.outermost:
                self._hooks(path, own)
            self._read_by_others(path, own, live.code)
            return
        # A module may be a part of a trainer, as Lightning's is, whose own code reads bookkeeping.
        is_read = (
            self._model_names(module).__contains__ if _is_trainer(module) else self.code.mentions
        )
        for key, value in own.items():
            # Another forward of one module is called without a mention.
            is_read_here = key == "forward" or (key not in _OF_TORCH and is_read(key))
            if is_read_here and not self._is_stored(own, key):
                name = f"{path}.{key}".strip(".")
                self.lines.setdefault(name, self.code.attributes.get(key, ""))
                if isinstance(value, Tensor):
                    self.leaves[name] = (Tensor, id(value))  # the program has its value
                else:
                    self._add(name, value, NumberPlace(own, key, contents))

    def _hooks(self, path: str, own: dict[str, Any]) -> None:
        for kind in HOOKS_OF_MODULES:
            hooks = own.get(kind, {})
            self.quick.add_container(hooks, dict(hooks))
            for number, hook in enumerate(hooks.values()):
                name = f"{path}.{kind}[{number}]".strip(".")
                self.leaves[name] = (HOOK, id(hook))
                if id(hook) not in self._seen:
                    self._seen[id(hook)] = hook
                    if not isinstance(hook, _BY_IDENTITY):
                        self._mutable(self._label(type(hook).__name__, id(hook)), hook)

    def _gradient_hooks(self, path: str, parameter: nn.Parameter) -> None:
        """Add the hooks of a parameter; none can be added once an engine has its values."""
        hooks = gradient_hooks(parameter)
        if hooks:
            self.quick.add_computed(lambda: gradient_hooks(parameter))
        for number, hook in enumerate(hooks):
            self.leaves[f"{path}.hooks[{number}]"] = (HOOK, id(hook))
            self._seen[id(hook)] = hook

    def _read_by_others(self, path: str, own: dict[str, Any], code: ReachedCode) -> None:
        """Add those attributes of a live module that code of other modules mentions."""

        def labels() -> dict[str, str]:
            keys = [key for key in own if key not in _OF_TORCH and code.mentions(key)]
            return {key: f"{path}.{key}".strip(".") for key in keys if key != "forward"}

        for key, name in labels().items():
            self.lines.setdefault(name, code.attributes.get(key, ""))
            self._add(name, own[key], NumberPlace(own, key))

        def present() -> list[tuple[str, object]]:
            return [(n, own[key]) for key, n in labels().items() if n not in self.numbers]

        kept = present()
        self.quick.add_computed(lambda: _are_identical(present(), kept))

    def _reach(self, value: object) -> None:
        """Follow a function or a module that an attribute or variable holds."""
        self.code.reach(value)
        if self.live is not None:
            self.live.code.reach(value)

    def _model_names(self, module: nn.Module) -> frozenset[str]:
        """Return the names that the user's code mentions, and that of the packages with the module's classes."""
        packages = {
            kind.__module__.partition(".")[0]
            for kind in type(module).__mro__
            if not is_known_package(kind.__module__)
        }
        of_package = self.code.of_package
        return frozenset(self.code.of_users).union(
            *(of_package.get(package, ()) for package in packages - _OF_TRAINERS)
        )

    def _global(self, function: FunctionType, name: str, line: str) -> None:
        space = function.__globals__
        if self._is_stored(space, name):
            return
        value = space[name]
        module = function.__module__
        label = name if is_main(module) else f"{module}.{name}"
        label = self._label(label, (id(space), name))
        if label not in self.numbers:
            self.quick.add_global(space, name, value)
        self.lines.setdefault(label, line)
        self._add(label, value, NumberPlace(space, name))

    def _imported(self, name: str, line: str) -> None:
        """Add a module that a function imports, and the packages that it is in."""
        parts = name.split(".")
        for count_of_parts in range(1, len(parts) + 1):
            full_name = ".".join(parts[:count_of_parts])
            module = sys.modules.get(full_name)
            if module is not None:
                self.lines.setdefault(full_name, line)
                self._add(self._label(full_name, id(module)), module)

    def _closure(self, function: FunctionType) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            variables = ClosureVariables(function)
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if self._is_stored(variables, name):
                continue
            label = self._variable(function, name, value, NumberPlace(variables, name))
            if label not in self.numbers:
                self.quick.add_cell(cell, value)
        self._code(function)
        code, defaults = function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        for name, value in zip(
            positional[len(positional) - len(defaults) :], defaults, strict=True
        ):
            self._variable(function, name, value)
        of_keywords = function.__kwdefaults__ or {}
        contents = dict(of_keywords)
        self.quick.add_container(of_keywords, contents)
        for name, value in contents.items():
            self._variable(function, name, value, NumberPlace(of_keywords, name, contents))

    def _code(self, function: FunctionType) -> None:
        """Add a function's code, and which objects its defaults are, all of which may be replaced."""
        if function.__code__ is not self.code.codes[function]:
            name = self._label(f"{function.__qualname__}.__code__", id(function))
            self.lines.setdefault(name, self.code.line_of(function))
            self.leaves[name] = (CodeType, id(function.__code__))
        for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
            self.quick.add_attribute(function, attribute, getattr(function, attribute))

    def _variable(
        self, function: FunctionType, name: str, value: object, place: NumberPlace | None = None
    ) -> str:
        """Add a variable of a function, and return its name in messages."""
        label = f"{name} of {function.__qualname__}"
        # Functions that one function makes have the same name.
        label = self._label(label, (id(function), name))
        self.lines.setdefault(label, self.code.line_of(function))
        self._add(label, value, place)
        return label

    def _trainer(self, name: str, value: object) -> None:
        """Add what the user's own code reads of a trainer, whose bookkeeping changes."""
        self.code.add_class(type(value))
        self.code.follow()
        self._classes(value)
        own, compared = vars(value), list[str]()
        for key in sorted(self.code.of_users):
            label = f"{name}.{key}"
            if label not in self.numbers:
                compared.append(key)
            if key in own:
                self.lines.setdefault(label, self.code.attributes.get(key, ""))
                self._add(label, own[key], NumberPlace(own, key))

        kept = [(key, own.get(key, MISSING)) for key in compared]
        self.quick.add_computed(lambda: all(own.get(key, MISSING) is value for key, value in kept))

    def _add(self, name: str, value: object, place: NumberPlace | None = None) -> None:
        if isinstance(value, PLAIN) or is_number(value):
            if is_number(value) and place is not None:
                self.places[name] = place
            # As text, because NaN is not equal to NaN, and True is equal to 1.
            is_followed = name in self.numbers and is_number(value)
            self.leaves[name] = (type(value), FOLLOWED if is_followed else text_of(value))
        elif isinstance(value, Tensor):
            self._tensor(name, value)
        elif isinstance(value, _BY_IDENTITY):
            self.leaves[name] = (type(value), id(value))
            is_new = id(value) not in self._seen
            self._seen[id(value)] = value
            if isinstance(value, FunctionType):
                self._reach(value)
                self._attributes_of_function(name, value)
            elif is_new and isinstance(value, type | ModuleType):
                home = value.__module__ if isinstance(value, type) else value.__name__
                if not is_known_package(home):
                    self._attributes(name, vars(value), value)
                elif isinstance(value, ModuleType):
                    self._attributes_of_library(value)
        elif id(value) in self._seen:
            self.leaves[name] = (type(value), id(value))
        else:
            self._seen[id(value)] = value
            self.leaves[name] = (type(value), id(value))
            if place is not None and isinstance(type(value).__eq__, FunctionType):
                # Another object may say that it is equal.
                self.quick.add_computed(lambda: place.value is value)
            self._mutable(name, value)

    def _attributes_of_library(self, module: ModuleType) -> None:
        """Add values in a module of Python or torch that the user's code reads, such as ``sys.argv``."""
        space = vars(module)
        for key in sorted(self.code.of_users & space.keys()):
            value = space[key]
            if isinstance(value, _VALUES) and value is not sys.modules:
                name = f"{module.__name__}.{key}"
                self.quick.add_global(space, key, value)
                self.lines.setdefault(name, self.code.attributes.get(key, ""))
                self._add(name, value)

    def _attributes_of_function(self, name: str, function: FunctionType) -> None:
        own = vars(function)
        contents = dict(own)
        self.quick.add_container(own, contents)
        for key, value in contents.items():
            if self.code.mentions(key):
                self._add(f"{name}.{key}", value, NumberPlace(own, key, contents))

    def _tensor(self, name: str, tensor: Tensor) -> None:
        version = 0 if id(tensor) in self._followed else version_of(tensor)
        self.leaves[name] = (Tensor, id(tensor), version)
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            self.tensors.append(tensor)
            if id(tensor) not in self._followed:
                self.quick.add_tensor(tensor, version)

    def _mutable(self, name: str, value: object) -> None:
        match value:
            case nn.Module():
                self._reach(value)
                self.modules.append(value)
                self._module_tree(value, name, is_own=False)
            case functools.partial():
                self._reach(value)
                for number, item in enumerate(value.args):
                    self._add(f"{name}.args[{number}]", item)
                self._items(f"{name}.keywords", value.keywords, value.keywords.items(), dict)
            case MethodType():
                self._reach(value)
            case functools._lru_cache_wrapper():
                contents = contents_of_cache(value)
                self.leaves[name] += (digest(contents),)
                self.quick.add_computed(partial(contents_of_cache, value))
                for item in contents:
                    if isinstance(item, Tensor):
                        self._add(f"a result of {name}", item)
            case _ if _is_trainer(value):
                self._trainer(name, value)
            case dict():
                self._items(name, value, value.items(), dict)
            case list():
                self._items(name, value, enumerate(value), list)
            case deque():
                self._items(name, value, enumerate(value), deque)
            case tuple():
                self.leaves[name] = (tuple, len(value), digest(value[_MOST_ITEMS:]))
                for index, item in enumerate(value[:_MOST_ITEMS]):
                    self._add(f"{name}[{index}]", item)
            case set() | frozenset():
                self.quick.add_container(value, set(value))
                self.leaves[name] += (frozenset(map(repr, value)),)
            case MappingProxyType():
                self.quick.add_container(value, dict(value))
                self.leaves[name] += (tuple(map(repr, value)),)
                for key, item in value.items():
                    self._add(f"{name}[{key!r}]", item)
            case _ if is_consumed(value):
                self.consumed.append((name, value))
            case _ if (checksum := checksum_of(value)) is not None:
                self.leaves[name] = (type(value), checksum())
                self.quick.add_computed(checksum)
            case _ if (held := held_by(value)) is not None:
                expression, read = held
                present = read()
                self.quick.add_computed(lambda: _is_unchanged(read(), present))
                self._add(name + expression, present)
            case _:
                for read_name in names_read_by(value):
                    self.code.mention(read_name)
        self._attributes_of_object(name, value)

    def _attributes_of_object(self, name: str, value: object) -> None:
        """Add the attributes of an object of the user's class, which may extend one of Python's."""
        kind = type(value)
        is_namespace = isinstance(value, _NAMESPACES)
        if not is_namespace and (is_known_package(kind.__module__) or _is_trainer(value)):
            return
        if isinstance(value, nn.Module) or checksum_of(value) is not None:
            return
        self._classes(value)
        self.quick.add_instance(value)
        if hasattr(value, "__dict__"):
            self._attributes(name, vars(value), value)
        elif hasattr(kind, "__slots__"):
            self._attributes(name, SlotAttributes(value), value)

    def _items(
        self,
        name: str,
        value: dict[Any, object] | list[object] | deque[object],
        items: Iterable[tuple[object, object]],
        copied: Callable[[Any], object],
    ) -> None:
        if self._is_stored(value, None):
            return  # The code only appends to it.
        own = [(key, item) for key, item in items if not self._is_stored(value, key)]
        contents = copied(value)
        self.quick.add_container(value, contents)
        if isinstance(value, dict):
            # Equal dicts may differ in the order of their keys.
            self.quick.add_computed(lambda: list(value))
        if len(value) > _MOST_ITEMS:
            self.leaves[name] = (
                type(value),
                id(value),
                digest(part for pair in own for part in pair),
            )
            return
        keys = digest(key for key, _ in own)
        self.leaves[name] = (type(value), id(value), len(own), keys)
        for key, item in own:
            self._add(f"{name}[{key!r}]", item, NumberPlace(value, key, contents))

    def _classes(self, value: object) -> None:
        """Add the attributes of the user's classes that an object is of."""
        for kind in type(value).__mro__:
            if id(kind) not in self._seen and not is_known_package(kind.__module__):
                self._add(self._label(kind.__qualname__, id(kind)), kind)

    def _attributes(self, name: str, values: Mapping[str, object], owner: object) -> None:
        """Add those attributes of an object, a class or a Python module that the code of a step mentions."""
        is_object = not isinstance(owner, type | ModuleType)
        home: object = type(owner).__module__  # That of a class in C may be no text.
        if is_object or (isinstance(home, str) and not is_known_package(home)):
            self.code.add_class(type(owner))
            self.code.follow()
        contents = None if isinstance(owner, ModuleType) else dict(values)
        if contents is not None:
            self.quick.add_container(values, contents)
        space = ClassAttributes(owner) if isinstance(owner, type) else cast("Namespace", values)
        for key, value in list(values.items()):
            is_pythons = key.startswith("__")
            if is_pythons and isinstance(owner, type) and isinstance(value, FunctionType):
                # Python calls it without a mention.
                self.leaves[f"{name}.{key}"] = (FunctionType, id(value))
                self._seen[id(value)] = value
            if not is_pythons and self.code.mentions(key) and not self._is_stored(space, key):
                label = f"{name}.{key}"
                if contents is None and label not in self.numbers:
                    self.quick.add_global(values, key, value)
                self.lines.setdefault(label, self.code.attributes.get(key, ""))
                self._add(label, value, NumberPlace(space, key, contents))


def _is_of_torch(value: object) -> TypeGuard[ModuleType]:
    """Return whether an object is a Python module of torch."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch"


def _is_unchanged(value: object, before: object) -> bool:
    """Return whether a value is the same object, or an equal plain one."""
    is_plain = isinstance(before, PLAIN) and type(value) is type(before)
    return value is before or (is_plain and value == before)


def _are_identical(
    present: Sequence[tuple[str, object]], kept: Sequence[tuple[str, object]]
) -> bool:
    """Return whether named values are the same objects."""
    return len(present) == len(kept) and all(
        name == other and value is old
        for (name, value), (other, old) in zip(present, kept, strict=True)
    )


def _is_trainer(value: object) -> bool:
    """Return whether an object is of a class of zeroir's or Lightning's, or of one of the user's that extends it."""
    return any(kind.__module__.partition(".")[0] in _OF_TRAINERS for kind in type(value).__mro__)


_OF_TRAINERS: Final = frozenset(("zeroir", "lightning", "pytorch_lightning"))


def is_users(function: FunctionType) -> bool:
    """Return whether a function is the user's own, whose globals and closure may change while a script runs."""
    filename = function.__code__.co_filename
    # Code without a file is typed at a prompt, or made by a class for itself.
    return not is_known_package(function.__module__) and (
        filename.startswith("<") or is_users_file(filename)
    )
