"""Import of another library's files as a checkpoint with one flat for each parameter, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Final

from zeroir import __version__
from zeroir.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Origin,
    Piece,
    StoredBuffer,
    StoredFlat,
    StoredParameter,
    StoredQuantity,
)
from zeroir.checkpoint.publish import Draft, begin
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES, StoredTensorSpec
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file
from zeroir.convert.import_dcp import import_dcp
from zeroir.convert.import_deepspeed import LATEST, MODEL_FILES, import_deepspeed
from zeroir.convert.import_safetensors import MODEL_FILES as HUGGING_FACE_FILES
from zeroir.convert.import_safetensors import (
    SAFETENSORS,
    import_hugging_face,
    import_safetensors,
    is_safetensors,
)
from zeroir.convert.import_state_dict import import_state_dict
from zeroir.convert.imported import (
    ImportedModel,
    ImportedParameter,
    ImportedTensor,
    MappedFile,
)
from zeroir.convert.torch_files import METADATA
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import format_bytes

BUFFER: Final = "buffer"
"""The suffix of a module buffer's tensor name, where parameters have a quantity."""

REPEATED_BYTES: Final = 1 << 30
MOST_REPEATED: Final = 16
"""An import writes at most this many bytes for each byte that it reads, plus ``REPEATED_BYTES``."""

Part = tuple[StoredTensorSpec, Iterable[memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """The result of an import.

    ``parameters`` is their number, ``numel`` the number of their elements, and ``states`` the names of the optimizer
    states. ``notes`` are sentences on what was left out.
    """

    checkpoint: str
    format: str
    parameters: int
    numel: int
    states: tuple[str, ...]
    step: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: Path,
    output: str,
    *,
    renames: Sequence[tuple[str, str]] = (),
    weights_only: bool = False,
) -> ImportReport:
    """Import a model that another library saved, as a checkpoint that appears atomically.

    Args:
        source: a file of safetensors or of ``torch.save``; a folder of Hugging Face, of
            ``torch.distributed.checkpoint``, or of DeepSpeed.
        output: the unused path of the new checkpoint.
        renames: pairs of prefixes of names. The first pair whose old prefix matches is applied.
        weights_only: leave out the optimizer, the step and the loss scale.

    Raises:
        UserError: if the source is damaged or unknown, or the checkpoint cannot be written.
    """
    format_, model = _read(source)
    if weights_only:
        model = _without_training(model)
    model = _renamed(model, renames)
    _require_tensors(model, source)
    draft = begin(output)
    try:
        draft.publish(_written(draft, model))
    except BaseException:
        draft.abandon()
        raise
    return ImportReport(
        checkpoint=draft.target,
        format=format_,
        parameters=len(model.parameters),
        numel=sum(parameter.values.numel for parameter in model.parameters),
        states=tuple(
            dict.fromkeys(state for parameter in model.parameters for state in parameter.states)
        ),
        step=model.step,
        notes=model.notes,
    )


def _read(source: Path) -> tuple[str, ImportedModel]:
    """Read the model; also return the name of the source's format."""
    if source.is_file():
        file = MappedFile(source)
        if is_safetensors(file):
            return "safetensors", import_safetensors(file)
        return "torch.save", import_state_dict(file)
    if not source.is_dir():
        raise UserError(f"There is no file or folder '{source}'.")
    if (source / MANIFEST_NAME).exists():
        raise UserError(
            f"'{source}' is a checkpoint of zeroir already: resume from it, or export it."
        )
    if (source / METADATA).exists():
        return "torch.distributed.checkpoint", import_dcp(source)
    if (source / LATEST).is_file() or any(source.glob(MODEL_FILES)):
        return "DeepSpeed", import_deepspeed(source)
    if any((source / name).exists() for name in HUGGING_FACE_FILES) or any(
        source.glob(SAFETENSORS)
    ):
        return "Hugging Face", import_hugging_face(source)
    raise UserError(
        f"'{source}' is none of the folders that can be imported: those of Hugging Face (model.safetensors), "
        "torch.distributed.checkpoint (.metadata) and DeepSpeed (latest, or mp_rank_00_model_states.pt)."
    )


def _without_training(model: ImportedModel) -> ImportedModel:
    return replace(
        model,
        parameters=tuple(replace(parameter, states={}) for parameter in model.parameters),
        step=0,
        scalars=(),
        groups=(),
        notes=(),
    )


def _renamed(model: ImportedModel, renames: Sequence[tuple[str, str]]) -> ImportedModel:
    """Rename the parameters and buffers of a model.

    Raises:
        UserError: if a pair matches no name, or two tensors get the same name.
    """
    unused = {old for old, _ in renames}

    def renamed(name: str) -> str:
        for old, new in renames:
            if name.startswith(old):
                unused.discard(old)
                return new + name[len(old) :]
        return name

    def all_renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(renamed(name) for name in names)

    result = replace(
        model,
        parameters=tuple(
            replace(each, name=renamed(each.name), aliases=all_renamed(each.aliases))
            for each in model.parameters
        ),
        buffers=tuple(
            replace(each, name=renamed(each.name), aliases=all_renamed(each.aliases))
            for each in model.buffers
        ),
        groups=tuple(
            group.model_copy(update={"parameters": all_renamed(group.parameters)})
            for group in model.groups
        ),
    )
    if unused:
        raise UserError(f"No name begins with '{min(unused)}', which --rename is to replace.")
    names: set[str] = set()
    for name in (
        *(name for each in result.parameters for name in (each.name, *each.aliases)),
        *(name for each in result.buffers for name in (each.name, *each.aliases)),
    ):
        if not name or name in names:
            raise UserError(
                f"A tensor would have no name, or two the name '{name}': give another --rename."
            )
        names.add(name)
    return result


def _require_tensors(model: ImportedModel, source: Path) -> None:
    """Check that there are parameters, and that small files do not declare tensors that would fill the disk."""
    if not model.parameters:
        raise UserError(f"'{source}' has no tensor of floating-point numbers, so no parameters.")
    tensors = [
        *(tensor for parameter in model.parameters for tensor in parameter.quantities.values()),
        *(buffer.tensor for buffer in model.buffers),
    ]
    written_bytes = sum(tensor.numel * ITEMSIZE_BYTES[tensor.dtype] for tensor in tensors)
    files = {box.file for tensor in tensors for box in tensor.boxes}
    read_bytes = sum(file.size_bytes for file in files)
    if written_bytes > REPEATED_BYTES + MOST_REPEATED * read_bytes:
        raise UserError(
            f"'{source}' has {format_bytes(read_bytes)}, but its tensors repeat elements until they have "
            f"{format_bytes(written_bytes)}: call contiguous() before you save them, if this is meant."
        )


def _written(draft: Draft, model: ImportedModel) -> Manifest:
    """Write the file of the checkpoint, and return the manifest."""
    name = draft.file_name(0)
    file = write_file(open_storage(draft.folder), draft.folder, name, [*_parts(model)])
    return Manifest(
        step=model.step,
        origin=Origin(
            zeroir=__version__,
            world_size=1,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
        files=(file,),
        flats=tuple(_flat(parameter, name) for parameter in model.parameters),
        buffers=tuple(
            StoredBuffer(
                name=buffer.name,
                dtype=buffer.tensor.dtype,
                shape=buffer.tensor.shape,
                ranks=(0,),
                file=name,
                tensor=f"{buffer.name}.{BUFFER}",
                aliases=buffer.aliases,
            )
            for buffer in model.buffers
            if buffer.tensor.numel
        ),
        scalars=model.scalars,
        groups=model.groups,
        config=model.config,
    )


def _parts(model: ImportedModel) -> Iterator[Part]:
    """Yield the tensors of the file, except those without elements."""
    for parameter in model.parameters:
        for quantity, tensor in parameter.quantities.items():
            if tensor.numel:
                yield _part(f"{parameter.name}.{quantity}", tensor)
    for buffer in model.buffers:
        if buffer.tensor.numel:
            yield _part(f"{buffer.name}.{BUFFER}", buffer.tensor)


def _part(name: str, tensor: ImportedTensor) -> Part:
    spec = StoredTensorSpec(name=name, dtype=tensor.dtype, numel=tensor.numel)
    return spec, tensor.blocks(name)


def _flat(parameter: ImportedParameter, file: str) -> StoredFlat:
    numel = prod(parameter.values.shape)
    return StoredFlat(
        name=parameter.name,
        dtype=parameter.values.dtype,
        is_trainable=parameter.is_trainable,
        parameters=(
            StoredParameter(
                name=parameter.name,
                offset=0,
                shape=parameter.values.shape,
                aliases=parameter.aliases,
            ),
        ),
        quantities=tuple(
            StoredQuantity(
                name=quantity,
                dtype=tensor.dtype,
                pieces=(
                    Piece(file=file, tensor=f"{parameter.name}.{quantity}", start=0, stop=numel),
                )
                if numel
                else (),
            )
            for quantity, tensor in parameter.quantities.items()
        ),
    )
