"""Passes as text, and what is said where the text is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.pipelines import for_stage
from zeroir.errors import UserError
from zeroir.passes.base import LOGICAL_FACTS, Fact, OptionValue, Pass
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.communication.prefetch import PrefetchGathers
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.pipelines import PASSES, parse_spec

_NAMES = st.from_regex(r"[a-z*][a-z0-9_.*]{0,9}", fullmatch=True)
_VALUES: Mapping[object, st.SearchStrategy[OptionValue | None]] = {
    int: st.integers(1, 10**18 - 1),
    int | None: st.none() | st.integers(0, 10**18 - 1),
    float | None: st.none() | st.floats(0, 1, exclude_min=True),
    bool: st.booleans(),
    tuple[str, ...]: st.lists(_NAMES, min_size=1, max_size=3).map(tuple),
    tuple[str, ...] | None: st.none() | st.lists(_NAMES, min_size=1, max_size=3).map(tuple),
}
"""What an option of each type may be."""
_BOUNDED: Mapping[tuple[type[Pass], str], st.SearchStrategy[OptionValue | None]] = {
    (OrderByLayer, "micro_batches"): st.integers(2, 10**18 - 1)
}
"""What options with narrower bounds than their type's may be."""


@st.composite
def any_pass(draw: st.DrawFn) -> Pass:
    """Each pass with any options that it takes; a field of a new type is a KeyError here."""
    kind = draw(st.sampled_from(PASSES))
    hints = get_type_hints(kind)
    options = {
        field.name: draw(_BOUNDED.get((kind, field.name), _VALUES[hints[field.name]]))
        for field in fields(kind)
    }
    if kind is PrefetchGathers:
        # They exclude one another.
        options = {name: value for name, value in options.items() if value is not None}
        options = dict(list(options.items())[:1])
    return kind(**options)


@given(any_pass())
@example(OffloadOptimizer(fraction=0.00012345678901234567))
def test_a_pass_is_its_spec(step: Pass) -> None:
    assert parse_spec(step.spec()) == step


def test_no_pass_writes_its_spec_itself() -> None:
    assert [kind.name for kind in PASSES if kind.spec is not Pass.spec] == []


def test_specs_read_as_documented() -> None:
    assert [step.spec() for step in for_stage(3, 8)] == [
        "all-reduce-gradients{dp=8}",
        "shard-optimizer",
        "shard-gradients",
        "shard-parameters",
        "insert-gathers{elide=true}",
        "insert-releases",
        "prefetch{distance=1}",
        "bound-gradients{live=2}",
    ]
    assert parse_spec(" prefetch ").spec() == "prefetch{distance=1}"
    assert parse_spec("prefetch{budget=1000}").spec() == "prefetch{budget=1000}"
    assert parse_spec("unshard{units=a | b.*}").spec() == "unshard{units=a|b.*}"
    assert parse_spec("plan-memory{}").spec() == "plan-memory"


def test_every_pass_has_a_name_of_its_own_and_every_fact_a_source() -> None:
    assert len({kind.name for kind in PASSES}) == len(PASSES)
    established = [fact for kind in PASSES for fact in kind.establishes]
    assert len(set(established)) == len(established)
    required = {fact for kind in PASSES for fact in kind.requires}
    assert required == set(Fact) == LOGICAL_FACTS.union(established)
    assert not LOGICAL_FACTS.intersection(established)
    assert {fact for kind in PASSES for fact in kind.destroys} == LOGICAL_FACTS
    assert all(isinstance(step, Pass) for step in for_stage(3, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefetch{distance=1", "written name or name{option=value}, not `prefetch{distance=1`"),
        ("Prefetch", "written name or name{option=value}, not `Prefetch`"),
        ("prefetch{1}", "In the pass `prefetch{1}`, `1` should be option=value"),
        ("prefetch{distance=1, distance=2}", "gives its option `distance` twice"),
        ("prefetch{depth=1}", "no option `depth`; its options are distance, budget, bytes"),
        ("shard-optimizer{dp=2}", "`shard-optimizer` has no option `dp`; it has none"),
        ("prefetch{distance=far}", "`distance` of `prefetch` is a whole number, not `far`"),
        ("prefetch{distance=-1}", "is a number of units, at least 0, not -1"),
        ("all-reduce-gradients{dp=0}", "is a number of ranks, at least 1, not 0"),
        ("order-by-layer{micro_batches=1}", "`order-by-layer` is at least 2, not 1"),
        ("insert-gathers{elide=1}", "`elide` of `insert-gathers` is true or false, not `1`"),
        ("all-reduce-gradients", "needs its option `dp`, for instance `all-reduce-gradients{dp=2}"),
        ("merge", f"the passes are {', '.join(kind.name for kind in PASSES)}."),
    ],
)
def test_a_wrong_spec_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_spec(text)
