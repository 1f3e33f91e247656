"""A recorded step tells what ran when, and a trace of it what Perfetto needs to draw it."""

from __future__ import annotations

import json

import pytest

from tests.runtime.support import begun, lowered, random_batches
from tests.runtime.timelines import require_program_order
from tests.support.evaluations import with_evaluation
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE
from zeroir.ir.spans import Span
from zeroir.report.trace import chrome_trace
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.prepared_op import PreparedOp
from zeroir.runtime.execution.trace import aligned, to_bytes


def recorded(engine: Engine) -> list[list[Span]]:
    """What was recorded of each rank; the engine is closed."""
    timelines = engine.timelines()
    engine.close()
    assert timelines is not None
    return timelines


@pytest.mark.parametrize("stage", range(4))
def test_a_recorded_step_follows_the_program(stage: int) -> None:
    logical = mlp(clip=0.5)
    engine = begun(Engine(lowered(logical, stage, 1)))
    engine.record(2)
    for ((batch,),) in random_batches(3, 1):
        engine.step(batch)
    (spans,) = recorded(engine)
    assert min(span.start_ns for span in spans) == 0
    require_program_order(engine.program, [LAST_MICRO_STEP, UPDATE], spans)


def test_of_a_recorded_step_no_evaluation_is_part() -> None:
    logical = mlp()
    engine = begun(Engine(with_evaluation(logical)))
    batches = [batch for ((batch,),) in random_batches(3, 1)]
    engine.step(batches[0])
    engine.record(2)
    engine.evaluate(batches[1])
    engine.step(batches[1])
    engine.evaluate(batches[2])
    require_program_order(engine.program, [LAST_MICRO_STEP, UPDATE], recorded(engine)[0])


def test_nothing_is_recorded_unless_asked() -> None:
    engine = begun(Engine(lowered(mlp(), 3, 1)))
    engine.step(random_batches(1, 1)[0][0][0])
    assert recorded(engine) == [[]]


def test_a_step_that_is_recorded_prepares_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared runs for the first time, and slower than the steps that it is to tell of."""
    logical = mlp()
    engine = begun(Engine(lowered(logical, 3, 1)))
    prepared: list[ops.Op] = []
    prepare = LocalRanks.prepare

    def counted(self: LocalRanks, op: ops.Op) -> PreparedOp:
        prepared.append(op)
        return prepare(self, op)

    monkeypatch.setattr(LocalRanks, "prepare", counted)
    found = []
    for number, ((batch,),) in enumerate(random_batches(4, 1), start=1):
        if number > 1:
            engine.record(number)
        engine.step(batch)
        if number > 1:
            found.append((engine.timelines(), len(prepared)))
    engine.close()
    count = sum(len(section.body) for section in engine.program.sections)
    for timelines, already in found:
        assert already == len(prepared) == count
        assert timelines is not None
        require_program_order(engine.program, [LAST_MICRO_STEP, UPDATE], timelines[0])


def test_ranks_of_one_machine_share_a_clock() -> None:
    ranks = [[Span("a", 0, 50, 70)], [Span("a", 0, 30, 90), Span("a", 1, 90, 95)]]
    found = aligned([to_bytes(spans) for spans in ranks])
    assert found == [[Span("a", 0, 20, 40)], [Span("a", 0, 0, 60), Span("a", 1, 60, 65)]]


def test_ranks_of_two_machines_are_placed_by_their_wall_clocks() -> None:
    def part(clock: str, wall_ns: int, start: int) -> bytes:
        spans = [["a", 0, start, start + 5]]
        return json.dumps({"clock": clock, "wall_ns": wall_ns, "spans": spans}).encode()

    parts = [part("one", 1000, 10), part("two", 2000, 3), part("one", 1001, 12)]
    assert [spans[0].start_ns for spans in aligned(parts)] == [0, 993, 2]


def test_a_trace_names_every_op_and_draws_every_event() -> None:
    program = lowered(mlp(), 3, 2)
    body = program.section_by_name[LAST_MICRO_STEP].body
    spans = [Span(LAST_MICRO_STEP, i, 1500 * i, 1500 * i + 1000) for i in range(len(body))]
    trace = chrome_trace(program, [spans, spans], step=7)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert json.loads(json.dumps(trace))["otherData"]["step"] == 7
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        threads = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        drawn = {e["args"]["index"]: e for e in own if e["ph"] == "X"}
        assert drawn.keys() == set(range(len(body)))
        for index, op in enumerate(body):
            event = drawn[index]
            assert event["name"].startswith(f"{LAST_MICRO_STEP}:{index} ")
            assert (event["ts"], event["dur"]) == (1.5 * index, 1.0)
            assert threads[event["tid"]] == (op.on if isinstance(op, ops.Wait) else op.stream)
            if isinstance(op, ops.AllGather | ops.Prefetch | ops.ReduceScatter):
                assert event["args"]["bytes"] > 0
            if isinstance(op, ops.Compute):
                assert event["args"]["segment"] == op.segment
        signals = {op.event: i for i, op in enumerate(body) if not isinstance(op, ops.Wait)}
        waits = {(signals[op.waited], i) for i, op in enumerate(body) if isinstance(op, ops.Wait)}
        starts = {e["id"]: int(e["ts"] // 1.5) for e in own if e["ph"] == "s"}
        ends = {e["id"]: int(e["ts"] // 1.5) for e in own if e["ph"] == "f"}
        assert waits == {(starts[arrow], ends[arrow]) for arrow in starts}
        assert waits
