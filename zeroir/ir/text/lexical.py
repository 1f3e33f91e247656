"""The smallest parts of the text, and the patterns that parse them."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Final

VERSION: Final = 1
"""The version of the text, the number after ``zeroir`` on the first line."""

BARE_NAME: Final = r"[A-Za-z0-9_.]+"
"""A name that needs no quotes. Module paths are such names."""

BARE_WORD: Final = r"[A-Za-z0-9_.,:+*={}-]+"
"""An option value or a pass spec that needs no quotes."""

STRING: Final = r'"(?:[^"\\\n]|\\[^\n])*"'
"""A JSON string; the printer escapes everything that is not ASCII."""

INTEGER: Final = r"-?[0-9]{1,1000}"
"""An integer, bounded in length because reading one takes quadratic time."""

FLOAT: Final = (
    r"-?(?:inf|nan|[0-9]{1,400}(?:\.[0-9]{1,400})?(?:e[+-]?[0-9]{1,4})?)(?![A-Za-z0-9_.])"
)
"""A float as printed by ``repr``, or an integer where only a float is possible."""

_IS_BARE_NAME = re.compile(BARE_NAME).fullmatch
_IS_BARE_WORD = re.compile(BARE_WORD).fullmatch


def quote(text: str) -> str:
    """Return a string literal, in one line of ASCII."""
    return json.dumps(text)


@lru_cache(maxsize=1 << 16)
def name(text: str) -> str:
    """Return a name, in quotes where necessary. A program prints most of its names several times."""
    return text if _IS_BARE_NAME(text) else quote(text)


def word(text: str) -> str:
    """Return an option value or a pass spec, in quotes where necessary."""
    return text if _IS_BARE_WORD(text) else quote(text)


def number(value: float) -> str:
    """Return a float as text that parses to the same bits; every NaN is ``nan``."""
    value = float(value)
    return "nan" if math.isnan(value) else repr(value)
