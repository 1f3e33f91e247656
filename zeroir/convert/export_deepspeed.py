"""DeepSpeed's universal checkpoint, which a run of ZeRO stage 1, 2 or 3 of any world size loads.

    latest_universal                                  the name of the folder below
    global_step100_universal/
      mp_rank_00_model_states.pt                      counts of steps, sizes and, for plain loaders, the buffers
      zero_pp_rank_0_mp_rank_00_model_states.pt       the same for stage 3
      zero/optimizer_state.pt                         settings of the optimizer's groups
      zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    each {"param": tensor}; NAME is a parameter's name
      zero/NAME/step.pt                               the count of the optimizer's steps

``"checkpoint": {"load_universal": true}`` in DeepSpeed's configuration makes ``engine.load_checkpoint(out)`` read it.
The layout is what ``deepspeed/checkpoint/ds_to_universal.py`` of DeepSpeed 0.19 writes and
``universal_checkpoint.py`` and ``zero/stage3.py`` read. It holds Adam's states alone, and no frozen parameters: stage 3
asks for ``exp_avg`` and ``exp_avg_sq`` by name, and no stage restores frozen parameters or buffers from it. The state
of a learning-rate schedule has no counterpart: a run with one passes ``load_lr_scheduler_states=False``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from zeroir.artifact.output_folders import UNIVERSAL, folder_written_whole
from zeroir.checkpoint.manifest import MASTER
from zeroir.convert.exported import ExportedTensor, exported_buffers
from zeroir.convert.loaded_tensor import loaded_tensor
from zeroir.convert.stored_tensors import ParameterInFiles, StoredTensors, TensorInFiles
from zeroir.convert.torch_optimizer_states import (
    STEP,
    OptimizerGroupInFiles,
    notes_on_codes,
    optimizer_groups,
    states,
)
from zeroir.errors import UserError

DEEPSPEED_VERSION: Final = "0.19.0"
"""The version with this layout; loaders compare it with the first one that they can read."""

_STATES: Final = ("exp_avg", "exp_avg_sq")
"""The states in this layout, which are those of Adam and AdamW."""


def export_deepspeed(stored: StoredTensors, output: Path) -> list[str]:
    """Export the checkpoint to a folder, and return notes for the user.

    Raises:
        UserError: if the checkpoint is damaged or its optimizer is not Adam, or the folder cannot be written.
    """
    groups = optimizer_groups(stored)
    unknown = [group.algorithm for group in groups if group.algorithm.state_names != _STATES]
    if unknown or not groups:
        has = f"of {unknown[0].value}" if unknown else "without an optimizer"
        raise UserError(
            f"'{stored.path}' is a checkpoint {has}, but DeepSpeed's universal layout holds the states of Adam alone: "
            "use --format dcp, hf or state-dict."
        )
    tag = f"global_step{stored.manifest.step}_universal"
    with folder_written_whole(output, UNIVERSAL) as folder:
        zero = folder / tag / "zero"
        zero.mkdir(parents=True)
        for group in groups:
            for parameter in group.parameters:
                _write_parameter(stored, zero, parameter)
        torch.save(_optimizer_state(stored, groups), zero / "optimizer_state.pt")
        for name in (
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
        ):
            torch.save(_model_states(stored), folder / tag / name)
        (folder / "latest_universal").write_text(tag)
    notes = notes_on_codes(stored)
    if len(groups) > 1:
        notes.append(
            "DeepSpeed's stage 3 gives the settings of the first group to all groups: set those of the others after "
            "load_checkpoint. Stages 1 and 2 give each group its own."
        )
    if any(not parameter.flat.is_trainable for parameter in stored.parameters) or stored.buffers:
        notes.append(
            "DeepSpeed does not load frozen parameters and buffers from a universal checkpoint: load them into the "
            "module before deepspeed.initialize, for instance from --format state-dict."
        )
    return notes


def _write_parameter(stored: StoredTensors, zero: Path, parameter: ParameterInFiles) -> None:
    """Write the folder of a parameter: FP32 values and states, with one tensor in memory at a time."""
    if parameter.name in ("", ".", "..") or not {"/", "\0"}.isdisjoint(parameter.name):
        raise UserError(
            f"DeepSpeed's universal layout names a folder after each parameter, but '{parameter.name}' cannot be a "
            "name: use --format dcp, hf or state-dict."
        )
    folder = zero / parameter.name
    folder.mkdir()
    tensors: Mapping[str, TensorInFiles] = {
        "fp32": stored.weight(parameter, MASTER),
        **states(stored, parameter),
    }
    for name, tensor in tensors.items():
        exported = ExportedTensor(names=(parameter.name,), dtype="f32", tensor=tensor)
        torch.save({"cat_dim": 0, "param": loaded_tensor(stored, exported)}, folder / f"{name}.pt")
    torch.save(_step(stored), folder / "step.pt")


def _step(stored: StoredTensors) -> torch.Tensor:
    return torch.tensor(stored.step_count, dtype=torch.float32)


def _optimizer_state(
    stored: StoredTensors, groups: list[OptimizerGroupInFiles]
) -> dict[str, object]:
    """Return what stages 1 and 2 read at the top level, and stage 3 under ``optimizer_state_dict``.

    DeepSpeed pickles its loss scaler here, an object of its own class. It is left out, so that loading this file needs
    no class; the run then starts with the loss scale of its configuration.
    """
    no_parameters: list[int] = []
    param_groups = [{**group.settings, "params": no_parameters} for group in groups]
    return {
        "ds_version": DEEPSPEED_VERSION,
        "overflow": False,
        "param_groups": param_groups,
        "optimizer_state_dict": {
            "state": {0: {STEP: _step(stored)}},
            "param_groups": param_groups,
        },
    }


def _model_states(stored: StoredTensors) -> dict[str, object]:
    """Return the counts that ``load_checkpoint`` reads; the parameters are in the folders of ``zero``."""
    manifest = stored.manifest
    skipped = max(manifest.step - int(stored.step_count), 0)
    return {
        "module": {
            name: loaded_tensor(stored, buffer)
            for buffer in exported_buffers(stored)
            for name in buffer.names
        },
        "buffer_names": [name for buffer in stored.buffers for name in buffer.names],
        "dp_world_size": manifest.origin.world_size,
        "mp_world_size": 1,
        "lr_scheduler": None,
        "global_steps": manifest.step,
        "skipped_steps": skipped,
        "ds_version": DEEPSPEED_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
