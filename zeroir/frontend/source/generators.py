"""Random generators of Python and NumPy, whose draws change their state, and code that reads a clock or entropy."""

from __future__ import annotations

import datetime
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, Self
from unittest import mock

_CLOCKS: Final = (
    *("time", "monotonic", "perf_counter", "process_time", "thread_time"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns"),
)
_CALENDARS: Final = ("localtime", "gmtime", "ctime")
"""Functions of the time in seconds, which is the present one by default."""

_TEXTS: Final = (("strftime", 1), ("asctime", 0))
"""Functions of a date, and its position among their arguments; it is the present one by default."""

_MODULES: Final = (time, datetime, secrets, uuid)
_CLASSES: Final = (datetime.datetime, datetime.date)
_SOURCES: Final = frozenset(
    ("default_rng", "SystemRandom", "RandomState", "urandom", "uuid1", "uuid4")
)
"""Names of functions and classes whose results differ from call to call, even without any state of the caller's."""

_LATER: Final = 400 * 86_400 + 12_345
"""Seconds, after which every part of a date is another one."""


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of a random generator as text, and a function that restores it."""

    content: str
    restore: Callable[[], None]


def generator_state(value: object) -> GeneratorState | None:
    """Return the state of a random generator of Python or NumPy; None for other objects."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        state = value.getstate()
        return GeneratorState(repr(state), lambda: value.setstate(state))
    bits = _bits_of(value)
    if bits is None:
        return None
    present = bits.state
    return GeneratorState(repr(present), lambda: setattr(bits, "state", present))


def is_consumed(value: object) -> bool:
    """Return whether reading an object changes it, as it does a random generator or an iterator."""
    return isinstance(value, Iterator | random.Random) or _bits_of(value) is not None


def _bits_of(value: object) -> Any:  # noqa: ANN401 - NumPy need not be installed
    """Return the object of NumPy's that has the state of a random generator; None for other objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    bits: Any = value
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
    elif isinstance(value, numpy.random.RandomState):
        bits = value._bit_generator
    return bits if isinstance(bits, numpy.random.BitGenerator) else None


def is_clock(name: str, value: object) -> bool:
    """Return whether code that reads ``value`` by this name may read a clock, or random bits of the system's."""
    return (
        name in _SOURCES
        or any(value is each for each in (*_MODULES, *_CLASSES))
        or (isinstance(value, BuiltinFunctionType) and value.__module__ == "time")
    )


@contextmanager
def later_clocks(functions: Iterable[FunctionType]) -> Iterator[Callable[[], bool]]:
    """Let the clocks of Python be later within the block, also those that are globals of ``functions``.

    Yield a function that returns whether random bits of the system were drawn.
    """
    others = {id(original): (original, later) for original, later in _later_originals()}
    draws: list[int] = []
    noting = _noting(os.urandom, draws)
    spaces = {id(vars(module)): vars(module) for module in (time, datetime)}
    spaces |= {id(function.__globals__): function.__globals__ for function in functions}
    with ExitStack() as patches:
        for space in spaces.values():
            known = {name: value for name, value in space.items() if id(value) in others}
            patches.callback(space.update, known)
            space.update({name: others[id(value)][1] for name, value in known.items()})
        for owner, name in ((os, "urandom"), (random, "_urandom")):
            patches.enter_context(mock.patch.object(owner, name, noting))
        yield lambda: bool(draws)


def _noting(original: Callable[[int], bytes], draws: list[int]) -> Callable[[int], bytes]:
    def draw(size: int) -> bytes:
        draws.append(size)
        return original(size)

    return draw


def _later_originals() -> Iterator[tuple[object, object]]:
    """Yield each function and class that reads a clock, and one that reads a later one."""
    for name in _CLOCKS:
        yield getattr(time, name), _later(getattr(time, name), 10**9 if name.endswith("_ns") else 1)
    for name in _CALENDARS:
        yield getattr(time, name), _of_later_time(getattr(time, name))
    for name, position in _TEXTS:
        yield getattr(time, name), _of_later_date(getattr(time, name), position)
    yield datetime.datetime, _LaterDatetime
    yield datetime.date, _LaterDate


def _later(original: Callable[[], float], unit: int) -> Callable[[], float]:
    return lambda: original() + _LATER * unit


def _of_later_time(original: Callable[[float], object]) -> Callable[..., object]:
    present = time.time
    return lambda seconds=None: original(present() + _LATER if seconds is None else seconds)


def _of_later_date(original: Callable[..., object], position: int) -> Callable[..., object]:
    present, local = time.time, time.localtime

    def call(*args: object) -> object:
        return original(*args, *([local(present() + _LATER)] if len(args) == position else []))

    return call


class _LikeItsBase(type):
    """The class of classes whose instances are those of the class that they extend."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


class _LaterDatetime(datetime.datetime, metaclass=_LikeItsBase):
    """Dates with times, of which the present one is later."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return super().now(tz) + _DELTA

    @classmethod
    def utcnow(cls) -> Self:
        return super().utcnow() + _DELTA

    @classmethod
    def today(cls) -> Self:
        return super().today() + _DELTA


class _LaterDate(datetime.date, metaclass=_LikeItsBase):
    """Dates, of which the present one is later."""

    @classmethod
    def today(cls) -> Self:
        return super().today() + _DELTA


_DELTA: Final = datetime.timedelta(seconds=_LATER)
