"""The clocks of streams say what an independent judge says, whatever is issued, awaited and joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.clocks import Clocks
from tests.support.examples import examples
from zeroir.ir import ops
from zeroir.ir.analysis.happens_before import StreamClocks
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import HOST
from zeroir.ir.program import Pending

STREAMS = ("a", "b", "c")
EVENTS = ("0", "1", "2")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.sampled_from(STREAMS), st.sampled_from((None, *EVENTS))),
        st.tuples(st.just("wait"), st.sampled_from((*STREAMS, HOST)), st.sampled_from(EVENTS)),
        st.tuples(st.just("join"), st.none(), st.sampled_from((None, *EVENTS))),
    ),
    max_size=25,
)


def _fill(stream: str, event: str | None) -> ops.Fill:
    region = Region(buffer="x", offset=0, numel=1)
    return ops.Fill(destination=region, value=0.0, stream=stream, event=event)


@examples(200)
@given(steps)
def test_every_stream_comes_after_what_the_judge_says(
    steps: list[tuple[str, str | None, str | None]],
) -> None:
    clocks, judge = StreamClocks(STREAMS), Clocks()
    for name in STREAMS:  # The judge knows streams from when they are first named.
        judge.clock(name)
    known: set[str] = set()
    for kind, stream, event in steps:
        if kind == "issue":
            assert stream is not None
            clocks.issue(clocks.numbers[stream], event)
            judge.issue(_fill(stream, event))
            known |= set() if event is None else {event}
        elif kind == "wait":
            assert stream is not None
            assert event is not None
            news = clocks.wait(event, stream)
            assert not news or event in known
            if event in known:
                judge.issue(ops.Wait(waited=event, on=stream))
        else:
            pending = [event] if event in known and event is not None else []
            clocks.join(pending)
            judge.join(pending)
            known = set(pending)
        for own in STREAMS:
            expected = judge.clock(own)
            assert clocks.done[clocks.numbers[own]] == [expected.get(s, 0) for s in STREAMS]


def test_a_pending_op_is_known_by_its_event_alone() -> None:
    pending = [Pending(event="0", stream="a"), Pending(event="1", stream="a")]
    clocks = StreamClocks(STREAMS, pending)
    assert clocks.done == [[2, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert clocks.signaller("0") == (0, 1)
    assert clocks.signaller("2") is None
    assert clocks.wait("1", "b") == [(1, 0, 2)]
    assert clocks.wait("1", HOST) == [(2, 0, 2)]
    assert clocks.wait("2", "c") == []


def test_a_boundary_says_the_last_op_of_each_stream_that_it_comes_after() -> None:
    clocks = StreamClocks(STREAMS)
    for stream, event in ((0, None), (0, "0"), (0, None), (1, None)):
        clocks.issue(stream, event)
    assert clocks.join(["0"]) == [(0, 1), (1, 1)]
    assert clocks.done[2] == [1, 1, 0]
    assert clocks.join([]) == [(0, 3), (1, 1)]
