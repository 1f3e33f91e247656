"""Damages compiled programs as a broken disk, a mistake or malice would, in files with a correct digest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import msgpack

Spot = tuple[dict[str, object] | list[object], str | int]
"""A container of plain data, and the key or index of one item in it."""

_INTEGERS = (-1, 0, 1, 2, 3, 63, 64, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, -1.0, 1e308, float("inf"), float("nan"))
_TEXTS = ("", "nothing", "a b", "%x", "\x1b[2J\x1b[31m", "\u202etxt", "\ud800", "x" * 100_000)
_ODD: tuple[object, ...] = (None, True, 7, -1.5, "text", b"bytes", [], {}, ["ref", 0], {"a": 1})
_REPEATS = (2, 100, 20_000)
_BOMB_DEPTH = 2000


class Damage(NamedTuple):
    """A kind of damage, and the body of the file as it is after it."""

    kind: str
    body: bytes


def damaged(body: bytes, chance: Random) -> Damage:
    """A body with some of its bits or some of its structure broken, whatever the schema says."""
    kind = chance.choice(sorted(_BREAKS))
    return Damage(kind, _BREAKS[kind](body, chance))


def edited(body: bytes, chance: Random) -> Damage:
    """A body with one to three of its values replaced by others of their type, so that most of them decode."""
    data = msgpack.unpackb(body, unicode_errors="surrogatepass")
    kinds: list[str] = []
    for _ in range(chance.randint(1, 3)):
        spots = _spots(data)
        same: dict[str | int | None, list[object]] = {}
        for container, key in spots:
            same.setdefault(_role(container, key), []).append(container_item(container, key))
        container, key = chance.choice(spots)
        value = container_item(container, key)
        others = [
            v for v in same[_role(container, key)] if type(v) is type(value) and v is not value
        ]
        name, new = _edit(value, others, chance)
        _put(container, key, new)
        kinds.append(name)
    return Damage(kinds[0], _pack(data))


def container_item(container: dict[str, object] | list[object], key: str | int) -> object:
    """The item at a spot."""
    return container[key]  # type: ignore[index]


# ------------------------------------------------------------------------------------------------------ any damage


def _flip(body: bytes, chance: Random) -> bytes:
    flipped = bytearray(body)
    for _ in range(chance.randint(1, 8)):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _overwrite(body: bytes, chance: Random) -> bytes:
    start = chance.randrange(len(body))
    length = min(chance.randint(1, 16), len(body) - start)
    return body[:start] + chance.randbytes(length) + body[start + length :]


def _cut(body: bytes, chance: Random) -> bytes:
    start = chance.randrange(len(body))
    return body[:start] + body[start + chance.randint(1, 64) :]


def _truncate(body: bytes, chance: Random) -> bytes:
    return body[: chance.randrange(len(body))]


def _repeat(body: bytes, chance: Random) -> bytes:
    start = chance.randrange(len(body))
    stop = start + chance.randint(1, 64)
    return body[:stop] + body[start:stop] + body[stop:]


def _retype(body: bytes, chance: Random) -> bytes:
    data = msgpack.unpackb(body, unicode_errors="surrogatepass")
    container, key = chance.choice(_spots(data))
    _put(container, key, copy.deepcopy(chance.choice(_ODD)))
    return _pack(data)


def _nest(body: bytes, chance: Random) -> bytes:
    data = msgpack.unpackb(body, unicode_errors="surrogatepass")
    container, key = chance.choice(_spots(data))
    depth = chance.choice((10, 70, 500, _BOMB_DEPTH))
    nested = container_item(container, key)
    for _ in range(depth):
        nested = ["list", [nested]] if chance.random() < 0.9 else [nested]
    _put(container, key, nested)
    try:
        return _pack(data)
    except ValueError:  # deeper than msgpack writes: write what says so
        return b"\x91" * depth + body


_BREAKS: dict[str, Callable[[bytes, Random], bytes]] = {
    "bits flipped": _flip,
    "bytes overwritten": _overwrite,
    "bytes cut out": _cut,
    "body truncated": _truncate,
    "bytes repeated": _repeat,
    "value of another type": _retype,
    "value nested deep": _nest,
}


# ------------------------------------------------------------------------------------------------- edits that decode


def _edit(value: object, alike: list[object], chance: Random) -> tuple[str, object]:
    """A name for the edit of a value, and the edited value."""
    if alike and chance.random() < 0.5:
        return "value from elsewhere", copy.deepcopy(chance.choice(alike))
    match value:
        case bool():
            return "flag", not value
        case int():
            near = (value - 1, value + 1, 2 * value, value // 2, -value)
            return "number", chance.choice((*_INTEGERS, *near))
        case float():
            return "number", chance.choice(_FLOATS)
        case str():
            return "text", chance.choice((*_TEXTS, value + "x", value[:-1]))
        case bytes():
            return "bytes", chance.choice((b"", value + b"\0", value[:-1]))
        case list() if value:
            return _edit_list(value, chance)
        case dict() if value:
            kept = dict(value)
            kept.pop(chance.choice(sorted(kept)))
            return "field left out", kept
        case _:
            return "value made nothing", None


def _edit_list(value: list[object], chance: Random) -> tuple[str, object]:
    items = list(value)
    first = chance.randrange(len(items))
    match chance.randrange(5):
        case 0:
            del items[first]
            return "item left out", items
        case 1:
            times = chance.choice(_REPEATS)
            return "item repeated", [*items[:first], *[items[first]] * times, *items[first + 1 :]]
        case 2:
            second = chance.randrange(len(items))
            items[first], items[second] = items[second], items[first]
            return "items swapped", items
        case 3:
            return "list emptied", []
        case _:
            chance.shuffle(items)
            return "items shuffled", items


# ------------------------------------------------------------------------------------------------------- plain data


def _spots(data: object) -> list[Spot]:
    spots: list[Spot] = []
    todo = [data]
    while todo:
        container = todo.pop()
        if isinstance(container, dict):
            spots += [(container, key) for key in container]
            todo += container.values()
        elif isinstance(container, list):
            spots += [(container, index) for index in range(len(container))]
            todo += container
    return spots


def _role(container: dict[str, object] | list[object], key: str | int) -> str | int | None:
    """The purpose of a value: its field, or an item of a list."""
    return key if isinstance(container, dict) else None


def _put(container: dict[str, object] | list[object], key: str | int, value: object) -> None:
    container[key] = value  # type: ignore[index]


def _pack(data: object) -> bytes:
    packed = msgpack.packb(data, use_bin_type=True, unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed
