"""Gathers run ahead by the distance, in the forward and in the backward, and never further."""

from __future__ import annotations

import pytest
from hypothesis import assume, given

from tests.passes import happens
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.passes.communication.prefetch import PrefetchGathers


def _lower(program: Program, distance: int, *, elide: bool = True) -> Program:
    return applied(program, for_stage(3, 4, elide=elide, distance=distance))


@pytest.mark.slow
@examples(40)
@given(cases(stages=(3,)))
def test_at_most_distance_plus_one_units_are_live(case: Case) -> None:
    """On no interleaving of the streams, however slow the compute stream is."""
    # A tied weight that is gathered once for the whole forward is live beside all others, by choice.
    assume(case.elide or not case.tied)
    program = case.scheduled()
    for section in program.sections:
        assert max(happens.groups_live(section.body, program)) <= case.distance + 1


@pytest.mark.parametrize("distance", [1, 2, 3])
@pytest.mark.parametrize("elide", [True, False])
def test_a_gather_overlaps_the_units_before_it(distance: int, elide: bool) -> None:
    program = _lower(mlp(blocks=6), distance, elide=elide)
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    lives = [life for life in happens.lives(body, program) if life.readers]
    # The latest release that a gather so far had to wait for: that of its own buffer's last life.
    free = -1
    for number, life in enumerate(lives):
        free = max([free, *(w.release for w in lives[:number] if w.buffer == life.buffer)])
        for earlier in lives[max(0, number - distance) : number]:
            if earlier.readers[0] > free:
                assert not masks[life.gather] >> earlier.readers[0] & 1, life.buffer


def test_what_is_issued_ahead_is_called_prefetch() -> None:
    program = _lower(mlp(blocks=3), 1)
    body = program.section_by_name[LAST_MICRO_STEP].body
    gathers = [type(body[life.gather]) for life in happens.lives(body, program)]
    assert gathers == [ops.AllGather] + [ops.Prefetch] * 7


def test_no_distance_still_holds_the_gather_stream_back() -> None:
    program = _lower(mlp(blocks=3), 0)
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert not any(isinstance(op, ops.Prefetch) for op in body)
    assert max(happens.groups_live(body, program)) == 1


def test_without_the_pass_nothing_holds_it_back() -> None:
    program = applied(mlp(blocks=3), for_stage(3, 4)[:-2])
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert max(happens.groups_live(body, program)) == 5


def test_bytes_ahead_set_the_distance() -> None:
    """With the bytes of k equal blocks, k of them are ahead; with less than one, none is."""
    logical = mlp(blocks=6)
    flats = applied(logical, for_stage(3, 2)).flats
    block = next(flat for flat in flats if flat.unit == "blocks.2")
    size = block.padded_numel * block.dtype.itemsize_bytes

    def units_ahead(limit: int) -> int:
        """The blocks that are computed between the first gather of blocks.3 and its use."""
        program = applied(logical, for_stage(3, 2, ahead_bytes=limit))
        body = program.section_by_name[LAST_MICRO_STEP].body
        life = next(x for x in happens.lives(body, program) if x.buffer == "blocks.3.full")
        between = body[life.gather : life.readers[0]]
        return len({op.unit for op in between if isinstance(op, ops.Compute)})

    limits = (1, size - 1, size, 2 * size - 1, 2 * size, 3 * size)
    assert [units_ahead(limit) for limit in limits] == [0, 0, 1, 1, 2, 3]


def test_a_distance_and_bytes_exclude_each_other() -> None:
    with pytest.raises(UserError, match="not distance and bytes"):
        PrefetchGathers(distance=1, bytes=1)
