"""Import of state dictionaries in files of ``torch.save``: of a model alone, or with the rest of a training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from zeroir.convert.imported import ImportedModel, ImportedTensor, MappedFile, weights
from zeroir.convert.imported_optimizer import MODEL_KEYS, Tree, optimizer_in, with_optimizer
from zeroir.convert.torch_files import UnknownTensor, read_torch_files
from zeroir.errors import UserError

_MOST_SHOWN: Final = 8


def state_dict_tensors(files: Sequence[MappedFile]) -> list[dict[str, ImportedTensor]]:
    """Return the tensors of the model in each file, by name.

    Raises:
        UserError: if a file is damaged, or has no state dictionary.
    """
    return [
        _tensors(_model(tree, file), file)
        for file, tree in zip(files, read_torch_files(files), strict=True)
    ]


def import_state_dict(file: MappedFile) -> ImportedModel:
    """Import the model in a file of ``torch.save``, and its optimizer's states if they are keyed by parameter names.

    Raises:
        UserError: if the file is damaged, or has no state dictionary.
    """
    (tree,) = read_torch_files([file])
    tensors = _tensors(_model(tree, file), file)
    optimizer = optimizer_in(tree, tensors) if isinstance(tree, Mapping) else None
    model = weights(tensors)
    return model if optimizer is None else with_optimizer(model, optimizer, str(file.path))


def _model(tree: object, file: MappedFile) -> Tree:
    """Return the state dictionary of the model: the entry under a usual key, or the whole file."""
    if not isinstance(tree, Mapping):
        raise UserError(
            f"'{file.path}' has no state dictionary: save model.state_dict() instead of a model or a tensor."
        )
    for part in (*(tree.get(key) for key in MODEL_KEYS), tree):
        if isinstance(part, Mapping) and any(
            isinstance(value, ImportedTensor | UnknownTensor) for value in part.values()
        ):
            return part
    shown = ", ".join(str(key) for key in list(tree)[:_MOST_SHOWN]) or "none"
    raise UserError(
        f"'{file.path}' has no state dictionary of a model: its keys are {shown}, and neither it nor one of "
        f"{', '.join(MODEL_KEYS)} has tensors."
    )


def _tensors(tree: Tree, file: MappedFile) -> dict[str, ImportedTensor]:
    tensors = {}
    for name, value in tree.items():
        if isinstance(value, UnknownTensor):
            raise UserError(f"'{file.path}' has {name}, which cannot be imported: {value.reason}.")
        if isinstance(value, ImportedTensor):
            if str(name) in tensors:
                raise UserError(f"'{file.path}' has two tensors with the name {name}: rename one.")
            tensors[str(name)] = value
    return tensors
