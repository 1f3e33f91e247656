"""A stream comes after what it, or the host, waited for, and after every boundary; and after nothing else."""

from __future__ import annotations

from tests.support.clocks import Clocks
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import HOST


def fill(stream: str, event: str | None = None) -> ops.Fill:
    region = Region(buffer="x", offset=0, numel=1)
    return ops.Fill(destination=region, value=0.0, stream=stream, event=event)


def test_a_stream_comes_after_what_it_waited_for_and_no_more() -> None:
    clocks = Clocks()
    for op in (fill("a", "0"), fill("a"), ops.Wait(waited="0", on="b"), fill("b", "1")):
        clocks.issue(op)
    assert clocks.is_after("b", {"a": 1})
    assert not clocks.is_after("b", {"a": 2})
    assert not clocks.is_after("c", {"a": 1})
    clocks.issue(ops.Wait(waited="1", on="c"))
    assert clocks.is_after("c", {"a": 1, "b": 1})  # what b waited for, c comes after, too


def test_a_wait_of_the_host_orders_every_stream() -> None:
    clocks = Clocks()
    clocks.issue(fill("a", "0"))
    clocks.issue(fill("b"))
    clocks.issue(ops.Wait(waited="0", on=HOST))
    assert clocks.is_after("b", {"a": 1})
    assert clocks.is_after("never seen", {"a": 1})


def test_a_boundary_orders_all_but_what_crosses_it() -> None:
    clocks = Clocks()
    for op in (fill("a"), fill("a", "0"), fill("b")):
        clocks.issue(op)
    clocks.join(["0"])
    assert clocks.is_after("c", {"a": 1, "b": 1})
    assert not clocks.is_after("c", {"a": 2})
    clocks.join([])
    assert clocks.is_after("c", {"a": 2})
