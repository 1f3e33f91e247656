"""The text of sizes that depend on dims, such as ``batch*((length+3)//4)*16-batch``, read as ``str`` spells it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from zeroir.ir.sizes import Dim, quotient

_PLAIN_FACTOR: Final = r"(?:[A-Za-z_][A-Za-z0-9_]*(?:\^[0-9]{1,2})?|[0-9]{1,30})"
_PRODUCT: Final = rf"{_PLAIN_FACTOR}(?:\*{_PLAIN_FACTOR})*"
_QUOTIENT: Final = (
    rf"\((?:{_PRODUCT}|\({_PRODUCT}(?:[+-]{_PRODUCT})+\))//[0-9]{{1,18}}\)(?:\^[0-9]{{1,2}})?"
)
_FACTOR: Final = rf"(?:{_PLAIN_FACTOR}|{_QUOTIENT})"
SIZE_TEXT: Final = rf"-?{_FACTOR}(?:[*+-]{_FACTOR})*"
"""A size as ``str`` spells it."""

_SIZE: Final = re.compile(SIZE_TEXT)
_LONGEST_TEXT: Final = 20_000
"""The most characters of a size that ``parse_size`` reads; those of models have a few dozen."""

_PLAIN_TERM: Final = re.compile(rf"([+-]?)({_PRODUCT})")
_TERM: Final = re.compile(rf"([+-]?)({_FACTOR}(?:\*{_FACTOR})*)")
_ONE_FACTOR: Final = re.compile(_FACTOR)
_PARTS: Final = re.compile(
    r"\(\(?(?P<dividend>[^()]+)\)?//(?P<divisor>[0-9]+)\)(?:\^(?P<power>[0-9]+))?"
)


class UnknownDimError(ValueError):
    """A text names a dim that the program does not declare."""


def parse_size(text: str, dims: Mapping[str, Dim]) -> int | None:
    """Return the size that a text spells, None where it spells none; a plain integer where it names no dim.

    Raises:
        UnknownDimError: where it names another dim than these.
        UserError: where it spells a larger size than any model has.
    """
    if len(text) > _LONGEST_TEXT or _SIZE.fullmatch(text) is None:
        return None
    total: int = 0
    for sign, factors in _TERM.findall(text):
        term = _parsed_product(_ONE_FACTOR.findall(factors), dims)
        if term is None:
            return None
        total = (-term if sign == "-" else term) + total
    return total


def _parsed_product(factors: Sequence[str], dims: Mapping[str, Dim]) -> int | None:
    """Return a product; None where something is divided by 0."""
    product: int = 1
    for factor in factors:
        parts = _PARTS.fullmatch(factor)
        name, _, power = factor.partition("^")
        if parts is not None:
            value = _parsed_quotient(parts["dividend"], int(parts["divisor"]), dims)
            power = parts["power"] or ""
        elif name.isdecimal():
            value = int(name)
        elif name in dims:
            value = dims[name].size
        else:
            raise UnknownDimError(name)
        if value is None:
            return None
        for _ in range(int(power or 1)):
            product = value * product
    return product


def _parsed_quotient(text: str, divisor: int, dims: Mapping[str, Dim]) -> int | None:
    dividend: int = 0
    for sign, product in _PLAIN_TERM.findall(text):
        term = _parsed_product(product.split("*"), dims)
        assert term is not None  # it has no quotients
        dividend = (-term if sign == "-" else term) + dividend
    return quotient(dividend, divisor) if divisor else None
