"""A copy of a saved value that is lost, late or of a wrong buffer, or that nothing waits for, is rejected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from tests.passes.example_programs import AWAY
from tests.passes.numbers import assert_equal, inputs, run
from tests.support.edits import edit
from tests.support.examples import IS_THOROUGH
from tests.support.lowering import applied, codes
from tests.support.mutate import MUTATIONS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import COPY_IN, COPY_OUT
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.verify import Reference, verify

ALL = OffloadActivations(smallest=0)


def put(program: Program, index: int, *new: Op, at: int | None = None) -> Program:
    """The program with other ops in the place of one, or in another place, of the last micro-step."""
    section = [s.name for s in program.sections].index(LAST_MICRO_STEP)

    def change(body: list[Op]) -> None:
        del body[index]
        place = index if at is None else at
        body[place:place] = new

    return edit(program, section, change)


def touched(op: Op) -> set[str]:
    effect = effects(op)
    return {region.buffer for region in (*effect.reads, *effect.writes, *effect.accumulates)}


def damages(program: Program) -> Iterator[tuple[str, Program]]:
    """Each way to lose, delay or misdirect a copy, to drop a wait for one, and to end a buffer before its copy."""
    body = program.section_by_name[LAST_MICRO_STEP].body
    for index, op in enumerate(body):
        match op:
            case ops.Transfer():
                yield "lost", put(program, index)
                yield "late", put(program, index, op, at=_first_reader(body, index))
                source = _other_source(body, op)
                yield "misdirected", put(program, index, replace(op, source=source))
            case ops.Wait():
                (signaller,) = (b for b in body if _event(b) == op.waited)
                if {op.on, effects(signaller).stream} & {COPY_IN, COPY_OUT}:
                    yield "unawaited", put(program, index)
            case ops.Release(stream=stream) if stream in (COPY_IN, COPY_OUT):
                copy = max(
                    i
                    for i in range(index)
                    if isinstance(body[i], ops.Transfer) and op.buffer in touched(body[i])
                )
                yield "early", put(program, index, op, at=copy)
            case _:
                pass


def _event(op: Op) -> str | None:
    return None if isinstance(op, ops.Wait) else op.event


def _first_reader(body: Sequence[Op], transfer: int) -> int:
    """The first op behind a transfer that reads what it copies."""
    copies = {region.buffer for region in effects(body[transfer]).writes}
    return next(
        i
        for i in range(transfer + 1, len(body))
        if copies & {region.buffer for region in effects(body[i]).reads}
    )


def _other_source(body: Sequence[Op], transfer: ops.TransferOp) -> Region:
    return next(
        op.source
        for op in body
        if isinstance(op, ops.Transfer) and type(op) is type(transfer) and op is not transfer
    )


def test_every_damage_to_the_copies_is_rejected() -> None:
    logical = mlp(blocks=3)
    reference = Reference(logical)
    program = applied(logical, (*for_stage(3, 2), ALL))
    assert codes(program, reference) == set()
    broken: dict[str, set[str]] = {}
    for what, damaged in damages(program):
        found = codes(damaged, reference)
        assert found, what
        broken.setdefault(what, set()).update(found)
    assert broken.keys() == {"lost", "late", "misdirected", "unawaited", "early"}
    assert {"Z103", "Z105", "Z302"} <= broken["unawaited"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MUTATIONS))
def test_a_mutant_that_is_proved_computes_the_same(kind: str) -> None:
    program = applied(AWAY, (*for_stage(3, 2), ALL))
    batches = inputs(AWAY, 2, 1)
    expected = run(program, batches)
    for seed in range(12 if IS_THOROUGH else 3):
        mutant = MUTATIONS[kind](program, Random(seed))
        if mutant is None or not verify(mutant, AWAY).is_valid:
            continue
        for schedule_seed in range(2):
            assert_equal(run(mutant, batches, schedule_seed), expected, range(2), kind)
