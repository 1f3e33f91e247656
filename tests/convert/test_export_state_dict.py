"""What ``--format state-dict`` writes, read by torch without the right to run code."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.stored_modules import write_checkpoint
from zeroir.convert.export import export_checkpoint
from zeroir.convert.torch_dtypes import TORCH_DTYPES
from zeroir.errors import UserError


class Kinds(nn.Module):
    """Parameters and buffers of several dtypes, a scalar, a tied weight, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)
        self.low = nn.Linear(5, 3).to(torch.bfloat16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.scalar = nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("mask", torch.tensor([[True, False], [False, True]]))
        self.register_buffer("cache", torch.zeros(9), persistent=False)


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("rank_count", [1, 3])
def test_torch_loads_every_bit_strictly(rank_count: int, is_mapped: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Kinds()
    write_checkpoint(tmp_path / "c", module, rank_count=rank_count)
    export_checkpoint(str(tmp_path / "c"), tmp_path / "weights.pt", to="state-dict")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True, mmap=is_mapped)
    for key, value in module.state_dict().items():
        assert loaded[key].dtype == value.dtype
        assert loaded[key].shape == value.shape
        assert torch.equal(loaded[key], value), key
        assert loaded[key].data_ptr() % 64 == 0
    assert loaded["tied.weight"].data_ptr() == loaded["inner.weight"].data_ptr()
    other = Kinds()
    other.load_state_dict(loaded, strict=True)
    assert torch.equal(other.tied.weight, module.tied.weight)


def test_parameters_are_cast_and_buffers_are_not(tmp_path: Path) -> None:
    module = Kinds()
    write_checkpoint(tmp_path / "c", module)
    export_checkpoint(str(tmp_path / "c"), tmp_path / "w.pt", to="state-dict", dtype="f16")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert {loaded[name].dtype for name, _ in module.named_parameters()} == {torch.float16}
    for name in ("norm.running_mean", "norm.num_batches_tracked", "mask"):
        assert loaded[name].dtype == module.state_dict()[name].dtype
    assert torch.equal(loaded["inner.weight"], module.inner.weight.half())


def test_where_ranks_have_different_buffers_those_of_rank_0_are_written(tmp_path: Path) -> None:
    module, other = Kinds(), Kinds()
    module.norm.running_mean = torch.tensor([1.0, 2.0, 3.0])
    write_checkpoint(tmp_path / "c", module, buffers_of_rank_1=other)
    report = export_checkpoint(str(tmp_path / "c"), tmp_path / "w.pt", to="state-dict")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert loaded["norm.running_mean"].tolist() == [1, 2, 3]
    (note,) = report.notes
    assert note.startswith("Buffers differ between ranks")


def test_buffers_of_every_dtype_of_checkpoints_are_written(tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    for name, dtype in TORCH_DTYPES.items():
        bits = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        module.register_buffer(name, bits.view(dtype))
    write_checkpoint(tmp_path / "c", module)
    export_checkpoint(str(tmp_path / "c"), tmp_path / "w.pt", to="state-dict")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, expected in module.named_buffers():
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name].view(torch.uint8), expected.view(torch.uint8)), name


def test_a_file_of_another_kind_stays(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    target = tmp_path / "thesis.pt"
    target.write_text("years of work")
    with pytest.raises(UserError, match="is not a state_dict"):
        export_checkpoint(str(tmp_path / "c"), target, to="state-dict")
    assert target.read_text() == "years of work"
    target.unlink()
    for _ in range(2):  # the second time it replaces its own
        export_checkpoint(str(tmp_path / "c"), target, to="state-dict")


@pytest.mark.parametrize("target", ["/dev/null", "pipe"])
def test_a_device_and_a_pipe_are_refused(target: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    if target == "pipe":
        os.mkfifo(tmp_path / target)
    with pytest.raises(UserError, match="name a file"):
        export_checkpoint(str(tmp_path / "c"), tmp_path / target, to="state-dict")
