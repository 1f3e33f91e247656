"""Abstract values in messages."""

from __future__ import annotations

from typing import Final, assert_never

from zeroir.verify.interpreter.domain import (
    Decision,
    Elements,
    FlatKey,
    Gradient,
    NamedKey,
    Poison,
    Slice,
    Split,
    Statistic,
    Undefined,
    Value,
    Weight,
    Zero,
)

CAUSES: Final = {
    "unwritten": "elements that nothing has written yet",
    "stale": "leftovers of an earlier step",
    "scratch": "leftovers of a collective in its staging region",
    "spent": "a gradient that an optimizer step has used up",
    "torn": "elements that hold different contents on different ranks, in no regular way",
}

ADVICE: Final = {
    "unwritten": "Write these elements, or fill them, before this op.",
    "stale": "Fill them with 0, or let the first contribution of this step write them instead of adding.",
    "scratch": "Stage in memory that nothing reads afterwards.",
    "spent": "Read the gradient before it is stepped with, or step once.",
    "torn": "Gather the slices before this op, or read this rank's slice alone.",
}


def describe(value: Value) -> str:
    """Return a description of a value."""
    match value:
        case Undefined():
            return CAUSES[value.cause]
        case Zero():
            return "zeros"
        case Poison():
            return "a value that is already reported"
        case Elements(key=FlatKey(quantity=quantity, flat=flat, version=version, guess=guess)):
            place = f" from element {value.shift}" if value.shift else ""
            cut = "".join(f", cut along {axis}" for axis, _ in value.strides)
            updates = f"{version} updates" if guess is None else "a speculative step"
            return f"{quantity} of flat {flat} after {updates}{place}{cut}"
        case Elements(key=NamedKey(name=name)):
            return f"the value {name}"
        case Elements():
            return "the result of a computation"
        case Gradient():
            return f"gradients of flat {value.flat}"
        case Weight():
            return "a sum of weights of micro-batches"
        case Slice():
            parts = dict.fromkeys(describe(inner) for _, _, inner in value.array[:4])
            return "a slice of " + ", ".join(parts)
        case Split():
            return f"{describe(value.own)} in this rank's slice and another value beside it"
        case Statistic():
            return f"the {value.kind} of gradients"
        case Decision():
            return f"the {value.what} that a decision or a guess wrote"
        case _:
            assert_never(value)
