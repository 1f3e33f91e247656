"""What ``--format dcp`` writes, loaded by torch's own FSDP2, DDP and plain modules, which go on training."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.convert import torch_workers as workers
from tests.convert.trained import trained, write_trained
from zeroir.convert import export_dcp
from zeroir.convert.export import export_checkpoint


def exported(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, rank_count: int
) -> None:
    write_trained(folder / "checkpoint", module, optimizer, rank_count)
    export_checkpoint(str(folder / "checkpoint"), folder / "dcp", to="dcp")


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


@pytest.mark.slow
@pytest.mark.parametrize("rank_count", [1, 3, 5])
def test_a_plain_module_goes_on_bit_for_bit(rank_count: int, tmp_path: Path) -> None:
    module, optimizer = trained()
    exported(tmp_path, module, optimizer, rank_count)
    expected = workers.take_steps(module, optimizer, workers.AFTER)
    assert workers.continued("plain", tmp_path) == expected


def test_every_tensor_is_whole_and_none_is_empty(tmp_path: Path) -> None:
    module, optimizer = trained()
    exported(tmp_path, module, optimizer, rank_count=7)
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    tensors = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    assert {key for key in tensors if key.startswith("model.")} == {
        f"model.{key}" for key in module.state_dict()
    }
    for key, value in tensors.items():
        assert value.size.numel(), key
        assert all(chunk.sizes.numel() for chunk in value.chunks), key
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for key, expected in module.state_dict().items():
        assert torch.equal(whole["model"][key], expected)
    for name, parameter in module.named_parameters():
        for quantity, expected in optimizer.state[parameter].items():
            assert torch.equal(whole["optim"]["state"][name][quantity], expected)


def test_large_tensors_are_cut_into_blocks_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_dcp, "BLOCK_BYTES", 100)
    module, optimizer = trained()
    exported(tmp_path, module, optimizer, rank_count=3)
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    embedding = metadata.state_dict_metadata["model.embedding.weight"]
    assert isinstance(embedding, TensorStorageMetadata)
    assert [chunk.sizes[0] for chunk in embedding.chunks] == [2, 2, 2, 2, 2, 1]
    loaded: dict[str, object] = {
        "model": {key: torch.empty_like(value) for key, value in module.state_dict().items()}
    }
    load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model = loaded["model"]
    assert isinstance(model, dict)
    for key, expected in module.state_dict().items():
        assert torch.equal(model[key], expected)
