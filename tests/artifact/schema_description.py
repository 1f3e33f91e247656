"""The classes of the schema as text: two schemas with equal descriptions read each other's files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Final

from zeroir.ir.options import Options, Pairs

_STORED: Final[Mapping[object, object]] = {Options: Pairs}
"""What files store in the place of objects."""


def described(kind: type) -> dict[str, dict[str, str]]:
    """Every class and enumeration that the kind reaches, with annotations, defaults and values."""
    descriptions: dict[str, dict[str, str]] = {}
    _describe(kind, descriptions)
    return dict(sorted(descriptions.items()))


def _describe(hint: object, descriptions: dict[str, dict[str, str]]) -> None:
    for argument in typing.get_args(hint):
        if not isinstance(argument, typing.ForwardRef):
            _describe(argument, descriptions)
    if not isinstance(hint, type) or hint.__name__ in descriptions:
        return
    if issubclass(hint, Enum):
        descriptions[hint.__name__] = {member.name: str(member.value) for member in hint}
        return
    if not dataclasses.is_dataclass(hint):
        return
    hints = {name: _STORED.get(kind, kind) for name, kind in typing.get_type_hints(hint).items()}
    declared = typing.get_type_hints(hint, include_extras=True)
    fields = dataclasses.fields(hint)
    descriptions[hint.__name__] = {
        field.name: (
            # An op may annotate a field beyond its type; the annotation does not change the meaning of files.
            str(field.type)
            if declared[field.name] == hints[field.name]
            else _spelled(hints[field.name])
        )
        + _default(field)
        for field in fields
    }
    for field in fields:
        _describe(hints[field.name], descriptions)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f" = {field.default_factory()!r}"
    default = field.default.pairs if isinstance(field.default, Options) else field.default
    return "" if default is dataclasses.MISSING else f" = {default!r}"


def _spelled(hint: object) -> str:
    """A type as an annotation spells it."""
    if hint is types.NoneType:
        return "None"
    if isinstance(hint, type):
        return hint.__name__
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(map(_spelled, arguments))
    assert typing.get_origin(hint) is tuple, hint
    return (
        f"tuple[{', '.join('...' if part is Ellipsis else _spelled(part) for part in arguments)}]"
    )
