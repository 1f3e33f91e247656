"""Which destinations begin at the alignment that compiled code for a GPU expects."""

from __future__ import annotations

import pytest

from tests.support.subjects import subject
from zeroir.ir.buffers import Region, View
from zeroir.ir.ops import Compute, Destination
from zeroir.ir.segments.bindings import bindings
from zeroir.ir.sizes import Dim

LENGTH = Dim(name="length", minimum=1, maximum=64).size


def test_losses_of_all_micro_batches_are_bound_alike_and_not_aligned() -> None:
    """They are elements of one buffer, of which only the first is at an aligned address; a kernel serves them all."""
    program = subject("stage 2, in groups of two").scheduled
    losses = [
        (destination.view.region.offset, binding)
        for op in program.ops()
        if isinstance(op, Compute)
        for destination, binding in zip(op.destinations, bindings(op), strict=True)
        if destination is not None and destination.view.region.buffer == program.batch_loss
    ]
    assert {offset for offset, _ in losses} == {0, 1}
    assert len({binding for _, binding in losses}) == 1
    assert not any(binding.is_aligned for _, binding in losses if binding is not None)


@pytest.mark.parametrize(
    ("offset", "is_aligned"),
    [(0, True), (4, False), (48, True), (LENGTH, False), (LENGTH * 16, True)],
)
def test_a_destination_is_aligned_at_all_values_of_the_dims_or_not(
    offset: int, is_aligned: bool
) -> None:
    """At the largest length both offsets are multiples of the alignment."""
    view = View(region=Region(buffer="saved", offset=offset, numel=8), shape=(8,), stride=(1,))
    destination = Destination(view=view)
    op = Compute(
        segment="one", unit="root", stream="compute", arguments=(), destinations=(destination,)
    )
    (binding,) = bindings(op)
    assert binding is not None
    assert binding.is_aligned is is_aligned
