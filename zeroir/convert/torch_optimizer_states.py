"""The states and settings of a checkpoint's optimizer as torch's optimizers name them, by parameter.

Our states have torch's names already. Adafactor's are stored together (``zeroir/ir/factors.py``) and are taken apart
here. torch has no Shampoo, whose sums of products therefore have no name to be exported under.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

import torch
from pydantic import JsonValue

from zeroir.checkpoint.manifest import MASTER, StoredGroup
from zeroir.convert.stored_tensors import (
    ParameterInFiles,
    StoredTensors,
    TensorInFiles,
    quantity_of,
)
from zeroir.errors import UserError
from zeroir.ir.algorithms import Algorithm
from zeroir.ir.contents import CODES, EMA, FACTORS, OWN_COORDINATES

STEP: Final = "step"

_OWN_KEYS: Final = frozenset({"params", "param_names", "name"})
"""Keys of our groups that are not settings."""

_NO_STATES: Final = frozenset({MASTER, EMA, *OWN_COORDINATES})
"""Quantities that are not states with the elements of parameters."""

_STATE_OF_CODES: Final = {codes: state for state, codes in CODES.items()}

_COUNTING: Final = (Algorithm.ADAM, Algorithm.ADAMW, Algorithm.ADAFACTOR)
"""torch's optimizers of these names count their steps for each parameter."""

Setting = bool | int | float | str | tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroupInFiles:
    """A group: its parameters in the order of the model, and its settings under the keys of torch's optimizer."""

    algorithm: Algorithm
    parameters: tuple[ParameterInFiles, ...]
    settings: Mapping[str, Setting]

    @property
    def counts_steps(self) -> bool:
        """Whether torch keeps the number of steps of each parameter."""
        return self.algorithm in _COUNTING


def optimizer_groups(stored: StoredTensors) -> list[OptimizerGroupInFiles]:
    """The groups of a checkpoint; none if it was saved without an optimizer.

    Raises:
        UserError: if a group names a parameter that the checkpoint lacks, or an optimizer that zeroir does not know.
    """
    return [_group(stored, group) for group in stored.manifest.groups]


def states(stored: StoredTensors, parameter: ParameterInFiles) -> dict[str, TensorInFiles]:
    """The states of a parameter by torch's names, without the count of steps; those of 8 bits are widened to FP32."""
    tensors: dict[str, TensorInFiles] = {}
    for quantity in parameter.flat.quantities:
        state = _STATE_OF_CODES.get(quantity.name)
        widened = None if state is None else stored.widened(parameter, state)
        if quantity.name == FACTORS:
            tensors |= _factors(stored, parameter)
        elif state is not None and widened is not None:
            tensors[state] = widened
        elif quantity.name not in _NO_STATES:
            tensors[quantity.name] = stored.elements(
                quantity, parameter.slot.offset, parameter.slot.shape, parameter.name
            )
    return tensors


def notes_on_states(stored: StoredTensors, groups: list[OptimizerGroupInFiles]) -> list[str]:
    """Sentences on states that cannot be exported, or not as they are."""
    notes = []
    if any(group.algorithm is Algorithm.SHAMPOO for group in groups):
        notes.append(
            "The states of Shampoo were left out: torch has no optimizer that could load them."
        )
    return notes + notes_on_codes(stored)


def notes_on_codes(stored: StoredTensors) -> list[str]:
    """One sentence where states have 8 bits."""
    if any(q.name in _STATE_OF_CODES for flat in stored.manifest.flats for q in flat.quantities):
        return ["The optimizer's states of 8 bits were written as FP32."]
    return []


def _group(stored: StoredTensors, group: StoredGroup) -> OptimizerGroupInFiles:
    if group.algorithm not in set(Algorithm):
        raise UserError(
            f"'{stored.path}' has an optimizer '{group.algorithm}', which this version of zeroir does not know: "
            "use a newer version, or --format hf or state-dict for the weights alone."
        )
    algorithm = Algorithm(group.algorithm)
    members = set(group.parameters)
    unknown = sorted(members - stored.parameter_by_name.keys())
    if unknown:
        raise UserError(
            f"'{stored.path}' is damaged: its group {group.name} has a parameter {unknown[0]} that it lacks."
        )
    settings = {
        key: _setting(value) for key, value in group.settings.items() if key not in _OWN_KEYS
    }
    return OptimizerGroupInFiles(
        algorithm=algorithm,
        parameters=tuple(
            parameter for parameter in stored.parameters if not members.isdisjoint(parameter.names)
        ),
        settings={**_torch_defaults(algorithm), **settings},
    )


def _setting(value: JsonValue) -> Setting:
    """A setting as torch has it: JSON's lists are tuples."""
    if isinstance(value, list):
        return tuple(float(item) if isinstance(item, int | float) else 0.0 for item in value)
    if isinstance(value, dict):
        return None
    return value


@cache
def _torch_defaults(algorithm: Algorithm) -> Mapping[str, Setting]:
    """All settings of torch's optimizer with their defaults, so that it finds each one; none where torch has none."""
    parameter = torch.empty((1, 1), device="meta", requires_grad=True)
    match algorithm:
        case Algorithm.SGD | Algorithm.MOMENTUM:
            return torch.optim.SGD([parameter], lr=1e-3).defaults
        case Algorithm.ADAM:
            return torch.optim.Adam([parameter]).defaults
        case Algorithm.ADAMW:
            return torch.optim.AdamW([parameter]).defaults
        case Algorithm.MUON:
            return torch.optim.Muon([parameter]).defaults
        case Algorithm.ADAFACTOR:
            return torch.optim.Adafactor([parameter]).defaults
        case Algorithm.LION | Algorithm.SHAMPOO:
            return {}


def _factors(stored: StoredTensors, parameter: ParameterInFiles) -> dict[str, TensorInFiles]:
    """Adafactor's moments of a parameter: of its rows and columns, or of its elements where it is no matrix."""
    quantity = quantity_of(parameter.flat, FACTORS)
    if quantity is None:
        return {}
    offset = 0
    for slot in parameter.flat.parameters:
        parts = _factor_shapes(slot.shape)
        if slot is not parameter.slot:
            offset += sum(prod(shape) for shape in parts.values())
            continue
        tensors = {}
        for name, shape in parts.items():
            tensors[name] = stored.elements(quantity, offset, shape, parameter.name)
            offset += prod(shape)
        return tensors
    return {}


def _factor_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The moments that torch.optim.Adafactor keeps of a parameter, in the order in which they are stored."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
