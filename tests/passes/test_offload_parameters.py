"""Parameters at home in host memory: the same numbers, and the device memory that their visits take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.passes.numbers import assert_equal, inputs, run
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied
from zeroir.passes import manager
from zeroir.passes.offload_parameters import OffloadParameters


@examples(20)
@given(cases(world_sizes=(1, 4)), st.integers(0, 2**16))
def test_no_bit_changes(case: Case, schedule_seed: int) -> None:
    logical = case.logical()
    batches = inputs(logical, case.world_size, case.micro_steps)
    plain = applied(logical, case.passes())
    offloaded = manager.run(plain, [OffloadParameters()], reference=logical)
    assert_equal(
        run(offloaded, batches, schedule_seed),
        run(plain, batches),
        range(case.world_size),
        f"stage {case.stage}",
    )
