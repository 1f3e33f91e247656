"""Whether gradients are sums of exactly the contributions that training asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zeroir.ir.contents import Micro
from zeroir.ir.program import UPDATE, Slot
from zeroir.verify.descriptions import CAUSES, describe
from zeroir.verify.domain import (
    ALL_TERM,
    LOST_TERM,
    PAST_TERM,
    Gradient,
    PieceList,
    Poison,
    Slice,
    Strides,
    Term,
    Undefined,
    Value,
    Zero,
)
from zeroir.verify.flat_layout import FlatLayout


class Problem(NamedTuple):
    """A sentence, what to do in this case, and a code."""

    sentence: str
    advice: str = ""
    code: str = "Z402"


class Wanted(NamedTuple):
    """What a gradient must be: the sum of these contributions of each parameter, over these axes in order."""

    sources: Callable[[Slot], Mapping[int, int]]
    summed: tuple[str, ...]
    name: Callable[[int], str]


def wanted_sources(
    micro: Micro, section: str, has_past: bool, contributions: Mapping[str, list[int]]
) -> Callable[[Slot], Mapping[int, int]]:
    """The contributions that a gradient of these micro-steps must hold in this section."""

    def sources(slot: Slot) -> Mapping[int, int]:
        if section == UPDATE and micro is Micro.ALL:
            return {ALL_TERM: 1}
        current = Counter(contributions.get(slot.name, ()))
        if micro is Micro.CURRENT or not has_past:
            return {} if micro is Micro.PAST else current
        return {PAST_TERM: 1} if micro is Micro.PAST else {PAST_TERM: 1, **current}

    return sources


def measure(layout: FlatLayout, pieces: PieceList, flat: str, wanted: Wanted) -> Problem | None:
    """What is wrong at the first element that does not hold the wanted gradient; positions are flat elements."""
    for a, b, value in pieces:
        if isinstance(value, Poison):
            continue
        for x, y, slot in layout.between(flat, a, b):
            problem = (
                _padding(value, flat, x, y) if slot is None else _slot(value, flat, slot, wanted)
            )
            if problem is not None:
                return problem
    return None


def _padding(value: Value, flat: str, start: int, stop: int) -> Problem | None:
    if isinstance(value, Zero):
        return None
    what = CAUSES[value.cause] if isinstance(value, Undefined) else "something other than zeros"
    return Problem(
        f"the padding [{start}:{stop}] of the gradient of flat {flat} is {what}",
        "Fill the elements between and behind the parameters with 0 before the gradient is reduced.",
    )


def _slot(value: Value, flat: str, slot: Slot, wanted: Wanted) -> Problem | None:
    sources = wanted.sources(slot)
    if not sources:
        if isinstance(value, Zero):
            return None
        return Problem(
            f"the gradient of {slot.name} should be zeros here: no compute op contributes to it",
            f"Fill it with 0, or name the result that is its gradient (`grad {slot.name}: …`).",
        )
    if isinstance(value, Zero):
        return Problem(f"the gradient of {slot.name} is zeros: its contributions are lost")
    if isinstance(value, Undefined):
        return Problem(f"the gradient of {slot.name} is {CAUSES[value.cause]}")
    if not isinstance(value, Gradient) or value.flat != flat:
        return Problem(f"the gradient of {slot.name} should stand where {describe(value)} stands")
    if value.shift or value.strides:
        return Problem(f"the gradient of {slot.name} stands at the wrong elements")
    return _terms(value.terms, sources, slot.name, wanted)


def _terms(
    terms: tuple[Term, ...], sources: Mapping[int, int], name: str, wanted: Wanted
) -> Problem | None:
    """Compare a multiset of contributions with the wanted one; the reductions come last."""
    counts: Counter[int] = Counter()
    for term in terms:
        counts[term.source] += term.times
    if LOST_TERM in counts:
        return Problem(f"the gradient of {name} was scaled, or is one rank's part, not the sum")
    for source, count in sources.items():
        if counts[source] < count:
            return Problem(f"the gradient of {name} lacks {wanted.name(source)}")
        if counts[source] > count:
            return Problem(
                f"the gradient of {name} holds {wanted.name(source)} {counts[source]} times"
            )
    extra = next((source for source in counts if source not in sources), None)
    if extra is not None:
        return Problem(f"the gradient of {name} also holds {wanted.name(extra)}")
    for term in terms:
        for axis in wanted.summed:
            if axis not in term.summed:
                return Problem(f"the gradient of {name} is not summed over {axis}", code="Z404")
        if len(term.summed) > len(set(term.summed)):
            axis = next(a for a in term.summed if term.summed.count(a) > 1)
            return Problem(f"the gradient of {name} is summed over {axis} more than once")
        axis = next((a for a in term.summed if a not in wanted.summed), "")
        if axis:
            return Problem(f"the gradient of {name} is summed over {axis} too early")
        if term.summed != wanted.summed:
            order = " and then ".join(term.summed)
            return Problem(
                f"the gradient of {name} is summed over {order}, and not innermost first, over "
                f"{' and then '.join(wanted.summed)}: the order changes the rounding",
            )
    return None


def locate(value: Value) -> tuple[str, int, Strides] | None:
    """Flat, shift and strides of a gradient value: position p stands for flat element p + shift + strides."""
    match value:
        case Gradient():
            return value.flat, value.shift, value.strides
        case Slice():
            for _, _, inner in value.array:
                if isinstance(inner, Gradient) and not inner.strides:
                    return inner.flat, value.shift + inner.shift, value.strides
            return None
        case _:
            return None


def is_zero(value: Value) -> bool:
    """Whether the value is zero on every rank."""
    if isinstance(value, Slice):
        return all(is_zero(inner) for _, _, inner in value.array)
    return isinstance(value, Zero)
