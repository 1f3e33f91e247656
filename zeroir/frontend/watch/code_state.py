"""The state outside a program's tensors that its capture could read, at one time.

It consists of the attributes of modules, their mode, hooks and submodules, which parameters are trained, and of the
globals, variables of closures and class attributes that the code of a step mentions, with the objects in them. Tensors
outside the module count by their identity and their version, which every change in place raises.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import (
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, cast

from torch import Tensor, nn

from zeroir.frontend._torch_hooks import version_of
from zeroir.frontend.source.generators import is_consumed
from zeroir.frontend.source.imports import is_known_package
from zeroir.frontend.source.namespaces import (
    PLAIN,
    ClassAttributes,
    Namespace,
    PlaceId,
    SlotAttributes,
    place_id,
)
from zeroir.frontend.source.outside_reads import NOTHING_READ, OutsideReads
from zeroir.frontend.watch.contents import (
    checksum_of,
    contents_of_cache,
    digest,
    held_by,
    names_read_by,
)
from zeroir.frontend.watch.function_state import add_closure, add_global, add_imported
from zeroir.frontend.watch.live_modules import LiveModules
from zeroir.frontend.watch.module_state import BY_IDENTITY, add_module_tree, is_trainer
from zeroir.frontend.watch.process_state import add_process
from zeroir.frontend.watch.quick_comparison import MISSING, QuickComparison
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.walk import FOLLOWED, Leaf, NumberPlace, is_users
from zeroir.torch_ops.followed_numbers import is_number, text_of

_MOST_ITEMS: Final = 10_000
"""Larger containers hold data: their items count as values, or as which objects they are."""

_NAMESPACES: Final = (SimpleNamespace, argparse.Namespace)
"""Python's own classes for objects whose attributes are the user's."""

_VALUES: Final = (bool, int, float, str, list, dict, tuple, set, deque)
"""Classes of what a script may set in modules of Python and torch; their other objects do not change."""

_PLAIN_VALUES: Final = (bool, int, float, str, type(None))
_LONGEST_PLAIN_VALUE: Final = 200


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
    # They are kept alive, so that no two of them share an id.
    seen: dict[int, object] = field(default_factory=dict)
    _followed: frozenset[int] = frozenset()
    _labels: dict[str, object] = field(default_factory=dict)

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
            add_module_tree(self, model, "", is_own=True)
        for name, value in self.code.objects:
            self.add(self.label(name, id(value)), value)
        for function, name, line in self.code.globals_of:
            if name in function.__globals__ and is_users(function):
                add_global(self, function, name, line)
        for function, name, line in self.code.imports:
            if is_users(function):
                add_imported(self, name, line)
        for function in self.code.functions:
            if is_users(function):
                add_closure(self, function)
        add_process(self)

    def label(self, name: str, owner: object) -> str:
        """Return a name that nothing else has: this one, with a number where another owner has it."""
        for number in count(1):
            label = name if number == 1 else f"{name} ({number})"
            known = self._labels.get(label, MISSING)
            if known == owner or (known is MISSING and label not in self.leaves):
                self._labels[label] = owner
                return label
        raise AssertionError("numbers do not end")

    def is_stored(self, container: object, key: object) -> bool:
        """Return whether the code only stores what is there."""
        return bool(self.stored) and place_id(container, key) in self.stored

    def _reach(self, value: object) -> None:
        """Follow a function or a module that an attribute or variable holds."""
        self.code.reach(value)
        if self.live is not None:
            self.live.code.reach(value)

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
                self.add(label, own[key], NumberPlace(own, key))

        kept = [(key, own.get(key, MISSING)) for key in compared]
        self.quick.add_computed(lambda: all(own.get(key, MISSING) is value for key, value in kept))

    def add(self, name: str, value: object, place: NumberPlace | None = None) -> None:
        """Add a value, and what the code may read of it."""
        if isinstance(value, PLAIN) or is_number(value):
            if is_number(value) and place is not None:
                self.places[name] = place
            # As text, because NaN is not equal to NaN, and True is equal to 1.
            is_followed = name in self.numbers and is_number(value)
            self.leaves[name] = (type(value), FOLLOWED if is_followed else text_of(value))
        elif isinstance(value, Tensor):
            self._tensor(name, value)
        elif isinstance(value, BY_IDENTITY):
            self.leaves[name] = (type(value), id(value))
            is_new = id(value) not in self.seen
            self.seen[id(value)] = value
            if isinstance(value, FunctionType):
                self._reach(value)
                self._attributes_of_function(name, value)
            elif is_new and isinstance(value, type | ModuleType):
                home = value.__module__ if isinstance(value, type) else value.__name__
                if not is_known_package(home):
                    self.add_attributes(name, vars(value), value)
                elif isinstance(value, ModuleType):
                    self._attributes_of_library(value)
        elif id(value) in self.seen:
            self.leaves[name] = (type(value), id(value))
        else:
            self.seen[id(value)] = value
            self.leaves[name] = (type(value), id(value))
            if place is not None and isinstance(type(value).__eq__, FunctionType):
                # Another object may say that it is equal.
                self.quick.add_computed(lambda: place.value is value)
            self.add_object(name, value)

    def _attributes_of_library(self, module: ModuleType) -> None:
        """Add values in a module of Python or torch that the user's code reads, such as ``sys.argv``."""
        space = vars(module)
        for key in sorted(self.code.of_users & space.keys()):
            value = space[key]
            if isinstance(value, _VALUES) and value is not sys.modules:
                name = f"{module.__name__}.{key}"
                self.quick.add_global(space, key, value)
                self.lines.setdefault(name, self.code.attributes.get(key, ""))
                self.add(name, value)

    def _attributes_of_function(self, name: str, function: FunctionType) -> None:
        own = vars(function)
        contents = dict(own)
        self.quick.add_container(own, contents)
        for key, value in contents.items():
            if self.code.mentions(key):
                self.add(f"{name}.{key}", value, NumberPlace(own, key, contents))

    def _tensor(self, name: str, tensor: Tensor) -> None:
        version = 0 if id(tensor) in self._followed else version_of(tensor)
        self.leaves[name] = (Tensor, id(tensor), version)
        if id(tensor) not in self.seen:
            self.seen[id(tensor)] = tensor
            self.tensors.append(tensor)
            if id(tensor) not in self._followed:
                self.quick.add_tensor(tensor, version)

    def add_object(self, name: str, value: object) -> None:
        """Add what the code may read of an object that has just been met."""
        match value:
            case nn.Module():
                self._reach(value)
                self.modules.append(value)
                add_module_tree(self, value, name, is_own=False)
            case functools.partial():
                self._reach(value)
                for number, item in enumerate(value.args):
                    self.add(f"{name}.args[{number}]", item)
                self._items(f"{name}.keywords", value.keywords, value.keywords.items(), dict)
            case MethodType():
                self._reach(value)
            case functools._lru_cache_wrapper():
                contents = contents_of_cache(value)
                self.leaves[name] += (digest(contents),)
                self.quick.add_computed(partial(contents_of_cache, value))
                for item in contents:
                    if isinstance(item, Tensor):
                        self.add(f"a result of {name}", item)
            case _ if is_trainer(value):
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
                    self.add(f"{name}[{index}]", item)
            case set() | frozenset():
                self.quick.add_container(value, set(value))
                self.leaves[name] += (frozenset(map(repr, value)),)
            case MappingProxyType():
                self.quick.add_container(value, dict(value))
                self.leaves[name] += (tuple(map(repr, value)),)
                for key, item in value.items():
                    self.add(f"{name}[{key!r}]", item)
            case _ if is_consumed(value):
                self.consumed.append((name, value))
            case _ if (checksum := checksum_of(value)) is not None:
                self.leaves[name] = (type(value), checksum())
                self.quick.add_computed(checksum)
            case _ if (held := held_by(value)) is not None:
                expression, read = held
                present = read()
                self.quick.add_computed(lambda: _is_unchanged(read(), present))
                self.add(name + expression, present)
            case _:
                for read_name in names_read_by(value):
                    self.code.mention(read_name)
        self._attributes_of_object(name, value)

    def _attributes_of_object(self, name: str, value: object) -> None:
        """Add the attributes of an object of the user's class, which may extend one of Python's."""
        kind = type(value)
        is_namespace = isinstance(value, _NAMESPACES)
        if not is_namespace and (is_known_package(kind.__module__) or is_trainer(value)):
            return
        if isinstance(value, nn.Module) or checksum_of(value) is not None:
            return
        self._classes(value)
        self.quick.add_instance(value)
        if hasattr(value, "__dict__"):
            self.add_attributes(name, vars(value), value)
        elif hasattr(kind, "__slots__"):
            self.add_attributes(name, SlotAttributes(value), value)

    def _items(
        self,
        name: str,
        value: dict[Any, object] | list[object] | deque[object],
        items: Iterable[tuple[object, object]],
        copied: Callable[[Any], object],
    ) -> None:
        if self.is_stored(value, None):
            return  # The code only appends to it.
        own = [(key, item) for key, item in items if not self.is_stored(value, key)]
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
            self.add(f"{name}[{key!r}]", item, NumberPlace(value, key, contents))

    def _classes(self, value: object) -> None:
        """Add the attributes of the user's classes that an object is of."""
        for kind in type(value).__mro__:
            if id(kind) not in self.seen and not is_known_package(kind.__module__):
                self.add(self.label(kind.__qualname__, id(kind)), kind)

    def add_attributes(self, name: str, values: Mapping[str, object], owner: object) -> None:
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
                self.seen[id(value)] = value
            if not is_pythons and self.code.mentions(key) and not self.is_stored(space, key):
                label = f"{name}.{key}"
                if contents is None and label not in self.numbers:
                    self.quick.add_global(values, key, value)
                self.lines.setdefault(label, self.code.attributes.get(key, ""))
                self.add(label, value, NumberPlace(space, key, contents))


def _is_unchanged(value: object, before: object) -> bool:
    """Return whether a value is the same object, or an equal plain one."""
    is_plain = isinstance(before, PLAIN) and type(value) is type(before)
    return value is before or (is_plain and value == before)
