"""What ``--format deepspeed`` writes: its layout, and what DeepSpeed computes from it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.convert import torch_workers as workers
from tests.convert.trained import trained, write_trained
from tests.runtime.support import Ranks, require_success
from tests.support.deepspeed_package import needs_deepspeed
from tests.support.stored_modules import write_checkpoint
from zeroir.convert.export import ExportReport, export_checkpoint
from zeroir.errors import UserError


def exported(
    folder: Path, group_count: int
) -> tuple[nn.Module, torch.optim.Optimizer, ExportReport]:
    module, optimizer = trained(group_count)
    write_trained(folder / "checkpoint", module, optimizer, rank_count=3)
    report = export_checkpoint(str(folder / "checkpoint"), folder / "deepspeed", to="deepspeed")
    return module, optimizer, report


def test_the_layout_is_that_of_ds_to_universal(tmp_path: Path) -> None:
    module, optimizer, report = exported(tmp_path, 2)
    tag = (tmp_path / "deepspeed" / "latest_universal").read_text()
    assert tag == "global_step3_universal"
    folder = tmp_path / "deepspeed" / tag
    names = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    assert names == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        files = {path.name for path in (folder / "zero" / name).iterdir()}
        assert files == {"exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"}
        state = optimizer.state[parameter]
        for quantity, expected in {"fp32": parameter, **state}.items():
            saved = torch.load(folder / "zero" / name / f"{quantity}.pt", weights_only=True)
            saved = saved if quantity == "step" else saved["param"]
            assert torch.equal(saved, expected)
            assert saved.shape == expected.shape
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["lr"] for group in state["param_groups"]] == [1e-2, 3e-3]
    assert state["optimizer_state_dict"]["state"][0]["step"] == 3
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = torch.load(folder / file, weights_only=True)
        assert model["global_steps"] == 3
        assert model["skipped_steps"] == 0
        assert torch.equal(model["module"]["bias"], module.get_buffer("bias"))
    assert any("stage 3" in note for note in report.notes)
    assert any("buffers" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.dist
@needs_deepspeed
@pytest.mark.parametrize(("stage", "group_count"), [(1, 2), (2, 2), (3, 1)])
def test_two_ranks_of_deepspeed_go_on(stage: int, group_count: int, tmp_path: Path) -> None:
    module, optimizer, _ = exported(tmp_path, group_count)
    expected = workers.take_steps(module, optimizer, workers.AFTER)
    arguments = (str(tmp_path), str(stage), str(group_count))
    ranks = Ranks(2, tmp_path, *arguments, module="tests.convert.deepspeed_workers")
    require_success(ranks.wait())
    losses = json.loads((tmp_path / "deepspeed.json").read_text())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "words"), [({"dtype": "bf16"}, "--dtype"), ({"use_ema": True}, "--ema")]
)
def test_the_state_of_training_is_as_it_is(
    options: dict[str, str | bool], words: str, tmp_path: Path
) -> None:
    module, optimizer = trained()
    write_trained(tmp_path / "c", module, optimizer, rank_count=1)
    with pytest.raises(UserError, match=words):
        export_checkpoint(
            str(tmp_path / "c"),
            tmp_path / "out",
            to="deepspeed",
            dtype="bf16" if "dtype" in options else "as-trained",
            use_ema="use_ema" in options,
        )


def test_a_checkpoint_without_adam_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    with pytest.raises(UserError, match="without an optimizer"):
        export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="deepspeed")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["x\0y", "x/y"])
def test_a_parameter_whose_name_is_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW(module.parameters())
    for value in module.parameters():
        optimizer.state[value] = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    write_trained(tmp_path / "c", module, optimizer, rank_count=1)
    with pytest.raises(UserError, match="' cannot be a name: use --format dcp, hf or state-dict"):
        export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="deepspeed")
    export_checkpoint(str(tmp_path / "c"), tmp_path / "hf", to="hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {name}
    assert {path.name for path in tmp_path.iterdir()} == {"c", "hf"}
