"""What objects of Python's and NumPy's own classes hold, whose code is not followed."""

from __future__ import annotations

import configparser
import ctypes
import functools
import gc
import logging
import operator
import queue
import threading
import weakref
import zlib
from _thread import LockType
from array import array
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TypeGuard

from zeroir.frontend.source.namespaces import PLAIN
from zeroir.torch_ops.followed_numbers import text_of


def checksum_of(value: object) -> Callable[[], int] | None:
    """Return a function that computes a checksum of an array's, scalar's or buffer's values; None for other objects."""
    if isinstance(
        value, array | bytearray | memoryview | ctypes.Array | ctypes.Structure
    ) or _is_of_c(value):
        return lambda: zlib.crc32(value)
    # Objects of the user's may compute any attribute.
    content = getattr(value, "tobytes", None) if type(value).__module__ == "numpy" else None
    if content is None:
        return None
    return lambda: zlib.crc32(content())


def _is_of_c(value: object) -> TypeGuard[bytearray]:
    """Return whether an object is a number of ``ctypes``, whose memory can be read."""
    return any(kind.__name__ == "_SimpleCData" for kind in type(value).__mro__)


def held_by(value: object) -> tuple[str, Callable[[], object]] | None:
    """Return the expression, after the object's name, for what an object refers to, and a function that reads it."""
    match value:
        case UserDict() | UserList() | UserString():
            return ".data", lambda: value.data
        case ChainMap():
            return ".maps", lambda: value.maps
        case weakref.ReferenceType():
            return "()", value
        case ContextVar():
            return ".get()", lambda: _value_of(value)
        case threading.local():
            return ".__dict__", lambda: vars(value)
        case threading.Event():
            return ".is_set()", value.is_set
        case LockType():
            return ".locked()", value.locked
        case configparser.RawConfigParser():
            return "", lambda: vars(value)["_sections"]
        case configparser.SectionProxy():
            return ".parser", lambda: value.parser
        case queue.Queue():
            return ".queue", lambda: value.queue
        case logging.Logger():
            return ".getEffectiveLevel()", value.getEffectiveLevel
        case _ if type(value).__module__ == "multiprocessing.sharedctypes":
            return ".get_obj()", getattr(value, "get_obj")  # noqa: B009
        case _:
            return None


def contents_of_cache(function: functools._lru_cache_wrapper[object]) -> list[object]:
    """Return the arguments and results that a function with a cache has, and what else it refers to."""
    contents: list[object] = []
    for value in gc.get_referents(function):
        if not isinstance(value, dict):
            contents.append(value)
        elif value is not vars(function):
            contents += (*value.keys(), *value.values())
    return contents


def _value_of(variable: ContextVar[object]) -> object:
    try:
        return variable.get()
    except LookupError:
        return None


def names_read_by(value: object) -> Iterable[str]:
    """Return the names of attributes that an ``attrgetter`` or ``methodcaller`` reads."""
    if isinstance(value, operator.attrgetter):
        return [part for name in value.__reduce__()[1] for part in str(name).split(".")]
    if isinstance(value, operator.methodcaller):
        return [str(value.__reduce__()[1][0])]
    return ()


def digest(items: Iterable[object]) -> int:
    """Return a checksum of items: of the values of plain ones, and of which objects the others are."""
    texts = (text_of(item) if isinstance(item, PLAIN) else str(id(item)) for item in items)
    return zlib.crc32("\n".join(texts).encode())
