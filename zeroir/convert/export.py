"""Export of checkpoints to the formats of other libraries: ``zeroir export CHECKPOINT -o out --format hf``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from zeroir.artifact.output_folders import (
    DISTRIBUTED,
    HUGGING_FACE,
    UNIVERSAL,
    require_folder_writable,
)
from zeroir.artifact.outputs import STATE_DICT, require_writable
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.manifest import MANIFEST_NAME
from zeroir.checkpoint.reading import verify_all
from zeroir.checkpoint.storage import join
from zeroir.checkpoint.storages import open_storage
from zeroir.convert.exported import notes_on_buffers
from zeroir.convert.formats import AS_TRAINED, MAX_SHARD_BYTES, CheckpointFormat, WeightDtype
from zeroir.convert.stored_tensors import StoredTensors
from zeroir.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The result of an export: the checkpoint, its step, and notes for the user."""

    checkpoint: str
    step: int
    notes: tuple[str, ...]


def is_checkpoint(path: str) -> bool:
    """Return whether the path is a checkpoint, or a folder of checkpoints."""
    if Path(path).is_file():
        return False
    if open_storage(path).size_bytes(join(path, MANIFEST_NAME)) is not None:
        return True
    return bool(CheckpointFolder(root=path).list())


def export_checkpoint(
    path: str,
    output: Path,
    *,
    to: CheckpointFormat,
    dtype: WeightDtype = AS_TRAINED,
    use_ema: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Export a checkpoint, or the newest complete one of a folder of checkpoints, to another library's format.

    Tensors are read by slices; at most one is in memory as a whole, and with ``hf`` and ``state-dict`` none. The
    checksum of every byte is verified before its use.

    Raises:
        UserError: if there is no complete checkpoint, it lacks what was requested, or the output cannot be written.
    """
    _require_output(output, to)
    chosen, notes = _chosen(path)
    with StoredTensors(chosen) as stored:
        match to:
            case "hf":
                from zeroir.convert.export_hugging_face import export_hugging_face

                notes += export_hugging_face(
                    stored, output, dtype=dtype, use_ema=use_ema, max_shard_bytes=max_shard_bytes
                )
            case "state-dict":
                from zeroir.convert.export_state_dict import export_state_dict

                export_state_dict(stored, output, dtype=dtype, use_ema=use_ema)
            case "dcp":
                from zeroir.convert.export_dcp import export_dcp

                notes += export_dcp(stored, output, dtype=dtype, use_ema=use_ema)
            case "deepspeed":
                from zeroir.convert.export_deepspeed import export_deepspeed

                if dtype != AS_TRAINED or use_ema:
                    raise UserError(
                        "--format deepspeed holds the state of training, whose weights are FP32: it cannot be "
                        "combined with --dtype or --ema."
                    )
                notes += export_deepspeed(stored, output)
            case _:
                assert_never(to)
        notes += notes_on_buffers(stored.buffers)
        return ExportReport(checkpoint=chosen, step=stored.manifest.step, notes=tuple(notes))


def _require_output(output: Path, format_: CheckpointFormat) -> None:
    """Check that the output can be written before anything is read."""
    match format_:
        case "hf":
            require_folder_writable(output, HUGGING_FACE)
        case "state-dict":
            require_writable(output, STATE_DICT)
            if output.exists() and not output.is_file():
                raise UserError(
                    f"'{output}' is a device or a pipe, but a state_dict is not written from its beginning to its "
                    "end: name a file."
                )
        case "dcp":
            require_folder_writable(output, DISTRIBUTED)
        case "deepspeed":
            require_folder_writable(output, UNIVERSAL)
        case _:
            assert_never(format_)


def _chosen(path: str) -> tuple[str, list[str]]:
    """Return the checkpoint at the path, or the newest complete one in the folder, and notes on newer ones."""
    if open_storage(path).size_bytes(join(path, MANIFEST_NAME)) is not None:
        return path, []
    refusals: list[str] = []
    newest = CheckpointFolder(root=path).newest_whole(
        verify_all, lambda _, error: refusals.append(str(error))
    )
    if newest is None:
        told = f" {refusals[0]}" if refusals else " Name a folder that zeroir saved to."
        raise UserError(f"'{path}' contains no whole checkpoint.{told}")
    return newest[0], refusals
