"""Visits: which ops one serves, what it brings and takes home, and where its transfers stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.passes.numbers import assert_same
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, View
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.visits import (
    DISK_TO_HOST,
    HOST_TO_DEVICE,
    Visit,
    find_visits,
    place_visits,
    with_visits,
)
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.verify import verify

HOMES = frozenset({"a", "b"})


def region(text: str) -> Region:
    """``a``, ``a[0:64]``, ``a[0:64]@dp`` or ``a[0:64]@dp[8:16]``; a whole buffer has 512 elements."""
    name, _, rest = text.partition("[")
    bounds, _, sliced = rest.partition("]@")
    start, _, stop = bounds.strip("]").partition(":")
    first, end = int(start or 0), int(stop or 512)
    shard, _, part = sliced.strip("]").partition("[")
    unparted = Region(buffer=name, offset=first, numel=end - first, shard=shard or None)
    if not part:
        return unparted
    begin, _, end_of_part = part.partition(":")
    return replace(unparted, part=(int(begin), int(end_of_part)))


def copy(source: str, destination: str, stream: str = COMPUTE) -> Op:
    return ops.Cast(source=region(source), destination=region(destination), stream=stream)


def add(source: str, destination: str) -> Op:
    return ops.Cast(
        source=region(source),
        destination=region(destination),
        mode=ops.Mode.ACCUMULATE,
        stream=COMPUTE,
    )


def compute(source: str) -> Op:
    read = region(source)
    view = View(region=read, shape=(read.numel,), stride=(1,))
    return ops.Compute(
        segment="s", arguments=(ops.Argument(view=view),), destinations=(), unit="u", stream=COMPUTE
    )


def staging(name: str, numel: int = 512) -> Buffer:
    return Buffer(name=name, dtype=DType.F32, numel=numel, space=Space.DEVICE, role=Role.STAGING)


def _is_at_home(op: Op) -> bool:
    return not isinstance(op, ops.Wait) and op.stream == OPTIMIZER


def _never(_op: Op, _region: Region) -> bool:
    return False


def found(*body: Op) -> list[tuple[str, tuple[int, ...]]]:
    visits = find_visits(body, HOMES, _is_at_home, _never)
    return [(visit.home, visit.uses) for visit in visits]


def only(*body: Op) -> Visit:
    (visit,) = find_visits(body, HOMES, _is_at_home, _never)
    return visit


# -------------------------------------------------------------------------------------------------------- the runs


_FILL = ops.Fill(destination=region("x"), value=0.0, stream=COMPUTE)
_ALLOC = ops.Alloc(buffer="x", stream=COMPUTE)
_AT_HOME = copy("x", "a", OPTIMIZER)


@pytest.mark.parametrize(
    ("body", "visits"),
    [
        # Consecutive uses are one visit, which a computation without the buffer ends, and no other op in between.
        ((compute("a"), compute("a"), copy("a", "x")), [("a", (0, 1, 2))]),
        ((compute("a"), compute("x"), compute("a")), [("a", (0,)), ("a", (2,))]),
        ((compute("a"), _ALLOC, _FILL, compute("a")), [("a", (0, 3))]),
        # A use of another home ends it, but one op that uses both keeps both.
        ((copy("a", "x"), copy("b", "x"), copy("a", "x")), [("a", (0,)), ("b", (1,)), ("a", (2,))]),
        ((copy("a", "b"), copy("b", "a")), [("a", (0, 1)), ("b", (0, 1))]),
        # Other elements are another visit.
        ((copy("a[0:128]", "x"), copy("a[128:256]", "x")), [("a", (0,)), ("a", (1,))]),
        # What an op changes at home the visit does not have, and what the visit has changed the op would not see.
        ((compute("a"), _AT_HOME, compute("a")), [("a", (0,)), ("a", (2,))]),
    ],
)
def test_runs_of_uses_are_visits(
    body: tuple[Op, ...], visits: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert found(*body) == visits


def test_other_parts_of_a_slice_are_another_visit() -> None:
    slices = ("a[0:512]@dp[0:64]", "a[0:512]@dp[64:128]")
    assert found(*(copy(each, "x[0:64]") for each in slices)) == [("a", (0,)), ("a", (1,))]
    visit = only(copy(slices[1], "x[0:64]"))
    assert visit.region == region(slices[1])
    assert visit.moved(visit.region, staging("v", numel=64)) == region("v[0:64]")


# --------------------------------------------------------------------------------------------- what comes and goes


@pytest.mark.parametrize(
    ("body", "arriving", "departing"),
    [
        ((copy("a", "x"), copy("x[0:64]", "a[64:128]")), ["a"], ["a[64:128]"]),
        # A write needs nothing from home; a sum needs what is there.
        ((copy("x", "a"), copy("a", "y")), [], ["a"]),
        ((add("x", "a"),), ["a"], ["a"]),
        # Only changed elements depart, with the gaps between them.
        (
            (compute("a"), copy("x[0:64]", "a[64:128]"), copy("x[0:64]", "a[128:192]")),
            ["a"],
            ["a[64:192]"],
        ),
        # A slice and another part go both ways as a whole.
        ((add("x[0:512]@dp", "a[0:512]@dp"), copy("x[0:64]", "a[0:64]")), ["a"], ["a"]),
    ],
)
def test_what_is_read_arrives_and_what_is_written_departs(
    body: tuple[Op, ...], arriving: list[str], departing: list[str]
) -> None:
    visit = only(*body)
    assert visit.arriving == tuple(map(region, arriving))
    assert visit.departing == tuple(map(region, departing))


def test_what_is_used_up_stays_away() -> None:
    """Neither what the op leaves goes home, nor what an op before it has written there."""
    sums = add("x", "a")
    body = [sums, add("y", "a")]
    (visit,) = find_visits(body, HOMES, _is_at_home, lambda op, _: op is not sums)
    assert (visit.arriving, visit.departing) == ((region("a"),), ())
    (visit,) = find_visits([*body, sums], HOMES, _is_at_home, lambda op, _: op is body[1])
    assert visit.departing == (region("a"),)


def test_gaps_arrive_with_what_is_around_them() -> None:
    one = compute("a[0:64]")
    assert isinstance(one, ops.Compute)
    other = compute("a[128:192]")
    assert isinstance(other, ops.Compute)
    visit = only(replace(one, arguments=(*one.arguments, *other.arguments)))
    assert visit.region == region("a[0:192]")
    assert visit.arriving == (region("a[0:192]"),)


def test_a_slice_alone_is_all_that_the_visit_holds() -> None:
    visit = only(add("x[0:512]@dp", "a[0:512]@dp"))
    assert visit.region == region("a[0:512]@dp")
    buffer = staging("v", numel=128)
    assert visit.moved(region("a[0:512]@dp"), buffer) == Region(buffer="v", offset=0, numel=128)


def test_a_slice_and_its_gather_are_one_visit_of_the_whole() -> None:
    """The slice arrives, and the whole departs, because the gather has written all of it."""
    pair = ops.Pair(source=region("a[0:512]@dp"), destination=region("a"))
    gather = ops.AllGather(pairs=(pair,), comm="gather", stream="gather")
    visit = only(add("x[0:512]@dp", "a[0:512]@dp"), gather)
    assert visit.region == region("a")
    assert visit.arriving == (region("a[0:512]@dp"),)
    assert visit.departing == (region("a"),)


# ------------------------------------------------------------------------------------------------------- the places


def placed(*body: Op, distance: int = 1) -> list[str]:
    """The ops with a visit of ``a`` in ``va`` and of ``b`` in ``vb``: those of visits by their names alone."""
    visits = find_visits(body, HOMES, _is_at_home, _never)

    def buffer(visit: Visit) -> Buffer:
        return staging(f"v{visit.home}")

    ops_with_visits = place_visits(body, visits, buffer, HOST_TO_DEVICE, distance=distance)
    return [_spelt(op) for op in ops_with_visits]


def _spelt(op: Op) -> str:
    match op:
        case ops.Alloc() | ops.Release():
            return f"{type(op).__name__.lower()} {op.buffer}"
        case ops.ToDevice():
            return f"in {op.destination.buffer}"
        case ops.ToHost():
            return f"out {op.source.buffer}"
        case ops.Cast():
            return f"{op.source.buffer}->{op.destination.buffer}"
        case ops.Compute():
            return f"compute {op.arguments[0].view.region.buffer}"
        case _:
            raise AssertionError(op)


def test_a_visit_begins_before_the_use_before_it() -> None:
    assert placed(compute("a"), compute("b"), compute("x"), compute("y"), compute("a")) == [
        *("alloc va", "in va", "alloc vb", "in vb"),
        *("compute va", "release va"),
        *("compute vb", "release vb"),
        "compute x",
        *("alloc va", "in va"),
        "compute y",
        *("compute va", "release va"),
    ]


def test_without_distance_a_visit_begins_at_its_use() -> None:
    assert placed(compute("a"), compute("b"), distance=0) == [
        *("alloc va", "in va", "compute va", "release va"),
        *("alloc vb", "in vb", "compute vb", "release vb"),
    ]


def test_a_visit_follows_the_change_at_home() -> None:
    assert placed(compute("b"), copy("x", "a", OPTIMIZER), compute("a")) == [
        *("alloc vb", "in vb", "compute vb", "release vb"),
        "x->a",
        *("alloc va", "in va", "compute va", "release va"),
    ]


def test_a_visit_follows_the_return_of_the_one_before() -> None:
    assert placed(add("x", "a"), compute("b"), compute("a")) == [
        *("alloc va", "in va", "alloc vb", "in vb"),
        *("x->va", "out va", "release va"),
        *("alloc va", "in va"),
        *("compute vb", "release vb"),
        *("compute va", "release va"),
    ]


def test_visits_that_are_live_together_begin_together() -> None:
    """What is only written has its buffer there, too: otherwise it would wait for the visit before it."""
    first = (copy("a", "x"), copy("x", "y"))
    assert placed(*first, copy("b", "a"), copy("x", "b")) == [
        *("alloc va", "in va"),
        *("alloc vb", "in vb"),
        "va->x",
        "x->y",
        *("vb->va", "out va", "release va"),
        *("x->vb", "out vb", "release vb"),
    ]


def test_ops_at_home_stay() -> None:
    assert placed(copy("a", "b", OPTIMIZER)) == ["a->b"]


# ------------------------------------------------------------------------------------------------------ whole programs


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_visits_of_visits(stage: int, precision: str) -> None:
    """Parameters on disk pass through host memory: two kinds of visits, one inside the other."""
    logical = mlp(blocks=2, precision=precision, clip=1.0)
    on_host = applied(logical, (*for_stage(stage, 3), OffloadParameters()))
    homes = [b.name for b in on_host.buffers if (b.role, b.space) == (Role.PARAM, Space.HOST)]
    program = derive_waits(with_visits(without_waits(on_host), homes, DISK_TO_HOST))
    assert {program.buffer_by_name[name].space for name in homes} == {Space.DISK}
    report = verify(program, logical)
    assert report.is_valid, report.render()
    assert_same(program, applied(logical, for_stage(stage, 3)), seeds=range(2))


def test_without_homes_a_program_stays_as_it_is() -> None:
    program = applied(mlp(), for_stage(3, 2))
    assert with_visits(program, (), HOST_TO_DEVICE) is program
