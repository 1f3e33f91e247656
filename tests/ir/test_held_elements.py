"""The elements of a flat that regions hold, against sets of their numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.ir.analysis.held_elements import held_by_all, held_elements, is_within
from zeroir.ir.contents import FlatContent
from zeroir.ir.mesh import Axis, Mesh


@st.composite
def held(draw: st.DrawFn) -> tuple[FlatContent, int, Mesh]:
    """A content, the elements of its region on a rank, and a mesh."""
    ranks, numel = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    is_sharded = draw(st.booleans())
    stride = numel + draw(st.integers(0, 5))
    content = FlatContent(
        quantity="exp_avg",
        flat="a",
        offset=draw(st.integers(0, 6)),
        shard="dp" if is_sharded else None,
        stride=stride if is_sharded and stride > numel else None,
    )
    return content, numel, Mesh(axes=(Axis(name="dp", size=ranks),))


def numbers(parts: tuple[range, ...]) -> list[int]:
    return sorted(number for part in parts for number in part)


@given(held())
@examples(100)
def test_all_ranks_together_hold_what_each_holds(case: tuple[FlatContent, int, Mesh]) -> None:
    content, numel, mesh = case
    ranks = range(mesh.world_size) if content.shard else range(1)
    own = [held_elements(content, numel, {"dp": rank}) for rank in ranks]
    assert numbers(held_by_all(content, numel, mesh)) == numbers(tuple(own))


@given(held(), held())
@examples(200)
def test_elements_are_within_others_part_by_part(
    case: tuple[FlatContent, int, Mesh], other: tuple[FlatContent, int, Mesh]
) -> None:
    parts, others = (held_by_all(content, numel, mesh) for content, numel, mesh in (case, other))
    expected = all(any(set(part) <= set(each) for each in others) for part in parts)
    assert is_within(parts, others) is expected
