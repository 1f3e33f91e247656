"""A step's memory as PyTorch's viewers take it."""

from __future__ import annotations

import pickletools
from dataclasses import replace
from typing import Any

import pytest

from tests.report.torch_judges import memory_viz
from tests.support.schedules import Case
from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.memory.curve import peak
from zeroir.report.memory_snapshot import memory_snapshot
from zeroir.report.plain_pickle import PROTOCOL, dumps

# What torch/utils/viz/MemoryViz.js knows of pickles.
# fmt: off
KNOWN_OPCODES = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME",
    "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP",
    "TUPLE2", "APPEND", "NEWFALSE", "BINPUT", "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE",
    "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST", "DICT", "SETITEM",
}
# fmt: on


def snapshot(case: Case) -> tuple[Program, dict[str, Any]]:
    program = case.scheduled
    made: dict[str, Any] = dict(memory_snapshot(program, source="folder/mlp.zir"))
    return program, made


@pytest.mark.parametrize("case", [Case(stage=0), Case(stage=3), Case(stage=3, micro_steps=3)])
def test_no_two_allocations_meet_and_the_peak_is_the_programs(case: Case) -> None:
    program, made = snapshot(case)
    events, *_ = made["device_traces"]  # the device's, before the host's
    blocks = {e["addr"]: e["size"] for e in events if e["action"] == "segment_alloc"}
    live: dict[int, int] = {}
    most = 0
    for event in events:
        start, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert any(at <= start and start + size <= at + of for at, of in blocks.items())
            assert all(start + size <= at or at + of <= start for at, of in live.items())
            live[start] = size
        elif event["action"] == "free_completed":
            assert live.pop(start) == size
        most = max(most, sum(live.values()))
    assert most == peak(program).total_bytes
    left = {
        block["address"]: block["size"]
        for segment in made["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and segment["device"] == 0
    }
    assert left == live
    for segment in made["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_torch_draws_it() -> None:
    program, made = snapshot(Case(stage=3))
    viz = memory_viz()
    for draw in (viz.trace_plot, viz.segment_plot):
        assert "base64" in draw(made)
    text = viz.trace(made)
    assert text.count("cudaMalloc") == len(made["segments"])
    assert viz.segsum(made)
    flames = viz.memory(made, format_flamegraph=str)
    for buffer in program.buffers:
        if buffer.is_persistent:
            assert f"{buffer.role} %{buffer.name}" in flames


def test_the_viewer_in_the_browser_knows_every_opcode() -> None:
    _, made = snapshot(Case(stage=3))
    names = {opcode.name for opcode, _, _ in pickletools.genops(dumps(made))}
    assert names <= KNOWN_OPCODES
    assert PROTOCOL <= 4
    events = made["device_traces"][0]
    assert "unknown" in {event.get("category") for event in events}
    assert max(event["addr"] for event in events) < 2**53


def test_a_pickle_names_no_class() -> None:
    _, made = snapshot(Case(stage=3))
    names = {opcode.name for opcode, _, _ in pickletools.genops(dumps(made))}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ"}


def test_a_buffer_names_the_line_of_the_model_that_computes_it() -> None:
    program = Case(stage=3).scheduled
    segments = tuple(
        replace(
            segment,
            nodes=tuple(
                replace(node, source=f"{segment.name}.py:{line}")
                for line, node in enumerate(segment.nodes, start=1)
            ),
        )
        for segment in program.segments
    )
    made: dict[str, Any] = dict(
        memory_snapshot(replace(program, segments=segments), source="folder/mlp.zir")
    )
    frames = {
        event["frames"][0]["name"]: event["frames"]
        for event in made["device_traces"][0]
        if event["action"] == "alloc"
    }
    assert {name for name, frame_list in frames.items() if len(frame_list) == 1} >= {
        f"{b.role} %{b.name}"
        for b in program.buffers
        if b.is_persistent and b.space is Space.DEVICE
    } - {"scalar %loss"}
    role = program.buffer_by_name["h.1"].role
    _, computed = frames[f"{role} %h.1"]
    assert computed["filename"] == "block.forward.py"
    nodes = program.segment_by_name["block.forward"].nodes
    assert nodes[computed["line"] - 1].op == "aten.add.Tensor"
