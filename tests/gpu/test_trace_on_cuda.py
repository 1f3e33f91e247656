"""A recorded step on a CUDA device: the device itself tells when its ops began and ended."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE
from zeroir.runtime.engine.engine import Engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", range(4))
def test_every_stream_runs_its_ops_in_the_programs_order(device: torch.device, stage: int) -> None:
    logical = mlp()
    engine = Engine(lowered(logical, stage, 1), device=device)
    engine.initialise_flats(initial_flats(logical))
    engine.record(2)
    for ((batch,),) in random_batches(3, 1):
        engine.step(batch)
    timelines = engine.timelines()
    engine.close()
    assert timelines is not None
    by_place = {(span.section, span.index): span for span in timelines[0]}
    last: dict[str, int] = {}
    for name in (LAST_MICRO_STEP, UPDATE):
        for index, op in enumerate(engine.program.section_by_name[name].body):
            if isinstance(op, ops.Wait):  # the device's own waits are no op of a thread
                continue
            span = by_place[name, index]
            assert last.get(op.stream, 0) <= span.start_ns <= span.end_ns
            last[op.stream] = span.end_ns
