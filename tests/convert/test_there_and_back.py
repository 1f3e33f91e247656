"""A checkpoint that is exported and imported again has the same bits under the same names."""

from pathlib import Path

import pytest
import torch

from tests.convert.trained import trained, write_trained
from zeroir.convert.export import export_checkpoint
from zeroir.convert.exported import ExportedTensor
from zeroir.convert.formats import CheckpointFormat
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.convert.loaded_tensor import loaded_tensor
from zeroir.convert.stored_tensors import StoredTensors, TensorInFiles


def bits(stored: StoredTensors, tensor: TensorInFiles | None) -> torch.Tensor:
    assert tensor is not None
    exported = ExportedTensor(names=(), dtype=tensor.dtype, tensor=tensor)
    return loaded_tensor(stored, exported).view(torch.int32)


@pytest.mark.parametrize("to", ["hf", "state-dict", "dcp"])
def test_every_bit_comes_back(to: CheckpointFormat, tmp_path: Path) -> None:
    module, optimizer = trained()
    write_trained(tmp_path / "first", module, optimizer, rank_count=3)
    export_checkpoint(str(tmp_path / "first"), tmp_path / "out", to=to)
    import_checkpoint(tmp_path / "out", str(tmp_path / "second"))
    quantities = ["master", *(["exp_avg", "exp_avg_sq"] if to == "dcp" else [])]
    with (
        StoredTensors(str(tmp_path / "first")) as first,
        StoredTensors(str(tmp_path / "second")) as second,
    ):
        for name, _ in module.named_parameters():
            for quantity in quantities:
                before = first.state(first.parameter_by_name[name], quantity)
                after = second.state(second.parameter_by_name[name], quantity)
                assert torch.equal(bits(first, before), bits(second, after)), (name, quantity)
        if to != "dcp":
            return
        assert second.step_count == first.step_count
        assert [set(group.parameters) for group in second.manifest.groups] == [
            set(group.parameters) for group in first.manifest.groups
        ]
        for before_group, after_group in zip(
            first.manifest.groups, second.manifest.groups, strict=True
        ):
            assert before_group.settings.items() <= after_group.settings.items()
