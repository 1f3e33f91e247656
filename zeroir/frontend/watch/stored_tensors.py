"""Tensors that the user's code stores: activations that a hook keeps, ``self.last = y`` in forward, a list that grows.

What each forward stores anew changes no result, but the script may look at it. So these tensors are outputs of the
program, and the engine puts them where the code would, after each micro-step and evaluation.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.utils import _pytree as pytree

from zeroir.errors import InternalError
from zeroir.frontend._torch_private import is_traced
from zeroir.frontend.capture.captured_graph import OutputName
from zeroir.frontend.source.namespaces import PLAIN, PlaceId, place_id
from zeroir.frontend.watch.values_to_store import StoredAs, is_to_store
from zeroir.ir.reports import Storing
from zeroir.torch_ops.types import IR_DTYPE

Values = MutableMapping[Any, object] | list[object] | deque[object]
"""The attributes of an object, the variables of a function, or a container of Python's."""

_MISSING: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """A place where the code stores tensors: the number of its container in the state, and the key.

    ``is_appended`` is whether it appends them instead to a list, ``is_made`` whether a program can make them.
    """

    name: str
    container: int
    key: Any = None
    is_appended: bool = False
    is_made: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container with the ``contents`` that it had when the state was taken.

    Attributes and variables have those names that are not in ``without``; it is None for Python's own containers.
    """

    name: str
    values: Values
    contents: MutableMapping[Any, object] | list[object]
    without: Set[str] | None = None

    def stores(self, number: int) -> Iterator[StorePlace]:
        """Yield where tensors are now that were not there; ``number`` is that of the container."""
        for key, value in self._new_items():
            if has_tensors(value):
                # Another key, such as a module, is one of the copy that is traced.
                is_made = isinstance(key, PLAIN) and _is_made(value)
                yield StorePlace(
                    name=self._name_of(key), container=number, key=key, is_made=is_made
                )
        new = [] if isinstance(self.values, MutableMapping) else self._appended()
        if new and all(map(has_tensors, new)):
            yield StorePlace(
                name=self.name, container=number, is_appended=True, is_made=_is_made(new)
            )

    def _new_items(self) -> Iterator[tuple[Any, object]]:
        """Yield the keys that have another object now, and that object."""
        values, contents = self.values, self.contents
        if isinstance(values, MutableMapping):
            assert isinstance(contents, MutableMapping)
            # Methods of a subclass may create items on demand.
            items = dict.items(values) if isinstance(values, dict) else values.items()
            for key, value in list(items):
                is_own = self.without is None or not (key in self.without or key.startswith("__"))
                if is_own and contents.get(key, _MISSING) is not value:
                    yield key, value
        elif len(values) == len(contents) and not self._appended():
            for at, (before, now) in enumerate(zip(contents, values, strict=True)):
                if before is not now:
                    yield at, now

    def value_at(self, store: StorePlace) -> object:
        """Return what the code has stored at a place; a list of what it has appended.

        Raises:
            LookupError: if nothing is there.
        """
        if store.is_appended:
            return self._appended()
        return self.values[store.key]

    def put(self, store: StorePlace, value: object) -> None:
        """Replace what is at a place, or every item that was appended, by this value."""
        if not store.is_appended:
            self.values[store.key] = value
            return
        assert isinstance(self.values, list | deque)
        for at in range(1, 1 + len(self._appended())):
            self.values[-at] = value

    def _name_of(self, key: object) -> str:
        if self.without is not None:
            return f"{self.name}{key}"
        return (
            f"{self.name}[{key!r}]"
            if isinstance(key, PLAIN)
            else f"{self.name}[{type(key).__name__}]"
        )

    def _appended(self) -> list[object]:
        """Return what was appended to a list, or to a deque, which drops the first items where it is full."""
        before, now = list(self.contents), list(self.values)
        if len(before) == len(now) and all(map(operator.is_, before, now)):
            return []
        grown = len(now) - len(before)
        counts = range(grown, grown + 1) if grown > 0 else range(0)
        if len(now) == getattr(self.values, "maxlen", None):
            counts = range(max(grown, 1), len(now) + 1)
        for count in counts:
            kept = len(now) - count
            if all(map(operator.is_, before[count - grown :], now[:kept])):
                return now[kept:]
        return []


def has_tensors(value: object) -> bool:
    """Return whether an object consists of tensors, at least one, and of plain values."""
    leaves = pytree.tree_leaves(value)
    are_plain = all(_is_tensor(leaf) or isinstance(leaf, PLAIN) for leaf in leaves)
    return are_plain and any(map(_is_tensor, leaves))


def _is_tensor(leaf: object) -> bool:
    """Return whether an object is a tensor, or the value of one that is to be stored."""
    return is_to_store(leaf) or isinstance(leaf, Tensor)


def _is_made(value: object) -> bool:
    """Return whether a program can make the tensors of an object."""
    leaves = filter(_is_tensor, pytree.tree_leaves(value))
    tensors = [leaf.tensor if is_to_store(leaf) else leaf for leaf in leaves]
    return all(is_traced(tensor) and tensor.dtype in IR_DTYPE for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What the code stores at a place: the names of its tensors, and how the object that they are in is made."""

    store: StorePlace
    names: tuple[OutputName, ...]
    leaves: tuple[object, ...]
    structure: pytree.TreeSpec

    def with_tensors(self, tensors: Iterator[Tensor]) -> object:
        """Return the object with the next tensors."""
        leaves = [
            leaf.convert(next(tensors)) if isinstance(leaf, StoredAs) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)


def stored_values(
    stores: Sequence[StorePlace], containers: Sequence[Container], moment: Storing
) -> tuple[tuple[StoredObject, ...], list[Tensor]]:
    """Return what the code has just stored at these places, and the tensors in it, in order.

    Raises:
        LookupError: if nothing is at a place.
    """
    counts: Counter[str] = Counter()
    values: list[StoredObject] = []
    tensors: list[Tensor] = []
    for store in stores:
        value = containers[store.container].value_at(store)
        paths, structure = pytree.tree_flatten_with_path(value)
        names: list[OutputName] = []
        leaves: list[object] = []
        for path, leaf in paths:
            if _is_tensor(leaf):
                name = f"{store.name}{pytree.keystr(path)}"
                counts[name] += 1
                # Two objects may have the same name in messages.
                name += "" if counts[name] == 1 else f" ({counts[name]})"
                names.append(OutputName(name, moment))
                tensors.append(leaf.tensor if is_to_store(leaf) else leaf)
                leaves.append(StoredAs(leaf.convert if is_to_store(leaf) else _itself))
            else:
                leaves.append(leaf)
        values.append(
            StoredObject(store=store, names=tuple(names), leaves=tuple(leaves), structure=structure)
        )
    return tuple(values), tensors


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlace:
    """A place of the user's own where tensors are to be: what is stored there, and the container."""

    value: StoredObject
    container: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """The places of the user's own where the engine puts what the code would store there."""

    places: tuple[KeptPlace, ...] = ()

    @property
    def ids(self) -> frozenset[PlaceId]:
        """What identifies the places."""
        return frozenset(place_id(each.container, each.value.store.key) for each in self.places)

    @property
    def are_appended(self) -> bool:
        """Whether some are appended to a list in each micro-step."""
        return any(each.value.store.is_appended for each in self.places)

    def put(
        self, moment: Storing, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[Values, object, object]]:
        """Put the tensors, by their names, where the code would; yield each container, key and value."""
        for place in self.places:
            names = place.value.names
            if names[0].stored is not moment:
                continue
            value = place.value.with_tensors(tensors[name.path] for name in names)
            store, container = place.value.store, place.container
            if store.is_appended:
                assert isinstance(container, list | deque)
                assert isinstance(value, list)
                container.extend(value)
            else:
                container[store.key] = value
                yield container, store.key, value


NOTHING_KEPT: Final = KeptTensors()


def kept_tensors(
    values: Sequence[StoredObject], traced: Sequence[Container], own: Sequence[Container]
) -> KeptTensors:
    """Return the places of the user's own that correspond to those of the traced copy of the module.

    A container has the same name in both, but others may be met once there and twice here: those of a class of which an
    object has a part, too.
    """
    places: list[KeptPlace] = []
    for value in values:
        name, number = traced[value.store.container].name, value.store.container
        alike = [each for each in own if each.name == name]
        earlier = sum(each.name == name for each in traced[:number])
        if len(alike) != sum(each.name == name for each in traced):
            raise InternalError(f"the place of {value.store.name} in the module itself is unknown")
        places.append(KeptPlace(value=value, container=alike[earlier].values))
    return KeptTensors(places=tuple(places))
