"""Optimizer groups as people write them: patterns of parameter names, and the settings of the parameters that match.

``head.*|embed.weight:lr=1e-4,weight_decay=0`` sets the learning rate and the weight decay of the parameters whose name
matches one of two patterns. Keys are options of the optimizer, and ``name``, by which programs and
``engine.optimizer`` call the group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from zeroir.config.optimizer import GROUP_KEYS
from zeroir.ir.optimizers.catalogue import USUAL

DEFAULT_GROUP: Final = "default"
"""The group of the parameters that match no pattern."""

NO_DECAY: Final = "no_decay"
"""The name, or the last part of the name, of a group without weight decay."""

_LEFT_NAMES: Final = (str(USUAL), f"{USUAL}.{NO_DECAY}")
"""The names, or their last parts, of the groups of parameters that the optimizer does not take."""

SEPARATOR: Final = ";"
"""Stands between groups where several are one text."""

_NAME: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_]+")
_EXAMPLE: Final = "head.*:lr=1e-4,weight_decay=0"


class GroupError(ValueError):
    """A group that cannot be read; the message is the rest of a sentence on its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group as it is written: ``settings`` are options of the optimizer by name, as texts."""

    text: str
    name: str
    patterns: tuple[str, ...]
    settings: Mapping[str, str]

    def matches(self, names: Sequence[str]) -> bool:
        """Return whether a pattern matches one of the names of a parameter, or of a module that contains it."""
        candidates = {
            ".".join(parts[:count])
            for parts in (name.split(".") for name in names)
            for count in range(1, len(parts) + 1)
        }
        return any(fnmatchcase(name, pattern) for pattern in self.patterns for name in candidates)


def parse_groups(texts: Sequence[str]) -> tuple[GroupSpec, ...]:
    """Return the groups that the texts describe, in their order, each with a name of its own.

    A name that is made from a pattern is none that another group may get when it is split.

    Raises:
        GroupError: where a text is no group, sets an unknown key, or repeats the name of another group.
    """
    specs: list[GroupSpec] = []
    taken = {DEFAULT_GROUP}
    reserved = {NO_DECAY, *_LEFT_NAMES}
    for text in texts:
        selector, colon, settings = text.rpartition(":")
        patterns = tuple(pattern.strip() for pattern in selector.split("|"))
        if not colon or not all(patterns):
            raise GroupError(f"should be written like {_EXAMPLE}, but is {text!r}")
        values = _settings(text, settings)
        given = values.pop("name", None)
        name = _NOT_IN_NAMES.sub("_", patterns[0]).strip("_") or "group"
        if given is not None:
            if not _NAME.fullmatch(given):
                raise GroupError(f"{text} has the name {given!r}, but names are like head_2")
            if given in taken:
                raise GroupError(f"{text} has the name {given}, which is another group's")
            name = given
        number = 2
        while given is None and name in taken | reserved:
            name = f"{name.removesuffix(f'_{number - 1}')}_{number}"
            number += 1
        taken.add(name)
        reserved |= {f"{name}.{ending}" for ending in (NO_DECAY, *_LEFT_NAMES)}
        specs.append(GroupSpec(text=text, name=name, patterns=patterns, settings=values))
    return tuple(specs)


def group_text(patterns: str, settings: Mapping[str, object]) -> str:
    """Return the text of a group whose settings are given as values.

    Raises:
        GroupError: where a value is no number, truth value or text.
    """
    for key, value in settings.items():
        if not isinstance(value, bool | int | float | str):
            raise GroupError(f"{patterns} sets {key} to {value!r}, but values are numbers or texts")
    return f"{patterns}:" + ",".join(f"{key}={value}" for key, value in settings.items())


def _settings(text: str, settings: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in settings.split(",") if settings.strip() else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise GroupError(f"should be written like {_EXAMPLE}, but is {text!r}")
        if key not in (*GROUP_KEYS, "name"):
            near = get_close_matches(key, GROUP_KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": {', '.join(GROUP_KEYS)}, name"
            raise GroupError(f"{text} sets {key}, which is no setting of a group{hint}")
        if key in values:
            raise GroupError(f"{text} sets {key} twice")
        values[key] = value
    return values
