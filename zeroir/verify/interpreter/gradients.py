"""Checks that gradients are sums of exactly the contributions that training needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from zeroir.ir.contents import Micro
from zeroir.ir.program import UPDATE
from zeroir.verify.interpreter.descriptions import CAUSES, describe
from zeroir.verify.interpreter.domain import (
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
    Weight,
    Zero,
    current_term,
)
from zeroir.verify.interpreter.section_run import SectionRun


class Problem(NamedTuple):
    """A message, the remedy in this case, and a code."""

    sentence: str
    advice: str = ""
    code: str = "Z402"


def measure(
    run: SectionRun, pieces: PieceList, flat: str, micro: Micro, summed: tuple[str, ...]
) -> Problem | None:
    """Return the problem at the first element that is not the wanted gradient; positions are flat elements.

    Wanted is the sum of the contributions of these micro-steps, over the axes ``summed`` in order.
    """
    for a, b, value in pieces:
        if isinstance(value, Poison):
            continue
        for x, y, slot in run.layout.between(flat, a, b):
            problem = (
                _padding(value, flat, x, y)
                if slot is None
                else _slot(run, value, flat, slot.name, micro, summed)
            )
            if problem is not None:
                return problem
    return None


def _sources(run: SectionRun, name: str, micro: Micro) -> Mapping[int, int]:
    """Return the contributions to a parameter's gradient of these micro-steps, and how often each must be included."""
    if run.section.name == UPDATE and micro is Micro.ALL:
        return {ALL_TERM: 1}
    past = {PAST_TERM: 1} if run.layout.has_past and micro is not Micro.CURRENT else {}
    return past if micro is Micro.PAST else {**past, **Counter(run.contributions.get(name, ()))}


def _padding(value: Value, flat: str, start: int, stop: int) -> Problem | None:
    if isinstance(value, Zero):
        return None
    what = CAUSES[value.cause] if isinstance(value, Undefined) else "something other than zeros"
    return Problem(
        f"the padding [{start}:{stop}] of the gradient of flat {flat} is {what}",
        "Fill the elements between and behind the parameters with 0 before the gradient is reduced.",
    )


def _slot(
    run: SectionRun, value: Value, flat: str, name: str, micro: Micro, summed: tuple[str, ...]
) -> Problem | None:
    sources = _sources(run, name, micro)
    if not sources:
        if isinstance(value, Zero):
            return None
        return Problem(
            f"the gradient of {name} should be zeros here: no compute op contributes to it",
            f"Fill it with 0, or name the result that is its gradient (`grad {name}: …`).",
        )
    if isinstance(value, Zero):
        return Problem(f"the gradient of {name} is zeros: its contributions are lost")
    if isinstance(value, Undefined):
        return Problem(f"the gradient of {name} is {CAUSES[value.cause]}")
    if not isinstance(value, Gradient) or value.flat != flat:
        return Problem(f"the gradient of {name} should stand where {describe(value)} stands")
    if value.shift or value.strides:
        return Problem(f"the gradient of {name} stands at the wrong elements")
    return _terms(run, value.terms, sources, f"the gradient of {name}", summed)


def weight_problem(
    run: SectionRun, value: Value, micro: Micro, summed: tuple[str, ...]
) -> Problem | None:
    """Return why a value is not the sum of the weights of these micro-steps, over the axes ``summed`` in order.

    These are the past micro-steps, or all so far including those of the section.
    """
    if isinstance(value, Poison):
        return None
    if run.section.name == UPDATE and micro is Micro.ALL:
        sources = {ALL_TERM: 1}
    else:
        has_past = run.layout.has_past and micro in (Micro.PAST, Micro.ALL)
        sources = {PAST_TERM: 1} if has_past else {}
        if micro is Micro.ALL:
            sources |= {current_term(index): 1 for index in range(run.program.interleaved)}
    if isinstance(value, Zero) and not sources:
        return None
    if not isinstance(value, Weight):
        return Problem(f"it should be the weight of the micro-steps, but is {describe(value)}")
    return _terms(run, value.terms, sources, "the weight", summed)


def _terms(
    run: SectionRun,
    terms: tuple[Term, ...],
    sources: Mapping[int, int],
    what: str,
    summed: tuple[str, ...],
) -> Problem | None:
    """Compare a multiset of contributions, whose sum is ``what``, with the wanted one; check the reductions last."""
    counts: Counter[int] = Counter()
    for term in terms:
        counts[term.source] += term.times
    if LOST_TERM in counts:
        return Problem(f"{what} was scaled, or is one rank's part, not the sum")
    for source, count in sources.items():
        if counts[source] < count:
            return Problem(f"{what} lacks {run.term_name(source)}")
        if counts[source] > count:
            return Problem(f"{what} holds {run.term_name(source)} {counts[source]} times")
    extra = next((source for source in counts if source not in sources), None)
    if extra is not None:
        return Problem(f"{what} also holds {run.term_name(extra)}")
    for term in terms:
        for axis in summed:
            if axis not in term.summed:
                return Problem(f"{what} is not summed over {axis}", code="Z404")
        if len(term.summed) > len(set(term.summed)):
            axis = next(a for a in term.summed if term.summed.count(a) > 1)
            return Problem(f"{what} is summed over {axis} more than once")
        axis = next((a for a in term.summed if a not in summed), "")
        if axis:
            return Problem(f"{what} is summed over {axis} too early")
        if term.summed != summed:
            order = " and then ".join(term.summed)
            return Problem(
                f"{what} is summed over {order}, and not innermost first, over "
                f"{' and then '.join(summed)}: the order changes the rounding",
            )
    return None


def locate(value: Value) -> tuple[str, int, Strides] | None:
    """Return flat, shift and strides of a gradient value: position p is flat element p + shift + strides."""
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
    """Return whether the value is zero on every rank."""
    if isinstance(value, Slice):
        return all(is_zero(inner) for _, _, inner in value.array)
    return isinstance(value, Zero)
