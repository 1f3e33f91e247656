"""Random generators of Python and NumPy, whose draws change their state, and code that reads a clock or entropy."""

from __future__ import annotations

import datetime
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, Final
from unittest import mock

_CLOCKS: Final = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
_MODULES: Final = (time, datetime, secrets, uuid)
_CLASSES: Final = (datetime.datetime, datetime.date)
_SOURCES: Final = frozenset(
    ("default_rng", "SystemRandom", "RandomState", "urandom", "uuid1", "uuid4")
)
"""Names of functions and classes whose results differ from call to call, even without any state of the caller's."""

_LATER: Final = 98_765
"""Seconds."""


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
def later_clocks() -> Iterator[None]:
    """Let the clocks of Python's ``time`` be about one day later within the block."""

    def later(name: str) -> Callable[[], float]:
        original, unit = getattr(time, name), 10**9 if name.endswith("_ns") else 1
        return lambda: original() + _LATER * unit

    with ExitStack() as patches:
        for name in _CLOCKS:
            patches.enter_context(mock.patch.object(time, name, later(name)))
        yield
