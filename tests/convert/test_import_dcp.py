"""Checkpoints of ``torch.distributed.checkpoint``, written by torch's own FSDP2, DDP and planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from tests.convert.support import imported_tensors
from tests.convert.torch_workers import AFTER, STEPS_BEFORE, Net, batch, optimizer_of
from tests.convert.torch_workers import take_steps as take_torch_steps
from tests.runtime.support import Ranks, require_success
from zeroir.api.capture import given_source
from zeroir.api.compiling import compile_source
from zeroir.checkpoint.reading import read_manifest
from zeroir.config import make_options
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.errors import UserError
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

SETTINGS = {"beta1": 0.8, "beta2": 0.95, "lr": 0.5, "weight_decay": 0.3, "optimizer": "adamw"}


def losses_after(checkpoint: Path, world_size: int, stage: int) -> list[float]:
    """The mean losses of five steps that go on from a checkpoint; all settings come from it."""
    options = {"world_size": world_size, "stage": stage, "precision": "fp32"}
    group = "gain|*norm*|*.bias: weight_decay=0.2, name=group1"
    source = given_source(Net(), batch(0).chunk(world_size)[0], None, None)
    compiled = compile_source(source, make_options({**options, **SETTINGS, "group": (group,)}))
    lockstep = Lockstep(compiled.program)
    assert lockstep.load(str(checkpoint)).notes == ()
    losses = []
    for step in AFTER:
        results = lockstep.step([[part] for part in batch(step).chunk(world_size)])
        losses.append(sum(float(result.loss) for result in results) / world_size)
    return losses


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("kind", "stage"), [("fsdp2", 3), ("ddp", 1)])
def test_the_next_losses_are_those_of_two_ranks_of_torch(
    kind: str, stage: int, tmp_path: Path
) -> None:
    ranks = Ranks(2, tmp_path, kind, str(tmp_path), module="tests.convert.saving_workers")
    require_success(ranks.wait())
    report = import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))
    assert (report.format, report.step) == ("torch.distributed.checkpoint", STEPS_BEFORE)
    expected = json.loads((tmp_path / "losses.json").read_text())
    losses = losses_after(tmp_path / "checkpoint", 2, stage)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=5e-7, atol=0)


def trained(folder: Path, *, is_flattened: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module and its optimizer after some steps, as they were saved to ``dcp``."""
    torch.manual_seed(0)
    module = Net()
    optimizer = optimizer_of(module)
    take_torch_steps(module, optimizer, range(STEPS_BEFORE))
    options = StateDictOptions(flatten_optimizer_state_dict=is_flattened)
    model_state, optimizer_state = get_state_dict(module, optimizer, options=options)
    # torchtitan saves the parameters at the top, and the optimizer flattened; others both below one name.
    state: dict[str, object] = (
        {**model_state, "optimizer": optimizer_state}
        if is_flattened
        else {"app": {"model": model_state, "optim": optimizer_state, "step": STEPS_BEFORE}}
    )
    save(state, checkpoint_id=folder / "dcp")
    return module, optimizer


@pytest.mark.parametrize("is_flattened", [False, True])
def test_every_value_is_the_saved_one(is_flattened: bool, tmp_path: Path) -> None:
    module, optimizer = trained(tmp_path, is_flattened=is_flattened)
    import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))
    tensors = imported_tensors(tmp_path / "checkpoint")
    for name, value in module.named_parameters():
        assert torch.equal(tensors[f"{name}.master"], value)
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensors[f"{name}.{state}"], optimizer.state[value][state])
    manifest = read_manifest(str(tmp_path / "checkpoint"))
    assert manifest.step == STEPS_BEFORE
    assert [(scalar.name, scalar.values) for scalar in manifest.scalars] == [("step", (3.0,))]
    names = {name for name, _ in module.named_parameters()}
    assert {name for group in manifest.groups for name in group.parameters} == names
    decays = {
        name: group.settings["weight_decay"]
        for group in manifest.groups
        for name in group.parameters
    }
    assert decays["embedding.weight"] == 0.1
    assert decays["gain"] == 0.0


def test_chunks_along_any_dimension_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the import are smaller than chunks, and cut them."""

    values = torch.arange(7 * 6 * 5, dtype=torch.float32).reshape(7, 6, 5)
    cuts = [(0, 0, 0, 4, 6, 2), (0, 0, 2, 4, 6, 3), (4, 0, 0, 3, 1, 5), (4, 1, 0, 3, 5, 5)]

    class Cut:
        """A tensor that is saved in boxes."""

        def __create_write_items__(self, fqn: str, _: object) -> list[object]:
            return [
                WriteItem(
                    index=MetadataIndex(fqn, torch.Size(cut[:3])),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(torch.Size(cut[:3]), torch.Size(cut[3:])),
                        properties=TensorProperties(dtype=values.dtype),
                        size=values.size(),
                    ),
                )
                for cut in cuts
            ]

        def __create_chunk_list__(self) -> list[object]:
            return []

        def __get_tensor_shard__(self, _: object) -> Tensor:
            raise AssertionError("the planner has the shards")

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Tensor:
            offset = tuple(index.offset or ())
            sizes = next(cut[3:] for cut in cuts if cut[:3] == offset)
            rows, columns, depth = (slice(o, o + s) for o, s in zip(offset, sizes, strict=True))
            return values[rows, columns, depth]

    save({"model": {"w": Cut()}}, checkpoint_id=tmp_path / "dcp", planner=Planner())
    monkeypatch.setattr("zeroir.convert.imported.BLOCK_BYTES", 4 * 17)
    import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))
    assert torch.equal(imported_tensors(tmp_path / "checkpoint")["w.master"], values)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.unlink()
    with pytest.raises(UserError, match=file.name):
        import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(300)}}, checkpoint_id=tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(UserError, match="ends early"):
        import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))


def test_parameters_that_took_different_numbers_of_steps_are_refused(tmp_path: Path) -> None:
    states = {
        name: {"step": torch.tensor(float(steps)), "exp_avg": torch.ones(3)}
        for name, steps in (("a", 3), ("b", 2))
    }
    state = {
        "model": {name: torch.ones(3) for name in states},
        "optim": {"state": states, "param_groups": [{"params": ["a", "b"], "lr": 1e-3}]},
    }
    save(state, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UserError, match=r"from 2 to 3 steps.*--weights-only"):
        import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))


def test_weights_alone_leave_the_training_behind(tmp_path: Path) -> None:
    module, _ = trained(tmp_path, is_flattened=False)
    report = import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"), weights_only=True)
    assert (report.step, report.states, report.notes) == (0, (), ())
    manifest = read_manifest(str(tmp_path / "checkpoint"))
    assert not manifest.groups
    assert not manifest.scalars
    names = {*imported_tensors(tmp_path / "checkpoint")}
    assert names == {f"{name}.master" for name in module.state_dict()}
