"""The Python state of a model: everything except parameters and buffers that one forward can leave to the next.

A program is captured from one forward. The Python state consists of the attributes of modules and of their classes, the
objects in these attributes, the variables that hooks and other functions of the user share with the code around them,
the globals of the user's files, and the random generators of Python and NumPy. Modules that the code holds beside the
model, such as a teacher, count as those of the model.
"""

from __future__ import annotations

import functools
import inspect
import operator
import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)

from torch import Tensor, nn

from zeroir.frontend._torch_hooks import HOOKS_OF_MODULES
from zeroir.frontend.source.generators import generator_state
from zeroir.frontend.source.imports import is_known_package
from zeroir.frontend.source.namespaces import (
    PLAIN,
    ClassAttributes,
    ClosureVariables,
    Namespace,
    PlaceId,
    SlotAttributes,
    place_id,
)
from zeroir.frontend.watch.contents import contents_of_cache
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.stored_tensors import Container, StorePlace
from zeroir.frontend.watch.values_to_store import is_to_store
from zeroir.torch_ops.followed_numbers import FollowedNumber, is_number, text_of

Leaf = tuple[object, ...]
IsSame = Callable[[object, object], bool]

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_flat_weights"}
"""The attributes of torch's own bookkeeping; an RNN has its parameters, or the tracer's tensors, in a list, too."""

_LASTING = (nn.Module, type, FunctionType, BuiltinFunctionType, ModuleType)
"""These are compared by identity, not by contents. Other objects may be created anew in every forward."""

_MOST_ITEMS = 10_000
"""Larger containers hold data: they are compared by their length, and only appended items are removed again."""

_CACHED = type(cache(lambda: None))
"""Functions with a cache of results, which must not keep tensors of a trace."""

_RANDOM = "the state of Python's random"
_NUMPY_RANDOM = "the state of numpy.random"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersCode:
    """The user's code besides the model's classes: Python modules by name, and functions that a step calls.

    ``outside`` are the modules of torch that it holds beside the model, ``consumed`` objects that reading changes.
    ``spaces`` are namespaces of functions, each with the names that these mention.
    """

    modules: tuple[str, ...]
    functions: tuple[object, ...]
    outside: tuple[nn.Module, ...] = ()
    consumed: tuple[tuple[str, object], ...] = ()
    spaces: tuple[tuple[dict[str, object], frozenset[str]], ...] = ()

    @classmethod
    def of_function(cls, function: object) -> UsersCode:
        """Return what a function and those that it calls read beside a model's attributes."""
        spaces: dict[int, tuple[dict[str, object], set[str]]] = {}
        for each, name, _ in ReachedCode.of(None, (function,)).globals_of:
            _, names = spaces.setdefault(id(each.__globals__), (each.__globals__, set()))
            names.add(name)
        read = tuple((space, frozenset(names)) for space, names in spaces.values())
        return cls(modules=(), functions=(function,), spaces=read)


@dataclass(slots=True)
class PythonState:
    """The state at one time. ``leaves`` are comparable values by their names in messages.

    ``containers`` are those of attributes, variables, and items of lists and dicts, in the order in which they are met.
    ``modules`` has the model's modules, and those outside it, by the beginning of the names of their attributes.
    """

    code: UsersCode
    modules: dict[str, nn.Module] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    _restores: list[Callable[[IsSame], None]] = field(default_factory=list)
    _prefixes: Counter[str] = field(default_factory=Counter)
    # They are kept alive with the state, so that no two of them share an id.
    _seen: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, code: UsersCode) -> PythonState:
        """Return the state of a module and of the user's other code."""
        state = cls(code)
        for whole in (model, *code.outside):
            for name, module in whole.named_modules():
                path = name if whole is model else f"{type(whole).__name__}.{name}".rstrip(".")
                prefix = state._namespace(vars(module), f"{path}." if path else "", _OF_TORCH)
                state.modules[prefix] = module
                for hooks in HOOKS_OF_MODULES:
                    for hook in vars(module).get(hooks, {}).values():
                        state._callable(hook)
        for function in code.functions:
            state._callable(function)
        for kind in dict.fromkeys(k for m in state.modules.values() for k in type(m).__mro__):
            if not _is_pythons_or_torchs(kind):
                state._namespace(ClassAttributes(kind), f"{kind.__name__}.", frozenset())
        for name in code.modules:
            if name in sys.modules:
                module = sys.modules[name]
                file = Path(str(vars(module).get("__file__", name))).name
                state._namespace(vars(module), f"{file}:", _unmentioned(module))
        for space, mentioned in code.spaces:
            file = Path(str(space.get("__file__", "?"))).name
            state._namespace(space, f"{file}:", space.keys() - mentioned)
        for name, value in code.consumed:
            state._add(name, value)
        state._random_generators()
        return state

    def restore(self) -> None:
        """Restore this state, except for tensors that were replaced by others, because the tracer replaces tensors."""
        for restore in self._restores:
            restore(_is_same)

    def restore_exactly(self) -> None:
        """Restore this state completely, after tracing."""
        for restore in self._restores:
            restore(operator.is_)

    def changed(self, later: PythonState) -> list[str]:
        """Return the names that differ at a later time, in order.

        A container's own name instead of those of its items.
        """
        names: list[str] = []
        inside: tuple[str, ...] = ()
        for name in {**self.leaves, **later.leaves}:
            if self.leaves.get(name) != later.leaves.get(name) and not name.startswith(inside):
                names.append(name)
                inside += (f"{name}[", f"{name}.")
        return names

    def changed_objects(self, later: PythonState) -> list[str]:
        """Return those of the names that differ which are of other objects than numbers and tensors."""
        return [
            name
            for name in self.changed(later)
            if not all(
                leaf is None or leaf[0] in (bool, int, float, Tensor, is_to_store)
                for leaf in (self.leaves.get(name), later.leaves.get(name))
            )
        ]

    def stores(self) -> list[StorePlace]:
        """Return the places where tensors are now that were not there."""
        return [
            store
            for number, container in enumerate(self.containers)
            for store in container.stores(number)
        ]

    def place_of(self, store: StorePlace) -> PlaceId:
        """Return what identifies a place."""
        return place_id(self.containers[store.container].values, store.key)

    def _random_generators(self) -> None:
        generator = random.getstate()
        self._restores.append(lambda _: random.setstate(generator))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state()
            self._restores.append(lambda _: numpy.random.set_state(state))
        self.leaves |= random_generators()

    def _namespace(self, values: Namespace, prefix: str, without: Set[str]) -> str:
        """Save the attributes of a module, or variables, and return how their names begin.

        Names with double underscores are Python's own.
        """
        self._prefixes[prefix] += 1
        if self._prefixes[prefix] > 1:
            # Classes, and functions with variables, may have one name.
            prefix = f"{prefix[:-1]} ({self._prefixes[prefix]}){prefix[-1:]}"
        saved = {
            name: value
            for name, value in values.items()
            if name not in without and not name.startswith("__")
        }

        def restore(is_same: IsSame) -> None:
            for name in list(values):
                if name not in without and not name.startswith("__") and name not in saved:
                    del values[name]
            for name, value in saved.items():
                if name not in values or not is_same(values[name], value):
                    values[name] = value

        self._restores.append(restore)
        self.containers.append(
            Container(name=prefix, values=values, contents=saved, without=without)
        )
        for name, value in saved.items():
            self._add(prefix + name, value)
        return prefix

    def _callable(self, function: object) -> None:
        """Save the state of a hook or another function of the user: that of its object, or of its closure."""
        match function:
            case functools.partial():
                for value in (function.func, *function.args, *function.keywords.values()):
                    self._callable(value)
            case MethodType():
                self._callable(function.__func__)
                self._callable(function.__self__)
            case FunctionType():
                self._closure(inspect.unwrap(function))
            case nn.Module() | type() | None:
                pass  # modules of the model and their classes are saved anyway
            case _ if not (id(function) in self._seen or _is_pythons_or_torchs(type(function))):
                self._seen[id(function)] = function
                self._add_mutable(type(function).__name__, function)

    def _closure(self, function: Callable[..., object]) -> None:
        """Save the variables that a user's function shares with the code around it."""
        if (
            not isinstance(function, FunctionType)
            or id(function) in self._seen
            or is_known_package(function.__module__)
        ):
            return
        self._seen[id(function)] = function
        variables = ClosureVariables(function)
        self._namespace(variables, f"{function.__name__}:", frozenset())
        for value in variables.values():
            self._callable(value)

    def _add(self, name: str, value: object) -> None:
        if is_to_store(value):
            self.leaves[name] = (is_to_store,)
        elif isinstance(value, PLAIN) or is_number(value):
            # As text, because NaN is not equal to NaN, and True is equal to 1.
            self.leaves[name] = (type(value), text_of(value))
        elif isinstance(value, Tensor):
            self.leaves[name] = (Tensor, value.dtype, tuple(value.shape))
        elif isinstance(value, _CACHED):
            self.leaves[name] = (type(value),)
            self._restores.append(_forgetting_of(value))
        elif isinstance(value, tuple):
            self.leaves[name] = (tuple, len(value))
            self._add_all(name, enumerate(value))
        elif isinstance(value, _LASTING):
            self.leaves[name] = (type(value), id(value))
            if isinstance(value, FunctionType):
                self._closure(inspect.unwrap(value))
            self._seen[id(value)] = value
        elif id(value) in self._seen:
            self.leaves[name] = (type(value),)
        else:
            self._seen[id(value)] = value
            self._add_mutable(name, value)

    def _add_mutable(self, name: str, value: object) -> None:
        self.leaves[name] = (type(value),)
        match value:
            case dict():
                pairs = _pairs(value)
                self.leaves[name] += (len(pairs),)
                if len(pairs) <= _MOST_ITEMS:
                    self._restores.append(lambda is_same: _refill_mapping(value, pairs, is_same))
                    self.containers.append(Container(name=name, values=value, contents=pairs))
                    self._add_all(name, ((text_of(key), item) for key, item in pairs.items()))
            case list() | deque() | set() if len(value) > _MOST_ITEMS:
                length = len(value)
                self.leaves[name] += (length,)
                if isinstance(value, list):
                    self._restores.append(lambda _: value.__delitem__(slice(length, None)))
            case list() | deque():
                items = list(value)
                self._restores.append(lambda _: _refill(value, items))
                self.containers.append(Container(name=name, values=value, contents=items))
                self.leaves[name] += (len(items),)
                self._add_all(name, enumerate(items))
            case set():
                members = set(value)
                self._restores.append(lambda _: _refill_set(value, members))
                self.leaves[name] += (frozenset(map(_identity, members)),)
            case Iterator():
                self.leaves[name] += _progress(value)
            case _ if (generator := generator_state(value)) is not None:
                self.leaves[name] += (generator.content,)
                self._restores.append(lambda _: generator.restore())
            case _ if (attributes := _own_attributes(value)) is not None:
                self._namespace(attributes, f"{name}.", frozenset())

    def _add_all(self, name: str, items: Iterable[tuple[object, object]]) -> None:
        for key, item in items:
            self._add(f"{name}[{key}]", item)


@cache
def _names_in_functions(text: str) -> frozenset[str] | None:
    """Return the names that a file's functions and classes mention: no other global can change while they run.

    Return None if any global may change, because the text can access all of them, or is not Python.
    """
    try:
        codes = _inner_codes(compile(text, "<globals>", "exec"))
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += _inner_codes(code)
    return None if "globals" in names else frozenset(names)


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def random_generators() -> dict[str, Leaf]:
    """Return the states of Python's and NumPy's generators by their names in messages."""
    leaves: dict[str, Leaf] = {_RANDOM: random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, words, *others = numpy.random.get_state()
        leaves[_NUMPY_RANDOM] = (kind, words.tobytes(), *others)
    return leaves


def _unmentioned(module: ModuleType) -> Set[str]:
    """Return the globals of a Python module that its functions do not mention."""
    try:
        names = _names_in_functions(inspect.getsource(module))
    except (OSError, TypeError):
        return frozenset()
    return frozenset() if names is None else vars(module).keys() - names


def tensor_attributes(
    modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the named attributes of ``PythonState.modules`` that are tensors: module, attribute, tensor."""
    for module, attribute, value in _attributes(modules, names):
        if isinstance(value, Tensor):
            yield module, attribute, value


def number_attributes(
    modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield the named attributes of ``PythonState.modules`` that are numbers: module, attribute, value."""
    for module, attribute, value in _attributes(modules, names):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield module, attribute, value


def _attributes(
    modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[tuple[nn.Module, str, object]]:
    """Yield the named attributes of modules that exist: module, attribute, value."""
    for name in names:
        owner, dot, attribute = name.rpartition(".")
        module = modules.get(owner + dot)
        value = None if module is None else vars(module).get(attribute)
        if module is not None and value is not None and not is_to_store(value):
            yield module, attribute, value


def _own_attributes(value: object) -> Namespace | None:
    """Return the attributes of an object that are its state; None if its class is Python's or torch's."""
    kind = type(value)
    if _is_pythons_or_torchs(kind):
        return None
    if hasattr(value, "__dict__"):
        return vars(value)
    return SlotAttributes(value) if hasattr(kind, "__slots__") else None


def _progress(iterator: Iterator[object]) -> Leaf:
    """Return a value that changes when a Python iterator advances, as far as this is visible."""
    frame = iterator.gi_frame if isinstance(iterator, GeneratorType) else None
    if frame is not None:
        variables = {name: text_of(x) for name, x in frame.f_locals.items() if isinstance(x, PLAIN)}
        return (frame.f_lasti, tuple(variables.items()))
    return (repr(iterator), operator.length_hint(iterator, -1))


def _is_pythons_or_torchs(kind: type) -> bool:
    return is_known_package(kind.__module__)


def _identity(value: object) -> object:
    return (type(value), text_of(value)) if isinstance(value, PLAIN) else (type(value), id(value))


def _is_same(current: object, saved: object) -> bool:
    """Return whether nothing has to be restored; a tensor that replaces another one is the tracer's."""
    if current is saved or is_to_store(current) or is_to_store(saved):
        return current is saved
    return isinstance(current, Tensor) and isinstance(saved, Tensor)


def _forgetting_of(function: functools._lru_cache_wrapper[object]) -> Callable[[IsSame], None]:
    """Return a function that clears another one's cache if it has gained results since the last time.

    Plain results stay there, as in eager PyTorch.
    """
    misses = function.cache_info().misses

    def forget(_: IsSame) -> None:
        nonlocal misses
        present = function.cache_info().misses
        if present != misses and not all(map(_may_stay, contents_of_cache(function))):
            function.cache_clear()
            present = 0
        misses = present

    return forget


def _may_stay(value: object) -> bool:
    """Return whether something that a cache refers to may be there after a trace."""
    if isinstance(value, tuple):
        return all(map(_may_stay, value))
    is_plain = isinstance(value, PLAIN) and not isinstance(value, FollowedNumber)
    # A cache also refers to its function, its classes, a mark, and its links.
    is_its_own = isinstance(value, type | FunctionType) or type(value).__module__ == "functools"
    return is_plain or is_its_own or type(value) is object


def _refill(container: list[object] | deque[object], items: list[object]) -> None:
    if len(container) != len(items) or not all(map(operator.is_, container, items)):
        container.clear()
        container.extend(items)


def _pairs(container: dict[object, object]) -> dict[object, object]:
    """Return the stored items of a dict, because methods of a subclass may create items on demand."""
    base = OrderedDict if isinstance(container, OrderedDict) else dict
    return dict(base.items(container))


def _refill_mapping(
    container: dict[object, object], pairs: dict[object, object], is_same: IsSame
) -> None:
    stored = _pairs(container)
    if list(stored) != list(pairs) or not all(
        is_same(stored[key], value) for key, value in pairs.items()
    ):
        base = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in pairs.items():
            base.__setitem__(container, key, value)


def _refill_set(container: set[object], members: set[object]) -> None:
    if container != members:
        container.clear()
        container.update(members)
