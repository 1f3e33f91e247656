"""Arbitrary programs for laws of form: well-typed field by field, hardly ever valid.

Strategies are derived from the dataclasses' annotations, so that a new op or field is covered the
day it exists. Names and numbers come from small pools, so that references often hit and whole
regions and declared shapes often occur.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum

from hypothesis import strategies as st

from zeroir.ir import ops
from zeroir.ir.dtypes import DType
from zeroir.ir.options import Options, WrittenOptions
from zeroir.ir.program import Program
from zeroir.ir.segments import segment

NAMES = st.one_of(
    st.sampled_from(
        [
            "a",
            "b",
            "blocks.0.param",
            "0",
            "dp",
            "grad",
            "value",
            "zeros",
            "none",
            "exit",
            "_",
            "inf",
        ]
    ),
    st.sampled_from(
        [
            "",
            " ",
            "odd name",
            'q"uote\\',
            "a//b",
            "ü",
            "line\nend\r",
            "a:b",
            "#",
            "\u2028",
            "$0",
            "-1",
        ]
    ),
    st.text(max_size=6),
)
INTEGERS = st.one_of(
    st.sampled_from([0, 1, 2, 64]), st.integers(-(2**63), 2**63 - 1), st.integers(-4, 4)
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), 1e-300, 5e-324, 1e22]),
    st.floats(allow_nan=False),
)
NODE_ARGS: st.SearchStrategy[segment.NodeArg] = st.recursive(
    st.one_of(
        st.builds(segment.Ref, st.integers(-1, 9)),
        st.builds(segment.Symbol, NAMES),
        st.sampled_from(DType),
        st.none(),
        st.booleans(),
        INTEGERS,
        st.integers(-(2**80), 2**80),
        FLOATS,
        NAMES,
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@functools.cache
def arbitrary(hint: object) -> st.SearchStrategy[object]:
    """Values of an annotated type."""
    plain: Mapping[object, st.SearchStrategy[object]] = {
        str: NAMES,
        int: INTEGERS,
        float: FLOATS,
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
        types.NoneType: st.none(),
        Options: st.deferred(lambda: arbitrary(WrittenOptions)),
    }
    if hint in plain:
        return plain[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if segment.Ref in arguments:
        return NODE_ARGS
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(arbitrary, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(arbitrary(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(arbitrary, arguments))
    assert isinstance(hint, type), hint
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    assert dataclasses.is_dataclass(hint), hint
    hints = typing.get_type_hints(hint)
    fields = {field.name: arbitrary(hints[field.name]) for field in dataclasses.fields(hint)}
    return st.builds(hint, **fields)


def programs() -> st.SearchStrategy[Program]:
    """Programs with everything in them."""
    return typing.cast(st.SearchStrategy[Program], st.deferred(lambda: arbitrary(Program)))


def op_types() -> tuple[type, ...]:
    """Every member of the closed union of ops."""
    return typing.get_args(ops.Op)
