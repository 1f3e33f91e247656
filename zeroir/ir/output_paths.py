"""Paths of tensors in the user's outputs of an evaluation, as text: ``['logits']``, ``(1)['hidden'][0]``.

A path is a sequence of steps from the outside in, which identify the type of each container: ``['key']`` a dict,
``[0]`` a list, ``(0)`` a tuple and ``.name`` an object with attributes. So the structure of the outputs can be rebuilt
from the paths alone, without the user's classes. The empty path is for outputs that are one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Final, NamedTuple

_STEP: Final = re.compile(
    r"\['(?P<key>(?:[^'\\]|\\.)*)'\]|\[(?P<item>\d+)\]|\((?P<member>\d+)\)|\.(?P<attribute>[^\W\d]\w*)"
)
_ESCAPED: Final = re.compile(r"\\(.)")


class OutputPathError(ValueError):
    """Paths that no outputs can have; the message is the part of a sentence that follows ``the outputs``."""


class Step(NamedTuple):
    """One step: its kind (``key``, ``item``, ``member`` or ``attribute``) and the key, the index or the name."""

    kind: str
    at: str | int


def key_step(key: str) -> str:
    """Return the step to the value of a key in a dict."""
    escaped = key.replace("\\", "\\\\").replace("'", "\\'")
    return f"['{escaped}']"


def steps_of(path: str) -> tuple[Step, ...]:
    """Return the steps of a path.

    Raises:
        OutputPathError: if the text is not a path.
    """
    steps: list[Step] = []
    position = 0
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            raise OutputPathError(f"have the path {path}, which is none")
        kind, text = next((k, v) for k, v in match.groupdict().items() if v is not None)
        if kind == "key":
            text = _ESCAPED.sub(r"\1", text)
        steps.append(Step(kind, int(text) if kind in ("item", "member") else text))
        position = match.end()
    return tuple(steps)


def structured(values: Sequence[tuple[str, object]]) -> object:
    """Return outputs with the value of each path; None if there are no values.

    An object with attributes becomes a ``types.SimpleNamespace``.

    Raises:
        OutputPathError: if the paths contradict each other.
    """
    if not values:
        return None
    return _structured([(steps_of(path), value) for path, value in values])


def _structured(values: Sequence[tuple[tuple[Step, ...], object]]) -> object:
    if any(not steps for steps, _ in values):
        if len(values) > 1:
            raise OutputPathError("have two values at one place")
        return values[0][1]
    kinds = {steps[0].kind for steps, _ in values}
    if len(kinds) > 1:
        raise OutputPathError("have containers of two kinds at one place")
    children: dict[str | int, list[tuple[tuple[Step, ...], object]]] = {}
    for steps, value in values:
        children.setdefault(steps[0].at, []).append((steps[1:], value))
    parts = {at: _structured(inner) for at, inner in children.items()}
    (kind,) = kinds
    if kind == "key":
        return parts
    if kind == "attribute":
        return SimpleNamespace(**{str(name): part for name, part in parts.items()})
    if list(parts) != list(range(len(parts))):
        raise OutputPathError("leave out an item of a list or tuple")
    return list(parts.values()) if kind == "item" else tuple(parts.values())


def children(value: object) -> Iterator[tuple[str, object]] | None:
    """Return the step to each part of a container in the user's outputs, and the part; None for other objects.

    A mapping with string keys is a dict, a named tuple or dataclass an object with attributes.

    Raises:
        OutputPathError: for a mapping with other keys.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise OutputPathError(f"have the key {key!r} in a dict, which is no text")
        return ((key_step(key), part) for key, part in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ((f".{name}", getattr(value, name)) for name in value._fields)
    if isinstance(value, list):
        return ((f"[{at}]", part) for at, part in enumerate(value))
    if isinstance(value, tuple):
        return ((f"({at})", part) for at, part in enumerate(value))
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is not None:
        return ((f".{name}", getattr(value, name)) for name in fields)
    return None
