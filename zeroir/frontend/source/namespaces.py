"""Attributes of classes, variables of closures and slots of objects as mappings from names to values."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from types import CellType, FunctionType
from typing import Final

import torch

from zeroir.torch_ops.followed_numbers import FollowedNumber

Namespace = MutableMapping[str, object]

PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, FollowedNumber),
)
"""The classes of values that are compared by their text."""


class ClassAttributes(MutableMapping[str, object]):
    """The attributes of a class as a mapping; Python only changes them through setattr."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getitem__(self, name: str) -> object:
        return vars(self.kind)[name]

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(vars(self.kind)))

    def __len__(self) -> int:
        return len(vars(self.kind))


class ClosureVariables(MutableMapping[str, object]):
    """The variables of a function's closure that have a value."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = dict(cells)

    def __getitem__(self, name: str) -> object:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: object) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._cells and _has_value(self._cells[name])

    def cell(self, name: str) -> CellType:
        """Return the cell of a variable, which functions share."""
        return self._cells[name]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _has_value(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


class SlotAttributes(MutableMapping[str, object]):
    """The attributes of an object whose class has slots, except those without a value."""

    def __init__(self, value: object) -> None:
        self.value = value
        slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
        self._names = [
            name for names in slots for name in ([names] if isinstance(names, str) else names)
        ]

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self.value, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: object) -> None:
        # Not by the class's own method, which a frozen dataclass replaces.
        object.__setattr__(self.value, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.value, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self.value, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


PlaceId = tuple[int, object]
"""Identifies a place: the id of an object, and the key in it; that of a variable is the id of its cell."""


def place_id(container: object, key: object) -> PlaceId:
    """Return what identifies the place of a key in a container, and the container itself with the key None."""
    match container:
        case ClosureVariables() if isinstance(key, str):
            return id(container.cell(key)), None
        case ClassAttributes():
            return id(container.kind), key
        case SlotAttributes():
            return id(container.value), key
        case _:
            return id(container), key
