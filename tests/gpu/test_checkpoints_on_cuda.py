"""Checkpoints of an engine on a CUDA device: copies run beside the steps, with and without CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_training_goes_on_beside_a_save_and_after_a_load(
    device: torch.device, tmp_path: Path, precision: str, cuda_graphs: bool
) -> None:
    program = applied(lowered(mlp(dim=40, precision=precision, clip=0.5), 3, 1), (SaveState(),))
    batches = [step[0][0] for step in random_batches(12, 1)]
    engine = Engine(program, EngineSettings(cuda_graphs=cuda_graphs), device=device)
    engine.initialise_flats(initial_flats(program))
    for batch in batches[:6]:
        engine.step(batch)
    expected = {key: values.cpu() for key, values in engine.full_state().items()}
    saved = engine.save(tmp_path / "saved", wait=False)
    losses = [engine.step(batch).loss for batch in batches[6:]]
    saved.wait()
    engine.save(tmp_path / "after")
    after = {key: values.cpu() for key, values in engine.full_state().items()}

    again = Engine(program, EngineSettings(cuda_graphs=cuda_graphs), device=device)
    for _ in range(2):  # The second time over the contents and the graphs of a run.
        again.load(tmp_path / "saved")
        for key, values in again.full_state().items():
            assert torch.equal(values.cpu(), expected[key]), key
        assert [again.step(batch).loss for batch in batches[6:]] == losses
        for key, values in again.full_state().items():
            assert torch.equal(values.cpu(), after[key]), key

    on_cpu = Engine(lowered(mlp(dim=40, precision=precision, clip=0.5), 0, 1))
    on_cpu.load(tmp_path / "after")
    for key, values in on_cpu.full_state().items():
        assert torch.equal(values, after[key]), key
    for each in (engine, again, on_cpu):
        each.close()
