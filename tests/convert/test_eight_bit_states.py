"""States of 8 bits in other formats: FP32 tensors of the values that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.runtime.support import begun, lowered, random_batches
from tests.runtime.test_eight_bit_checkpoints import states_of, widened
from tests.support.programs import mlp
from zeroir.convert import stored_tensors
from zeroir.convert.compare import compare
from zeroir.convert.export import export_checkpoint
from zeroir.convert.stored_tensors import StoredTensors
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.program import Program
from zeroir.runtime.execution.lockstep import Lockstep

States = dict[str, dict[str, Tensor]]
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def saved(path: Path, world_size: int = 3, steps: int = 2) -> tuple[Program, States]:
    """Save a training; the program, and its states by parameter as FP32."""
    program = lowered(mlp(dim=24, features=20, has_codes=True), 3, world_size)
    lockstep = begun(Lockstep(program))
    for batches in random_batches(steps, world_size, shape=(4, 20)):
        lockstep.step(batches)
    lockstep.save(str(path))
    states: States = {}
    for (name, state), values in widened(states_of(lockstep, program)).items():
        _, slot = program.parameter_by_name[name]
        states.setdefault(name, {})[state] = values.view(slot.shape)
    return program, states


@pytest.mark.slow
@pytest.mark.parametrize("slice_bytes", [None, 4 * (BLOCK_NUMEL + 1)])
def test_an_export_has_fp32_states(
    tmp_path: Path, slice_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a slice ends within a block."""
    if slice_bytes is not None:
        monkeypatch.setattr(stored_tensors, "SLICE_BYTES", slice_bytes)
    _, states = saved(tmp_path / "saved")
    report = export_checkpoint(str(tmp_path / "saved"), tmp_path / "dcp", to="dcp")
    assert any("8 bits were written as FP32" in note for note in report.notes)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    loaded = torch.load(tmp_path / "dcp.pt", weights_only=True)["optim"]["state"]
    assert loaded.keys() == states.keys()
    for name, own in states.items():
        assert loaded[name].keys() == {*own, "step"}
        assert all(torch.equal(loaded[name][state], value) for state, value in own.items())


def test_parts_of_a_widened_tensor_begin_within_blocks(tmp_path: Path) -> None:
    _, states = saved(tmp_path / "saved")
    with StoredTensors(str(tmp_path / "saved")) as stored:
        for parameter in stored.parameters:
            for state, values in states[parameter.name].items():
                tensor = stored.widened(parameter, state)
                assert tensor is not None
                flat = values.reshape(-1)
                for start, count in ((0, flat.numel()), (7, flat.numel() - 9), (300, 5)):
                    if start + count > flat.numel():
                        continue
                    part = tensor.elements(2, (flat.numel() - 2,)) if start > 2 else tensor
                    first = start - 2 if start > 2 else start
                    bits = b"".join(stored.slices(part.elements(first, (count,))))
                    exported = torch.frombuffer(bytearray(bits), dtype=torch.float32)
                    assert torch.equal(exported, flat[start : start + count])


@pytest.mark.slow
def test_checkpoints_of_other_layouts_are_compared_by_parameter(tmp_path: Path) -> None:
    program, _ = saved(tmp_path / "three", world_size=3)
    engine = Lockstep(lowered(mlp(dim=24, features=20, has_codes=True), 0, 2))
    engine.load(str(tmp_path / "three"))
    engine.save(str(tmp_path / "two"))
    comparison = compare(str(tmp_path / "three"), str(tmp_path / "two"))
    assert not comparison.only_in_first
    assert not comparison.incomparable
    assert not any(tensor.changed_numel for tensor in comparison.tensors)
    compared = {tensor.key.quantity for tensor in comparison.tensors}
    assert compared >= {"exp_avg_codes", "exp_avg_absmax"}
    assert len(comparison.tensors) >= 5 * len(program.parameter_by_name)
