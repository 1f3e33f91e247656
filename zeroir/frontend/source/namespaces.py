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
        self._kind = kind

    def __getitem__(self, name: str) -> object:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(vars(self._kind)))

    def __len__(self) -> int:
        return len(vars(self._kind))


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
        self._value = value
        slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
        self._names = [
            name for names in slots for name in ([names] if isinstance(names, str) else names)
        ]

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self._value, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: object) -> None:
        # Not by the class's own method, which a frozen dataclass replaces.
        object.__setattr__(self._value, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._value, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._value, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)
