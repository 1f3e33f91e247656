"""Streams and events of a program are CUDA's, one to one, and order what the program orders and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from tests.gpu.support import example, example_batches, torch_stream
from tests.runtime.support import lowered
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import COMPUTE, GATHER, HOST, REDUCE
from zeroir.ir.ops import Op
from zeroir.ir.program import Pending, Program, Section, State
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.cuda import CudaStreams

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 200_000_000
"""About a tenth of a second, in which everything else that a test issues would have run."""


@dataclass(slots=True)
class Cells:
    """Carries out fills of ``%x`` on the current stream; those of 1 after a sleep of the device."""

    cells: torch.Tensor
    seen: dict[str, set[int]] = field(default_factory=dict)

    def __call__(self, op: Op) -> None:
        assert isinstance(op, ops.Fill)
        current = torch.cuda.current_stream()
        self.seen.setdefault(op.stream, set()).add(current.cuda_stream)
        if op.value == 1.0:
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start, stop = op.destination.offset, op.destination.stop
        self.cells[start:stop].fill_(op.value)


def fill(cell: int, value: float, stream: str, event: str | None = None) -> ops.Fill:
    region = Region(buffer="x", offset=cell, numel=1)
    return ops.Fill(destination=region, value=value, stream=stream, event=event)


def program_of(*body: Op, exit_state: State | None = None) -> Program:
    section = Section(name="last_micro_step", body=body, exit=exit_state or State())
    return replace(mlp(), sections=(section,))


@pytest.fixture
def cells(device: torch.device) -> Iterator[Cells]:
    found = Cells(torch.zeros(8, device=device))
    # CUDA loads a kernel when it is first launched, and may wait for the device then.
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    found.cells[:1].fill_(0.0)
    yield found
    torch.cuda.synchronize()


def run(program: Program, cells: Cells) -> CudaStreams:
    streams = CudaStreams(program, cells.cells.device)
    (section,) = program.sections
    streams.join([])
    for op in section.body:
        submit(streams, op, cells)
    return streams


def submit(streams: CudaStreams, op: Op, cells: Cells) -> None:
    streams.bind(op, partial(cells, op))()


def test_every_stream_is_one_of_its_own_and_compute_the_current_one(cells: Cells) -> None:
    program = program_of(fill(0, 2.0, COMPUTE), fill(1, 2.0, GATHER), fill(2, 2.0, REDUCE))
    streams = run(program, cells)
    assert [len(found) for found in cells.seen.values()] == [1, 1, 1]
    assert len(set.union(*cells.seen.values())) == 3
    assert cells.seen[COMPUTE] == {torch.cuda.current_stream().cuda_stream}
    for name, found in cells.seen.items():
        assert {torch_stream(streams, name).cuda_stream} == found


def test_streams_run_side_by_side_until_a_wait(cells: Cells) -> None:
    program = program_of(
        fill(0, 1.0, GATHER, "0"), fill(1, 2.0, COMPUTE, "1"), ops.Wait(waited="1", on=HOST)
    )
    streams = run(program, cells)
    assert not torch_stream(streams, GATHER).query()  # the host waited for compute alone
    assert torch_stream(streams, COMPUTE).query()
    submit(streams, ops.Wait(waited="0", on=COMPUTE), cells)
    assert cells.cells[:2].tolist() == [1.0, 2.0]  # read on compute, after the wait


def test_a_boundary_orders_all_streams(cells: Cells) -> None:
    streams = run(program_of(fill(0, 1.0, GATHER), fill(1, 1.0, REDUCE)), cells)
    streams.join([])
    assert cells.cells[:2].tolist() == [1.0, 1.0]


def test_a_boundary_orders_what_stands_before_an_op_that_crosses_it(cells: Cells) -> None:
    crossing = State(pending=(Pending(event="0", stream=GATHER),))
    program = program_of(fill(0, 1.0, GATHER), fill(1, 1.0, GATHER, "0"), exit_state=crossing)
    streams = run(program, cells)
    streams.join(["0"])
    copy = cells.cells[:1].clone()
    torch_stream(streams, COMPUTE).synchronize()
    assert copy.item() == 1.0
    assert not torch_stream(streams, GATHER).query()
    submit(streams, ops.Wait(waited="0", on=COMPUTE), cells)
    assert cells.cells[1].item() == 1.0


def test_an_event_of_the_host_is_not_mistaken_for_one_of_the_device(cells: Cells) -> None:
    """Both sections call their event 0; the second's is a worker thread's."""
    program = program_of(fill(0, 2.0, GATHER, "0"), ops.Wait(waited="0", on=COMPUTE))
    streams = run(program, cells)
    streams.join([])
    submit(streams, fill(1, 1.0, "optimizer", "0"), cells)
    submit(streams, ops.Wait(waited="0", on=HOST), cells)
    assert cells.seen["optimizer"]
    streams.close()


def test_events_and_waits_map_one_to_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = example(3, 1, "fp32")
    engine = Engine(program, device=device)
    engine.step(example_batches(1)[0])
    counts = {"record": 0, "wait": 0}
    record, wait = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event

    def counted_record(
        self: torch.cuda.Stream, event: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        counts["record"] += 1
        recorded: torch.cuda.Event = record(self, event)
        return recorded

    def counted_wait(self: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        counts["wait"] += 1
        wait(self, event)

    monkeypatch.setattr(torch.cuda.Stream, "record_event", counted_record)
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", counted_wait)
    engine.step(example_batches(1)[0])
    engine.close()
    body = list(program.step_ops())
    # A boundary has all streams, also those that only saves and evaluations use.
    streams = {op.stream for op in program.ops() if not isinstance(op, ops.Wait)}
    boundaries = 2 * 2
    signals = [op for op in body if not isinstance(op, ops.Wait) and op.event is not None]
    waits = [op for op in body if isinstance(op, ops.Wait)]
    assert counts["record"] == len(signals) + boundaries * len(streams)
    assert counts["wait"] == len(waits) + boundaries * len(streams) * (len(streams) - 1)


def test_only_streams_that_ops_name_exist(device: torch.device) -> None:
    program = lowered(mlp(), 0, 1)
    streams = CudaStreams(program, device)
    assert torch_stream(streams, REDUCE) != torch_stream(streams, COMPUTE)
    with pytest.raises(KeyError):
        torch_stream(streams, GATHER)
