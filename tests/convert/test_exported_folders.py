"""An export appears whole or not at all, replaces only its own kind, and trusts no byte that is not what was saved."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.convert.trained import trained, write_trained
from tests.support.stored_modules import adamw_group, write_checkpoint
from zeroir.convert.export import export_checkpoint
from zeroir.convert.exported import ExportedTensor
from zeroir.convert.formats import CheckpointFormat
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.convert.loaded_tensor import loaded_tensor
from zeroir.convert.stored_tensors import StoredTensors, TensorInFiles
from zeroir.errors import UserError

FORMATS: tuple[CheckpointFormat, ...] = ("hf", "state-dict", "dcp", "deepspeed")
FOLDERS: tuple[CheckpointFormat, ...] = ("hf", "dcp", "deepspeed")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    module, optimizer = trained()
    write_trained(tmp_path / "checkpoint", module, optimizer, rank_count=3)
    return str(tmp_path / "checkpoint")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("to", FOLDERS)
def test_a_folder_of_its_own_kind_is_replaced_whole(
    to: CheckpointFormat, checkpoint: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder has nothing to lose
    export_checkpoint(checkpoint, out, to=to)
    first = names(out)
    stale = {"hf": "model-00001-of-00009.safetensors", "dcp": "__7_0.distcp"}.get(to)
    if stale is not None:
        (out / stale).touch()
    export_checkpoint(checkpoint, out, to=to)
    assert names(out) == first
    assert names(tmp_path) == {"checkpoint", "out"}


@pytest.mark.parametrize("to", FOLDERS)
def test_what_else_is_in_a_folder_is_never_lost(
    to: CheckpointFormat, checkpoint: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_checkpoint(checkpoint, out, to=to)
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"also contains tokenizer\.json"):
        export_checkpoint(checkpoint, out, to=to)
    with pytest.raises(UserError, match="exists and is not"):
        export_checkpoint(checkpoint, tmp_path / "checkpoint", to=to)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        export_checkpoint(checkpoint, tmp_path / "notes.txt", to=to)
    with pytest.raises(UserError, match="there is no folder"):
        export_checkpoint(checkpoint, tmp_path / "none" / "out", to=to)


@pytest.mark.parametrize("to", FORMATS)
def test_a_flipped_bit_is_named_and_nothing_is_written(
    to: CheckpointFormat, checkpoint: str, tmp_path: Path
) -> None:
    path = Path(checkpoint) / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    # The last tensor of the file is a state of the optimizer, which only two formats have.
    if to in ("dcp", "deepspeed"):
        with pytest.raises(UserError, match=r"rank-00001\.safetensors"):
            export_checkpoint(checkpoint, tmp_path / "out", to=to)
        assert names(tmp_path) == {"checkpoint"}
    data[-1] ^= 4
    header = int.from_bytes(data[:8], "little") + 8
    data[header + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"flat0\.master.*rank-00001\.safetensors"):
        export_checkpoint(checkpoint, tmp_path / "out", to=to)
    assert names(tmp_path) == {"checkpoint"}


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_that_fails_leaves_the_old_one(
    to: CheckpointFormat, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_checkpoint(checkpoint, out, to=to)
    files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    module, optimizer = trained(1)
    write_trained(tmp_path / "other", module, optimizer, rank_count=2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written"):
        export_checkpoint(str(tmp_path / "other"), out, to=to)
    assert {path: path.read_bytes() for path in files} == before
    assert names(tmp_path) == {"checkpoint", "other", "out"}


def test_the_newest_whole_checkpoint_of_a_folder_is_exported(tmp_path: Path) -> None:
    modules = [nn.Linear(3, 2) for _ in range(3)]
    for step, module in enumerate(modules):
        write_checkpoint(tmp_path / "runs" / f"step-{step:08}", module, step=step)
    path = tmp_path / "runs" / "step-00000002" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    report = export_checkpoint(str(tmp_path / "runs"), tmp_path / "out", to="hf")
    assert report.step == 1
    assert "step-00000002" in report.notes[0]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(loaded["weight"], modules[1].weight)


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "runs" / "step-00000002", nn.Linear(3, 2))
    (tmp_path / "runs" / "step-00000002" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="contains no whole checkpoint"):
        export_checkpoint(str(tmp_path / "runs"), tmp_path / "out", to="hf")


def test_a_checkpoint_in_a_store_is_exported(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    write_checkpoint(tmp_path / "runs" / "step-00000001", module, step=1)
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/runs", "/exported-runs", recursive=True)
    try:
        report = export_checkpoint("memory://exported-runs", tmp_path / "out", to="hf")
    finally:
        store.rm("/exported-runs", recursive=True)
    assert report.step == 1
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(loaded["weight"], module.weight)


MEMORY = """
import sys
from pathlib import Path
from tests.support.resident import peak_resident_bytes
import torch
from zeroir.convert.export import export_checkpoint
from zeroir.convert import export_dcp, export_deepspeed, export_hugging_face, export_state_dict
folder, out, to = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
export_checkpoint(str(folder / "small"), out / "warm", to=to)
before = peak_resident_bytes()
export_checkpoint(str(folder / "large"), out / "out", to=to)
print(peak_resident_bytes() - before)
"""
MEGABYTE = 1 << 20
WITH_STATES = ("dcp", "deepspeed")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A folder with a small checkpoint and one of 420 MB in tensors of 4 MB, with or without states."""

    @cache
    def written(has_states: bool) -> Path:
        folder = tmp_path_factory.mktemp("sizes")
        for name, size, count in (("small", 4, 2), ("large", 1024, 35 if has_states else 105)):
            module = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))
            of_weights = {key: value.detach() for key, value in module.named_parameters()}
            states = {"exp_avg": of_weights, "exp_avg_sq": of_weights} if has_states else None
            groups = [adamw_group(module)] if has_states else []
            write_checkpoint(folder / name, module, states=states, groups=groups)
        return folder

    return written


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_memory_is_bounded_whatever_the_size_of_the_model(
    to: CheckpointFormat, checkpoints: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Far more than the bound is exported, 256 MB above the largest tensor."""
    arguments = [str(checkpoints(to in WITH_STATES)), str(tmp_path), to]
    used_bytes = int(subprocess.check_output([sys.executable, "-c", MEMORY, *arguments]))
    assert used_bytes < 4 * MEGABYTE + 256 * MEGABYTE


# ---- A checkpoint that is exported and imported again has the same bits under the same names


def bits(stored: StoredTensors, tensor: TensorInFiles | None) -> torch.Tensor:
    assert tensor is not None
    exported = ExportedTensor(names=(), dtype=tensor.dtype, tensor=tensor)
    return loaded_tensor(stored, exported).view(torch.int32)


@pytest.mark.parametrize(
    "to", ["state-dict", *(pytest.param(to, marks=pytest.mark.slow) for to in ("hf", "dcp"))]
)
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
