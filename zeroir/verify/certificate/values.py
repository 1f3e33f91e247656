"""Abstract values as plain data, each of which stands once in the certificate's list of contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from zeroir.verify.interpreter.domain import (
    Decision,
    Elements,
    FlatKey,
    Gradient,
    NamedKey,
    Numbering,
    PieceList,
    Poison,
    Slice,
    Split,
    Statistic,
    Strides,
    Term,
    Undefined,
    Value,
    Weight,
    Zero,
    coalesced,
)

Plain = Sequence["Plain"] | str | int | bool | None
Claim = list[list[int]]
"""The pieces of a region, in order: where each ends, and the number of its content."""


class Contents:
    """The contents that a certificate names by numbers."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self.plain: list[Plain] = []
        self._numbers: dict[Value, int] = {}

    def claim(self, pieces: PieceList) -> Claim:
        """Return what a region holds."""
        return [[stop, self._number(value)] for _, stop, value in coalesced(pieces)]

    def _number(self, value: Value) -> int:
        number = self._numbers.get(value)
        if number is None:
            plain = self._spelled(value)
            number = self._numbers[value] = len(self.plain)
            self.plain.append(plain)
        return number

    def _spelled(self, value: Value) -> Plain:
        match value:
            case Zero():
                return ["zero"]
            case Undefined() | Poison() | Split():
                return ["undefined"]
            case Elements():
                return [*_named(value), value.shift, _strides(value.strides)]
            case Gradient():
                terms = _terms(value.terms)
                return ["gradient", value.flat, terms, value.shift, _strides(value.strides)]
            case Weight():
                return ["weight", _terms(value.terms)]
            case Statistic():
                # The certificate does not say what a statistic covers.
                summed = value.summed if value.is_sum else ()
                unsummed = replace(value, summed=()) if value.is_sum else value
                return ["value", self._numbering.of(unsummed), list(summed), 0, []]
            case Decision():
                return ["value", f"{value.what} of {value.number}", [], 0, []]
            case Slice():
                array: Sequence[Plain] = [[a, b, self._number(v)] for a, b, v in value.array]
                return ["slice", array, value.shift, _strides(value.strides)]
            case _:
                assert_never(value)


def _named(value: Elements) -> Sequence[Plain]:
    match value.key:
        case FlatKey() as key:
            return ["flat", key.quantity, key.flat, key.version, key.guess]
        case NamedKey() as key:
            return ["value", f"{key.name} {key.version}", list(value.summed)]
        case int() as number:
            return ["value", number, list(value.summed)]


def _strides(strides: Strides) -> Sequence[Plain]:
    return [[axis, step] for axis, step in strides]


def _terms(terms: tuple[Term, ...]) -> Sequence[Plain]:
    return [[term.source, list(term.summed), term.times] for term in terms]
