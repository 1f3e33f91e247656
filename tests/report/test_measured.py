"""A measured step is read back from its trace as it was, and only over the program that ran."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import program, reported, simulated
from tests.report.test_page import data_of
from zeroir.errors import UserError
from zeroir.ir.program import UPDATE
from zeroir.ir.spans import Span
from zeroir.report.measured import MeasuredStep, read_measured_step
from zeroir.report.page.facts import step_ops
from zeroir.report.page.html import report_html
from zeroir.report.trace import chrome_trace, simulated_trace

MICRO_STEPS = 3
RANKS = 4


def timelines() -> list[list[Span]]:
    """Of each rank, a step that is slower than the simulated one; rank r begins r µs later."""
    (rank_class,) = simulated(program(MICRO_STEPS)).classes
    return [
        [
            Span(
                span.section,
                span.index,
                (2 + rank) * span.start_ns + 1000 * rank,
                (2 + rank) * span.end_ns + 1000 * rank,
            )
            for span in rank_class.spans
        ]
        for rank in range(RANKS)
    ]


def written(path: Path, document: dict[str, object]) -> Path:
    path.write_text(json.dumps(document))
    return path


def read(folder: Path, ranks: Sequence[Sequence[Span]]) -> MeasuredStep:
    made = program(MICRO_STEPS)
    trace = written(folder / "trace.json", chrome_trace(made, ranks, step=7))
    return read_measured_step(trace, made)


def test_each_op_has_its_measured_times(tmp_path: Path) -> None:
    measured = read(tmp_path, timelines())
    assert (measured.step, measured.micro_steps, len(measured.ranks)) == (7, MICRO_STEPS, RANKS)
    shown_ops = step_ops(program(MICRO_STEPS), simulated(program(MICRO_STEPS)))
    for rank, spans in enumerate(measured.ranks):
        for op, span in zip(shown_ops, spans, strict=True):
            (of_op,) = op.spans
            assert span is not None
            assert span.position == op.position
            assert span.start_ns == (2 + rank) * of_op.start_ns + 1000 * rank
            assert span.duration_ns == (2 + rank) * of_op.duration_ns
    assert measured.step_ns == max(span.end_ns for spans in timelines() for span in spans)
    longest = max(range(len(shown_ops)), key=lambda number: shown_ops[number].spans[0].duration_ns)
    duration_ns = shown_ops[longest].spans[0].duration_ns
    assert measured.durations_ns(longest) == [(2 + rank) * duration_ns for rank in range(RANKS)]


def test_an_update_that_was_skipped_has_no_times(tmp_path: Path) -> None:
    ranks = timelines()
    ranks[1] = [span for span in ranks[1] if span.section != UPDATE]
    measured = read(tmp_path, ranks)
    shown_ops = step_ops(program(MICRO_STEPS), simulated(program(MICRO_STEPS)))
    for op, span in zip(shown_ops, measured.ranks[1], strict=True):
        assert (span is None) == (op.position.section == UPDATE)


def test_other_traces_are_refused(tmp_path: Path) -> None:
    made, path = program(MICRO_STEPS), tmp_path / "trace.json"
    whole = chrome_trace(made, timelines(), step=1)
    shorter = chrome_trace(program(), [simulated(program()).classes[0].spans], step=1)
    documents: dict[str, dict[str, object]] = {
        "is a trace of another program": shorter | {"otherData": {**_facts(shorter), "ranks": 4}},
        "holds a step simulated on dgx-h100": simulated_trace(made, simulated(made)),
        "is no trace of a step": {"traceEvents": [], "displayTimeUnit": "ms"},
    }
    for reason, document in documents.items():
        with pytest.raises(UserError, match=reason):
            read_measured_step(written(path, document), made)
    no_ops = whole | {"traceEvents": []}
    events = whole["traceEvents"]
    assert isinstance(events, list)
    no_rank = whole | {"traceEvents": [event | {"pid": 99} for event in events]}
    for document in (no_ops, no_rank):
        with pytest.raises(UserError, match="is no trace of a step"):
            read_measured_step(written(path, document), made)
    other_ranks = whole | {"otherData": {**_facts(whole), "ranks": 1}}
    with pytest.raises(UserError, match=r"a trace of 1 rank, .* compile it with --world-size 1"):
        read_measured_step(written(path, other_ranks), made)
    path.write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match="is no trace of a step"):
        read_measured_step(path, made)
    with pytest.raises(UserError, match=r"gone\.json' cannot be read: No such file"):
        read_measured_step(tmp_path / "gone.json", made)


def _facts(trace: dict[str, object]) -> dict[str, Any]:
    facts = trace["otherData"]
    assert isinstance(facts, dict)
    return facts


@pytest.mark.slow
def test_the_page_has_both_timelines_and_their_ratio(tmp_path: Path) -> None:
    made = program(MICRO_STEPS)
    measured = read(tmp_path, timelines())
    page = report_html(reported(made), measured=measured)
    data = data_of(page)
    simulated_streams = [lane["stream"] for lane in data["lanes"] if not lane["isMeasured"]]
    assert [lane["stream"] for lane in data["lanes"] if lane["isMeasured"]] == simulated_streams
    ratio = measured.step_ns / simulated(made).step_ns
    assert f"{ratio:.3g} times the simulated one" in page
    assert '<option value="3">rank 3</option>' in page
    with pytest.raises(ValueError, match="over one program"):
        report_html(reported(made), reported(made), measured=measured)
