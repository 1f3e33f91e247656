"""Import of ``torch.distributed.checkpoint`` checkpoints, as FSDP2, DDP, torchtitan and others save them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from zeroir.convert.imported import ImportedModel, ImportedTensor, weights
from zeroir.convert.imported_optimizer import (
    MODEL_KEYS,
    number_in,
    optimizer_in,
    with_optimizer,
)
from zeroir.convert.torch_files import read_dcp
from zeroir.errors import UserError

_TRAINING: Final = frozenset({"optim", "optimizer"})
_STEP_KEYS: Final = ("step", "global_step", "steps")


def import_dcp(folder: Path) -> ImportedModel:
    """Import the model of a checkpoint, and the optimizer's states if they are keyed by parameter names.

    Raises:
        UserError: if a file is missing or damaged, or there is no model.
    """
    tree: dict[object, object] = {}
    for keys, value in read_dcp(folder):
        container = tree
        for key in keys[:-1]:
            inner = container.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UserError(f"'{folder}' is damaged: an entry is within {key}, a value.")
            container = inner
        container[keys[-1]] = value
    beside, tensors = _model(tree)
    if not tensors:
        raise UserError(
            f"'{folder}' has no tensors of a model: save a dictionary with model.state_dict() under 'model'."
        )
    model = weights(tensors)
    optimizer = optimizer_in(beside, tensors)
    if optimizer is not None:
        model = with_optimizer(model, optimizer, str(folder))
    steps = (number_in(beside.get(key)) for key in _STEP_KEYS)
    step = next((int(step) for step in steps if step is not None), model.step)
    return replace(model, step=max(step, 0))


def _model(
    tree: dict[object, object],
) -> tuple[dict[object, object], dict[str, ImportedTensor]]:
    """Return the dictionary that contains the model under a usual key or among its entries, and the model's tensors."""
    for key in MODEL_KEYS:
        part = tree.get(key)
        if isinstance(part, dict) and (tensors := _tensors_by_name(part)):
            return tree, tensors
    if len(tree) == 1:
        (only,) = tree.values()
        if isinstance(only, dict) and not all(isinstance(v, ImportedTensor) for v in only.values()):
            beside, tensors = _model(only)
            if beside is not only or tensors:
                return beside, tensors
    rest = {key: value for key, value in tree.items() if key not in _TRAINING}
    return tree, _tensors_by_name(rest)


def _tensors_by_name(tree: Mapping[object, object], prefix: str = "") -> dict[str, ImportedTensor]:
    """Flatten nested dictionaries to their tensors by keys joined with dots."""
    tensors: dict[str, ImportedTensor] = {}
    for key, value in tree.items():
        if isinstance(value, ImportedTensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            tensors |= _tensors_by_name(value, f"{prefix}{key}.")
    return tensors
