"""The states and settings of a checkpoint's optimizer under the names of torch's optimizers, by parameter.

Our states already have torch's names. The states of whole parameters are stored together
(``zeroir/ir/own_coordinates.py``), and are split here if torch has the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from zeroir.checkpoint.manifest import MASTER, Setting, StoredGroup, StoredQuantity
from zeroir.convert.stored_tensors import (
    ParameterInFiles,
    StoredTensors,
    TensorInFiles,
)
from zeroir.errors import UserError
from zeroir.ir.contents import EMA
from zeroir.ir.optimizers.catalogue import OWN_STATES_OF_TORCH, Algorithm
from zeroir.ir.optimizers.forms import StateForm, form_of, state_of
from zeroir.ir.own_coordinates import OWN_COORDINATES, placed_parts

STEP: Final = "step"

_NO_STATES: Final = frozenset({MASTER, EMA, *OWN_COORDINATES})
"""Quantities that are not elementwise states of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroupInFiles:
    """A group: its parameters in the order of the model, and its settings under the keys of torch's optimizer."""

    algorithm: Algorithm
    parameters: tuple[ParameterInFiles, ...]
    settings: Mapping[str, Setting]

    @property
    def counts_steps(self) -> bool:
        """Whether torch keeps the number of steps of each parameter."""
        of_torch = self.algorithm.declaration.torch
        return of_torch is not None and of_torch.counts_steps


def optimizer_groups(stored: StoredTensors) -> list[OptimizerGroupInFiles]:
    """Return the groups of a checkpoint; none if it was saved without an optimizer.

    Raises:
        UserError: if a group names a parameter that the checkpoint lacks, or an optimizer that zeroir does not know.
    """
    return [_group(stored, group) for group in stored.manifest.groups]


def states(stored: StoredTensors, parameter: ParameterInFiles) -> dict[str, TensorInFiles]:
    """Return the states of a parameter by torch's names, without the step count; 8-bit states are converted to FP32."""
    tensors: dict[str, TensorInFiles] = {}
    for quantity in parameter.flat.quantities:
        state = state_of(quantity.name)
        if quantity.name in OWN_STATES_OF_TORCH:
            tensors |= _parts(stored, parameter, quantity)
        elif form_of(quantity.name) is not StateForm.FP32:
            widened = stored.widened(parameter, state)
            if widened is not None:
                tensors[state] = widened
        elif quantity.name not in _NO_STATES:
            tensors[quantity.name] = stored.elements(
                quantity, parameter.slot.offset, parameter.slot.shape, parameter.name
            )
    return tensors


def notes_on_states(stored: StoredTensors, groups: list[OptimizerGroupInFiles]) -> list[str]:
    """Return notes on states that cannot be exported, or not unchanged."""
    left_out = {
        group.algorithm.declaration.title: None
        for group in groups
        if (own := group.algorithm.declaration.own_state) is not None
        and own.quantity not in OWN_STATES_OF_TORCH
    }
    notes = [
        f"The states of {title} were left out: torch has no optimizer that could load them."
        for title in left_out
    ]
    return notes + notes_on_codes(stored)


def notes_on_codes(stored: StoredTensors) -> list[str]:
    """Return a note if states have 8 bits."""
    quantities = (q.name for flat in stored.manifest.flats for q in flat.quantities)
    if any(form_of(quantity) is not StateForm.FP32 for quantity in quantities):
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
    return OptimizerGroupInFiles(
        algorithm=algorithm,
        parameters=tuple(
            parameter for parameter in stored.parameters if not members.isdisjoint(parameter.names)
        ),
        settings={**_torch_defaults(algorithm), **group.settings},
    )


@cache
def _torch_defaults(algorithm: Algorithm) -> Mapping[str, Setting]:
    """Return all settings of torch's optimizer with their defaults, which it requires; none if torch lacks it."""
    of_torch = algorithm.declaration.torch
    if of_torch is None:
        return {}
    make: Callable[[list[Tensor]], torch.optim.Optimizer] = getattr(
        torch.optim, of_torch.class_name
    )
    return make([torch.empty((1, 1), device="meta", requires_grad=True)]).defaults


def _parts(
    stored: StoredTensors, parameter: ParameterInFiles, quantity: StoredQuantity
) -> dict[str, TensorInFiles]:
    """Return a parameter's tensors in a quantity that stores those of its whole flat together."""
    slots = parameter.flat.parameters
    placed = zip(slots, placed_parts(quantity.name, (slot.shape for slot in slots)), strict=True)
    return {
        part.name: stored.elements(quantity, part.offset, part.shape, parameter.name)
        for slot, parts in placed
        if slot is parameter.slot
        for part in parts
    }
