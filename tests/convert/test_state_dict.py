"""What ``--format state-dict`` writes, read by torch without the right to run code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.convert.support import imported_tensors
from tests.support.stored_modules import write_checkpoint
from zeroir.checkpoint.reading import read_manifest
from zeroir.convert.export import export_checkpoint
from zeroir.convert.import_checkpoint import import_checkpoint
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


# ---- Files of ``torch.save``


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def test_tensors_of_every_dtype_and_layout_keep_their_bits(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        str(dtype): torch.randint(0, 256, (24 * dtype.itemsize,), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        .reshape(4, 6)
        for dtype in DTYPES
    }
    base = torch.arange(60.0).reshape(3, 4, 5)
    state |= {
        "bool": torch.tensor([True, False, True]),
        "transposed": base.mT,
        "slice": base[1:, ::2, 3],
        "scalar": torch.tensor(2.5),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "parameter": nn.Parameter(torch.ones(2, 2)),
        "empty": torch.empty(0, 3),
    }
    torch.save(state, tmp_path / "model.pt")
    import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
    tensors = imported_tensors(tmp_path / "checkpoint")
    manifest = read_manifest(str(tmp_path / "checkpoint"))
    shapes = {flat.name: flat.parameters[0].shape for flat in manifest.flats}
    assert shapes["empty"] == (0, 3)
    assert all(tensor.numel for file in manifest.files for tensor in file.tensors)
    for name, expected in state.items():
        if expected.numel():
            values = tensors[f"{name}.master"] if name in shapes else tensors[name]
            assert values.dtype == expected.dtype
            assert torch.equal(
                values.contiguous().reshape(-1).view(torch.uint8),
                expected.detach().contiguous().reshape(-1).view(torch.uint8),
            ), name


def test_one_storage_under_two_names_is_one_parameter(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

    torch.save({"model": Tied().state_dict(), "epoch": 3}, tmp_path / "model.pt")
    import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
    parameters = [
        (parameter.name, parameter.aliases)
        for flat in read_manifest(str(tmp_path / "checkpoint")).flats
        for parameter in flat.parameters
    ]
    assert parameters == [
        ("first.weight", ("second.weight",)),
        ("first.bias", ()),
        ("second.bias", ()),
    ]


def test_an_optimizer_that_knows_names_is_imported_and_another_is_left_out(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    for is_named in (True, False):
        optimizer = torch.optim.SGD(
            module.named_parameters() if is_named else module.parameters(), lr=0.1, momentum=0.9
        )
        torch.autograd.backward(module(torch.ones(1, 3)).sum())
        optimizer.step()
        path, checkpoint = tmp_path / f"{is_named}.pt", tmp_path / f"{is_named}"
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        report = import_checkpoint(path, str(checkpoint))
        if is_named:
            (group,) = read_manifest(str(checkpoint)).groups
            assert (group.algorithm, group.settings["lr"]) == ("momentum", 0.1)
            momentum = optimizer.state[module.weight]["momentum_buffer"]
            assert torch.equal(imported_tensors(checkpoint)["weight.momentum_buffer"], momentum)
        else:
            assert report.states == ()
            assert "numbers instead of the names" in " ".join(report.notes)


def test_compressed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(40)}, tmp_path / "model.pt")
    with (
        zipfile.ZipFile(tmp_path / "model.pt") as source,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    torch.save({"w": torch.ones(4)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.txt").write_text("no checkpoint at all")
    (tmp_path / "empty").write_bytes(b"")
    for name, problem in (
        ("packed.pt", "is compressed"),
        ("old.pt", "since PyTorch 1.6"),
        ("text.txt", "is not a file"),
        ("empty", "is empty"),
        ("missing", "There is no file or folder"),
    ):
        with pytest.raises(UserError, match=problem):
            import_checkpoint(tmp_path / name, str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()
