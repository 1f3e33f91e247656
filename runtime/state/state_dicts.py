"""State dictionaries of torch: full tensors by the names of the user's module, and those of an optimizer by parameter.

``module_state`` corresponds to ``nn.Module.state_dict``, ``optimizer_state`` to
``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with ``full_state_dict`` and ``cpu_offload``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.contents import EMA, MASTER, PARAM, FlatContent
from zeroir.ir.optimizers.catalogue import OWN_STATES, OWN_STATES_OF_TORCH
from zeroir.ir.optimizers.forms import ABSMAX, QUANTITIES_OF_BLOCKS, state_of
from zeroir.ir.own_coordinates import PlacedPart, placed_parts
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint.model_facts import ModelFacts
from zeroir.runtime.checkpoint.parts import elements_on, state_quantities
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.eight_bit.rounding import widened
from zeroir.runtime.engine.live_optimizer import LiveOptimizer
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.runtime.state.carried_values import buffers_of_counts
from zeroir.runtime.state.full_parameters import whole_parameters
from zeroir.runtime.state.state import full_flat
from zeroir.runtime.state.waiting_states import WaitingStates

_NO_SETTINGS: Final = frozenset({"params", "param_names", "name"})
_NO_STATES: Final = (OWN_STATES.keys() - OWN_STATES_OF_TORCH) | {*QUANTITIES_OF_BLOCKS}
"""Quantities that no optimizer of torch has on their own."""


def module_state(
    program: Program,
    memory: RankMemory,
    comm: Comm,
    facts: ModelFacts,
    others: Mapping[str, Tensor],
    waiting: WaitingStates | None = None,
    *,
    is_kept: bool,
    only_trained: bool = False,
) -> dict[str, Tensor]:
    """Return parameters (FP32 where the program has master weights) and persistent buffers, copied to the CPU.

    ``others`` are the tensors of the module that the program does not hold. Names are in the module's order, where it
    is known. All ranks call this together; without ``is_kept`` this rank takes part, and its result is empty. With
    ``only_trained`` frozen parameters are neither gathered nor returned.
    """
    names = None
    if only_trained:
        names = {slot.name for flat in program.flats if flat.is_trainable for slot in flat.slots}
    values: dict[str, Tensor] = {}
    for slot, (whole,) in whole_parameters(
        program, [memory], comm, names, masters=True, waiting=waiting
    ):
        if is_kept:
            values |= dict.fromkeys((slot.name, *slot.aliases), whole.cpu())
    if not is_kept:
        return {}
    for binding in program.module_buffers:
        if binding.data is None:
            tensor = memory.buffer(binding.buffer).detach().to("cpu", copy=True)
            own_names = (binding.name, *facts.aliases(binding.name))
            values |= dict.fromkeys(own_names, tensor.view(binding.shape))
    for name, tensor in others.items():
        copy = tensor.detach().to("cpu", copy=True)
        values |= dict.fromkeys((name, *facts.aliases(name)), copy)
    if facts.saved is None:
        return values
    return {
        name: values[name] for name in facts.saved if name in values and name not in facts.apart
    }


def load_module_state(
    program: Program,
    memory: RankMemory,
    values: Mapping[str, Tensor],
    facts: ModelFacts,
    others: Mapping[str, Tensor],
    *,
    is_strict: bool,
    has_averages: bool,
) -> tuple[list[str], list[str]]:
    """Set parameters, master weights and buffers of a rank to the values of a state dictionary.

    Moving averages are set as well, unless ``has_averages``. Nothing changes where an error is raised. The dictionary
    may lack names.

    Returns:
        The names of the module that the dictionary lacks, and those that the module lacks.

    Raises:
        UserError: where a tensor has another shape; with ``is_strict`` where names are missing or unknown.
    """
    shapes = {name: slot.shape for name, (_, slot) in program.parameter_by_name.items()}
    for binding in program.module_buffers:
        if binding.data is None:
            shapes |= dict.fromkeys((binding.name, *facts.aliases(binding.name)), binding.shape)
    for name, tensor in others.items():
        shapes |= dict.fromkeys((name, *facts.aliases(name)), tuple(tensor.shape))
    for name, tensor in values.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise UserError(
                f"The state's '{name}' has the shape {list(tensor.shape)}, but {list(shapes[name])} in the program: "
                "load the state of this model."
            )
    needed = [name for name in shapes if facts.is_of_model(name)]
    missing = [name for name in needed if name not in values]
    unknown = [name for name in values if name not in shapes]
    if is_strict and (missing or unknown):
        name = (missing or unknown)[0]
        near = get_close_matches(name, list(values) if missing else list(shapes), n=3)
        hint = f" (names like it are {', '.join(near)})" if near else ""
        problem = "lacks" if missing else "has"
        more = "" if missing else ", which the model lacks"
        raise UserError(
            f"The state {problem} '{name}'{more}{hint}: load the state of this model, or pass strict=False."
        )
    quantities = (PARAM, MASTER) if has_averages else (PARAM, MASTER, EMA)
    with torch.no_grad():
        for buffer in program.buffers:
            content = buffer.holds
            if not isinstance(content, FlatContent) or content.quantity not in quantities:
                continue
            held = elements_on(program, buffer, content, memory.rank)
            for slot in program.flat_by_name[content.flat].slots:
                value = _first(values, (slot.name, *slot.aliases))
                elements = common(held, range(slot.offset, slot.offset + slot.numel))
                if value is not None and elements:
                    own = value.detach().reshape(-1)
                    own = own[elements.start - slot.offset : elements.stop - slot.offset]
                    memory.write(buffer.name, elements.start - held.start, own)
        for binding in program.module_buffers:
            value = _first(values, (binding.name, *facts.aliases(binding.name)))
            if binding.data is None and value is not None:
                memory.buffer(binding.buffer).copy_(value.detach().reshape(-1))
        for name, tensor in others.items():
            value = _first(values, (name, *facts.aliases(name)))
            if value is not None:
                tensor.copy_(value.detach())
    return missing, unknown


def optimizer_state(
    program: Program, memory: RankMemory, comm: Comm, optimizer: LiveOptimizer, *, is_kept: bool
) -> dict[str, dict[str, object] | list[dict[str, object]]]:
    """Return the optimizer's states by parameter, unsharded, copied to the CPU, and the settings of its groups.

    Names of states are those of torch's optimizers; states that torch does not know are omitted, and those of 8 bits
    are widened to FP32. All ranks call this together; without ``is_kept`` this rank takes part, and its result is
    empty.
    """
    states: dict[str, dict[str, object]] = {}
    for flat in program.flats:
        for quantity in sorted(state_quantities(program)[flat.name] - _NO_STATES):
            whole = full_flat(program, [memory], comm, flat, quantity)
            name = state_of(quantity)
            is_coded = name != quantity
            scales = full_flat(program, [memory], comm, flat, ABSMAX[name]) if is_coded else None
            if not is_kept or whole is None:
                continue
            values = whole[0].cpu()
            if scales is not None:
                values = widened(name, values, scales[0].cpu())
            if quantity in OWN_STATES:
                shapes = (slot.shape for slot in flat.slots)
                for slot, parts in zip(flat.slots, placed_parts(quantity, shapes), strict=True):
                    own_parts = {part.name: _part(part, values) for part in parts}
                    states.setdefault(slot.name, {}).update(own_parts)
                continue
            for slot in flat.slots:
                own = values[slot.offset : slot.offset + slot.numel].clone().view(slot.shape)
                states.setdefault(slot.name, {})[name] = own
    if not is_kept:
        return {}
    groups: list[dict[str, object]] = []
    counts = buffers_of_counts(program)
    steps = {
        slot.name: memory.buffer(counts[flat.name])[0].cpu()
        for flat in program.flats
        if flat.name in counts
        for slot in flat.slots
    }
    for group, algorithm in zip(optimizer.param_groups, optimizer.algorithms, strict=True):
        names = list(group["param_names"])
        settings = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        groups.append({**settings, "params": names})
        of_torch = algorithm.declaration.torch
        if of_torch is not None and of_torch.counts_steps:
            for name in names:
                states.setdefault(name, {})["step"] = steps[name].clone()
    return {"state": dict(states), "param_groups": groups}


def _part(part: PlacedPart, values: Tensor) -> Tensor:
    """Return a copy of one parameter's tensor of state, out of that of the whole flat."""
    return values[part.offset : part.stop].clone().view(part.shape)


def _first(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensor | None:
    return next((values[name] for name in names if name in values), None)
