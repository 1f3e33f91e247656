"""Checkpoints that DeepSpeed 0.19.2 itself wrote: training goes on where DeepSpeed's did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.convert.deepspeed_model import BETAS, LR, STEPS_AFTER, STEPS_BEFORE, Net, batch
from tests.convert.support import imported_tensors
from zeroir.api.capture import given_source
from zeroir.api.compiling import compile_source
from zeroir.checkpoint.reading import read_manifest
from zeroir.config import make_options
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.convert.import_deepspeed import loss_scale_steps
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.execution.numerics import update_scale

DATA = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
RANKS = {"stage1-bf16": 2, "stage2-fp16": 3, "stage3-fp32": 3}


def program(case: str, stage: int) -> Program:
    """A program for the model with other settings than those of the checkpoint, which are to come from it."""
    options = {"stage": stage, "world_size": RANKS[case], "precision": case.partition("-")[2]}
    if case != "stage2-fp16":
        options["group"] = ("*norm*|*bias: weight_decay=0.2, name=group1",)
    given = {"weight_decay": 0.3, "lr": 0.5, "optimizer": "adamw"}
    source = given_source(Net(), batch(0, 0), None, None)
    return compile_source(source, make_options({**options, **given})).program


@pytest.mark.parametrize(
    ("case", "stage", "rtol"),
    [
        # FP16 gradients are added in another order, and DeepSpeed divides them first; means of losses differ in the
        # last bit.
        pytest.param("stage1-bf16", 3, 2e-7, marks=pytest.mark.slow),
        ("stage2-fp16", 1, 2e-3),
        pytest.param("stage3-fp32", 2, 2e-7, marks=pytest.mark.slow),
    ],
)
def test_the_next_losses_are_those_of_deepspeed(
    case: str, stage: int, rtol: float, tmp_path: Path
) -> None:
    report = import_checkpoint(DATA / case, str(tmp_path / "checkpoint"))
    assert (report.format, report.step, report.notes) == ("DeepSpeed", STEPS_BEFORE, ())
    expected = json.loads((DATA / case / "losses.json").read_text())
    lockstep = Lockstep(program(case, stage))
    assert lockstep.load(str(tmp_path / "checkpoint")).notes == ()
    losses = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        results = lockstep.step([[batch(step, rank)] for rank in range(RANKS[case])])
        losses.append(sum(float(result.loss) for result in results) / RANKS[case])
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=0)


def test_the_loss_scale_and_the_count_of_updates_are_kept(tmp_path: Path) -> None:
    import_checkpoint(DATA / "stage2-fp16", str(tmp_path / "checkpoint"))
    scalars = read_manifest(str(tmp_path / "checkpoint")).scalars
    # 2 ** 8, and no overflow in three steps: zeroir is to double the scale in the 998th step from here, as DeepSpeed
    # would.
    assert {scalar.name: scalar.values for scalar in scalars} == {
        "loss_scale": (256.0, 2.0, 2.0),
        "step": (3.0,),
    }


def test_settings_of_groups_ties_and_frozen_parameters_are_kept(tmp_path: Path) -> None:
    for case in RANKS:
        import_checkpoint(DATA / case, str(tmp_path / case))
        manifest = read_manifest(str(tmp_path / case))
        parameters = {flat.name: flat for flat in manifest.flats}
        assert not parameters["scale"].is_trainable
        assert parameters["embedding.weight"].is_trainable
        trained = {name for name, value in Net().named_parameters() if value.requires_grad}
        assert {name for name, flat in parameters.items() if flat.is_trainable} == trained
        assert {name for group in manifest.groups for name in group.parameters} == trained
        for group in manifest.groups:
            assert group.algorithm == "adamw"
            assert group.settings["lr"] == LR
            assert group.settings["betas"] == BETAS
        assert [group.name for group in manifest.groups] == ["default", "group1"][
            : len(manifest.groups)
        ]
        assert [buffer.name for buffer in manifest.buffers] == ["bias"]


def test_stages_1_and_3_of_equal_training_are_equal(tmp_path: Path) -> None:
    """The states of parameters by name do not depend on how ranks cut them: shapes, and no element is lost."""
    tensors = []
    for case in ("stage1-bf16", "stage3-fp32"):
        import_checkpoint(DATA / case, str(tmp_path / case))
        tensors.append(imported_tensors(tmp_path / case))
    assert tensors[0].keys() == tensors[1].keys()
    for name, values in tensors[0].items():
        assert values.shape == tensors[1][name].shape
        assert bool(values.any()), name


@pytest.mark.parametrize("name", ["zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_missing_rank_is_named(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "stage2-fp16", tmp_path / "copy")
    (tmp_path / "copy" / "global_step3" / name).unlink()
    with pytest.raises(UserError, match="files of 2 ranks, but 3 saved it"):
        import_checkpoint(tmp_path / "copy", str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


def test_tensor_parallel_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "stage2-fp16" / "global_step3", tmp_path / "copy")
    (folder / "mp_rank_00_model_states.pt").rename(folder / "mp_rank_01_model_states.pt")
    with pytest.raises(UserError, match="parallelism"):
        import_checkpoint(folder, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("overflows", [(), (0,), (4, 5), (3, 9, 10)])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_loss_scale_grows_at_the_step_at_which_deepspeed_s_does(
    overflows: tuple[int, ...], window: int
) -> None:
    scale, last = 1024.0, -1
    for step in range(30):
        good = loss_scale_steps(step, last, window)
        ours = torch.tensor([scale, good, 1.0])
        skip = torch.tensor([float(step in overflows)])
        update_scale(ours, skip, window=window, factor=2.0, hysteresis=1, minimum=1.0)
        # What DynamicLossScaler.update_scale does with a hysteresis of 1.
        if step in overflows:
            scale, last = scale / 2, step
        elif step - last - 1 > 0 and (step - last - 1) % window == 0:
            scale *= 2
        assert float(ours[0]) == scale, step
