"""Paths give outputs their structure again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.ir.output_paths import OutputPathError, Step, children, steps_of, structured

LEAVES = st.integers()
OUTPUTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


def flattened(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    parts = children(value)
    if parts is None:
        yield path, value
        return
    for step, part in parts:
        yield from flattened(part, path + step)


@given(OUTPUTS)
def test_any_structure_survives(outputs: object) -> None:
    values = list(flattened(outputs))
    assert structured(values) == outputs
    assert len({path for path, _ in values}) == len(values)


def test_a_path_reads_as_it_is_written() -> None:
    assert steps_of("(1)['a'][2].hidden") == (
        Step("member", 1),
        Step("key", "a"),
        Step("item", 2),
        Step("attribute", "hidden"),
    )
    assert steps_of(r"['it\'s [0]']") == (Step("key", "it's [0]"),)
    assert steps_of("") == ()


def test_attributes_become_a_namespace() -> None:
    assert structured([(".a", 1), (".b(0)", 2)]) == SimpleNamespace(a=1, b=(2,))
    assert structured([]) is None


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        (["['a']", "[0]"], "containers of two kinds"),
        (["", "[0]"], "two values at one place"),
        (["[0]", "[0]"], "two values at one place"),
        (["[0]", "[2]"], "leave out an item"),
        (["(1)"], "leave out an item"),
        (["logits"], "which is none"),
        (["['a"], "which is none"),
    ],
)
def test_paths_that_no_outputs_have(paths: list[str], reason: str) -> None:
    with pytest.raises(OutputPathError, match=reason):
        structured([(path, at) for at, path in enumerate(paths)])


def test_keys_are_texts() -> None:
    with pytest.raises(OutputPathError, match="the key 3"):
        children({3: 1})
