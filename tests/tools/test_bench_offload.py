"""The benchmark of offloading counts what it says, and its published rows have their sources."""

from __future__ import annotations

import json
import re

import pytest

from tests.passes.test_gates import gate
from tools import offload_models, offload_on_paper
from tools.bench_offload import beside_segments, copied_bytes, update_bytes_per_s
from zeroir.cost.machine import load_machine
from zeroir.cost.simulate import simulate
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.traffic import transfer_bytes
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.program import Program
from zeroir.ir.spans import Span

PROGRAM = gate("offload")


def spans_of(program: Program) -> list[Span]:
    return list(simulate(program, load_machine("dgx-h100")).classes[0].spans)


def test_copied_bytes_are_those_of_the_transfers_that_ran() -> None:
    spans = spans_of(PROGRAM)
    planned = transfer_bytes(PROGRAM)
    assert planned["to_host"] > 0
    assert copied_bytes(PROGRAM, spans) == planned
    # A step that left one copy out is found.
    left_out = next(
        number
        for number, span in enumerate(spans)
        if isinstance(PROGRAM.section_by_name[span.section].body[span.index], ops.ToHost)
    )
    assert copied_bytes(PROGRAM, spans[:left_out] + spans[left_out + 1 :]) != planned


def spans_at(kind: type[ops.Op], start_ns: int, end_ns: int, stream: str | None = None) -> Span:
    for section in PROGRAM.sections:
        for index, op in enumerate(section.body):
            if isinstance(op, kind) and stream in (None, effects(op).stream):
                return Span(section.name, index, start_ns, end_ns)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("working", "expected"), [((0, 100), 1.0), ((0, 50), 0.5), ((80, 300), 0.2), ((100, 200), 0.0)]
)
def test_the_share_of_copies_beside_segments(working: tuple[int, int], expected: float) -> None:
    compute = spans_at(ops.Compute, *working, stream=COMPUTE)
    assert beside_segments(PROGRAM, [compute, spans_at(ops.ToHost, 0, 100)]) == expected
    assert beside_segments(PROGRAM, [compute]) == 0.0
    # The host's update counts like a copy, twice as long as which it is here.
    update = spans_at(ops.OptimizerStep, 200, 400)
    both = beside_segments(PROGRAM, [compute, spans_at(ops.ToHost, 0, 100), update])
    assert both == pytest.approx((expected * 100 + max(0, min(working[1], 400) - 200)) / 300)


def test_the_rate_of_an_update_counts_what_it_reads_and_writes() -> None:
    span = spans_at(ops.OptimizerStep, 0, 1000)
    op = PROGRAM.section_by_name[span.section].body[span.index]
    assert isinstance(op, ops.OptimizerStep)
    numel = op.param.local_numel(PROGRAM.mesh)
    # Momentum: the parameter, its gradient and one state, each read and written; and a few scalars.
    least = numel * 3 * 8
    assert least <= update_bytes_per_s(PROGRAM, [span]) / 1e6 <= least + 100


def test_published_rows_have_sources_and_known_counterparts() -> None:
    rows = json.loads(offload_on_paper.PAPERS.read_text())["rows"]
    assert {row["system"] for row in rows} >= {"ZeRO-Offload", "ZeRO-Infinity"}
    for row in rows:
        assert re.search(r"arXiv \d{4}\.\d{5}|DeepSpeed", row["source"]), row
        assert row["tflops"] > 0
        assert row["ours"] is None or row["ours"] in offload_models.LENGTHS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt_10b", 10.3), ("llama_13b", 13.0), ("llama_70b", 69.0), ("gpt_175b", 174.6)],
)
def test_the_models_have_the_published_sizes(name: str, billions: float) -> None:
    count = sum(parameter.numel() for parameter in offload_models.module(name).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.005)
