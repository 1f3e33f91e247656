"""A recorded step tells what ran when, and a trace of it what Perfetto needs to draw it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from torch.profiler import profile

from tests.runtime.support import begun, lowered, random_batches
from tests.runtime.timelines import require_program_order
from tests.support.evaluations import with_evaluation
from tests.support.programs import mlp
from zeroir.cost.machine import load_machine
from zeroir.cost.simulate import simulate
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.labels import labels
from zeroir.ir.ops import Compute, Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, OpPosition, Program
from zeroir.ir.spans import Span
from zeroir.report.flight_recorder import flight_recorder_dumps
from zeroir.report.graph import dot
from zeroir.report.page.facts import step_ops
from zeroir.report.trace import chrome_trace, simulated_trace
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.prepared_op import PreparedOp
from zeroir.runtime.execution.trace import Task, aligned, to_bytes


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

    def counted(
        self: LocalRanks, op: ops.Op, by_rank: Sequence[tuple[LocalRanks, ops.Op]]
    ) -> PreparedOp:
        prepared.append(op)
        return prepare(self, op, by_rank)

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


# ---- Where sections share the objects of ops, labels and records still tell their ops apart


MICRO_STEPS = 3
STEP = (*[MICRO_STEP] * (MICRO_STEPS - 1), LAST_MICRO_STEP, UPDATE)
STAGES = pytest.mark.parametrize("stage", [0, 3])


@cache
def program(stage: int) -> Program:
    made = lowered(mlp(micro_steps=MICRO_STEPS), stage, 1)
    bodies = [{id(op) for op in made.section_by_name[name].body} for name in STEP[1:3]]
    assert bodies[0] & bodies[1], "no op object is shared, so that nothing could be confused"
    return made


def engine(stage: int) -> Engine:
    return begun(Engine(program(stage)))


def step(trained: Engine) -> None:
    ((batches,),) = random_batches(1, 1, micro_steps=MICRO_STEPS)
    trained.step(batches)


def positions_of_a_step(stage: int) -> Counter[OpPosition]:
    """How often each op runs in a step, by counting."""
    sections = program(stage).section_by_name
    return Counter(OpPosition(name, i) for name in STEP for i in range(len(sections[name].body)))


def op_at(stage: int, position: OpPosition) -> Op:
    return program(stage).section_by_name[position.section].body[position.index]


@STAGES
def test_every_op_has_the_label_of_its_own_position(stage: int) -> None:
    found = labels(program(stage))
    assert found.keys() == positions_of_a_step(stage).keys()
    for position, label in found.items():
        place, _, summary = label.partition(" ")
        assert place == f"{position.section}:{position.index}"
        op = op_at(stage, position)
        if isinstance(op, Compute):
            assert summary == f"compute @{op.segment} of {op.unit}"


@STAGES
def test_every_span_is_of_the_op_that_ran(stage: int) -> None:
    """Each section's spans are as many as its runs, and on every stream they follow the program."""
    trained = engine(stage)
    trained.record(2)
    step(trained)
    step(trained)
    (spans,) = recorded(trained)
    assert Counter(span.position for span in spans) == positions_of_a_step(stage)
    sections = program(stage).section_by_name
    for stream in {effects(op).stream for op in program(stage).ops()}:
        expected = [
            position
            for name in STEP
            for position, op in sections[name].positioned_ops()
            if effects(op).stream == stream
        ]
        ordered = sorted(spans, key=lambda span: span.start_ns)
        found = [s.position for s in ordered if effects(op_at(stage, s.position)).stream == stream]
        assert found == expected


@STAGES
def test_a_watch_is_told_the_position_of_every_op(stage: int) -> None:
    seen: list[OpPosition] = []

    def watch(position: OpPosition, op: Op, run: Task) -> Task:
        assert op is op_at(stage, position)

        def watched() -> None:
            run()
            seen.append(position)

        return watched

    trained = engine(stage)
    trained.rank_program.executor.watch(1, watch)
    step(trained)
    trained.close()
    assert Counter(seen) == positions_of_a_step(stage)


@STAGES
def test_a_profile_names_every_op_as_often_as_it_ran(stage: int) -> None:
    """Ops of the issuing thread: torch's profiler does not see the others."""
    trained = engine(stage)
    step(trained)
    with profile() as profiler:
        step(trained)
    trained.close()
    names = labels(program(stage))
    seen = Counter(event.name for event in profiler.events())
    for position, count in positions_of_a_step(stage).items():
        if effects(op_at(stage, position)).stream == "compute":
            assert seen[names[position]] == count


@STAGES
def test_a_failure_names_the_section_that_ran(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = engine(stage)
    names = labels(program(stage))
    ops = program(stage).section_by_name[MICRO_STEP].positioned_ops()
    position = next(position for position, op in ops if isinstance(op, Compute))

    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(LocalRanks, "kernel", lambda *_: fail)
    with pytest.raises(Exception, match="no more") as raised:
        step(trained)
    trained.close()
    assert str(raised.value).startswith(f"{names[position]} of step 1: ")


@STAGES
def test_traces_name_every_op_by_its_position(stage: int) -> None:
    simulation = simulate(program(stage), load_machine("dgx-h100"))
    trained = engine(stage)
    trained.record(1)
    step(trained)
    timelines = recorded(trained)
    names = labels(program(stage))
    for trace in (
        chrome_trace(program(stage), timelines, step=1),
        simulated_trace(program(stage), simulation),
    ):
        events = trace["traceEvents"]
        assert isinstance(events, list)
        seen: Counter[OpPosition] = Counter()
        for event in events:
            if event["ph"] == "X":
                position = OpPosition(event["args"]["section"], event["args"]["index"])
                assert event["name"] == names[position]
                seen[position] += 1
        assert seen == positions_of_a_step(stage)


@STAGES
def test_reports_name_every_op_by_its_position(stage: int) -> None:
    made = program(stage)
    names = labels(made)
    for found in step_ops(made, simulate(made, load_machine("dgx-h100"))):
        label = names[found.position]
        assert label.partition(" ")[2].partition(" ")[2] == found.detail
    graph = dot(made)
    for position, _ in made.positioned_ops():
        assert graph.count(f'"{names[position]}"') == 1
    (dump,) = flight_recorder_dumps(made, source="mlp.zir")
    entries = dump["entries"]
    assert isinstance(entries, list)
    for entry in entries:
        assert isinstance(entry, dict)
        frames = entry["frames"]
        assert isinstance(frames, list)
        (frame,) = frames
        assert isinstance(frame, dict)
        label, line = frame["name"], frame["line"]
        assert isinstance(label, str)
        assert label.partition(" ")[0].endswith(f":{line}")
