"""Whether a program can load a checkpoint: parameters, buffers and optimizers must match, however they are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from zeroir.checkpoint.manifest import MASTER as TRAINED
from zeroir.checkpoint.manifest import StoredBuffer
from zeroir.errors import UserError
from zeroir.ir.analysis.effects import effects
from zeroir.ir.contents import EMA
from zeroir.ir.optimizers.forms import state_of
from zeroir.ir.program import ModuleBufferBinding, Program, Slot
from zeroir.ir.reports import Quantity
from zeroir.runtime.checkpoint.mapping import StoredParameters
from zeroir.runtime.checkpoint.parts import saved_quantities, state_quantities

_LARGEST_F32 = 3.4028234663852886e38

_OTHER_MODEL = "load the checkpoint of this model, or compile the model that it was saved from"


def require_loadable(
    program: Program, stored: StoredParameters, *, weights_only: bool, has_values: bool
) -> list[str]:
    """Check that the checkpoint has what the program needs; return sentences on what starts over.

    With ``has_values`` the model's buffers already have values, and those that no op changes may keep them.

    Raises:
        UserError: naming the parameter, buffer or optimizer that does not match.
    """
    _require_parameters(program, stored)
    notes = list(_check_buffers(program, stored, has_values=has_values))
    if weights_only:
        return notes
    _require_counters(program, stored)
    if not stored.manifest.groups and any(state_quantities(program).values()):
        missing = [
            slot.name
            for flat in program.flats
            if flat.is_trainable
            for slot in flat.slots
            for quantity in state_quantities(program)[flat.name]
            if slot.numel and not stored.has(slot, quantity)
        ]
        if missing:
            notes.append("has weights alone: the optimizer begins anew")
    else:
        _require_algorithms(program, stored)
        notes += _check_states(program, stored)
        step = program.report_of.get(Quantity.STEP)
        is_counted = step is not None and step.buffer in program.counters
        if (
            step is not None
            and is_counted
            and step.buffer not in {s.name for s in stored.manifest.scalars}
        ):
            notes.append("has no count of the optimizer's steps: it begins with 0")
    own_counts = program.counts_of_steps
    names = [scalar.name for scalar in stored.manifest.scalars]
    if any(n.startswith(f"{own_counts[0]}.") and n not in own_counts for n in names if own_counts):
        notes.append(
            "counts the steps of parameters that were frozen for some steps apart: they get the count of all steps"
        )
    averaged = {flat.name for flat, quantity, _ in saved_quantities(program) if quantity == EMA}
    has_averages = any(EMA in stored.quantities(flat) for flat in stored.manifest.flats)
    if averaged and not has_averages:
        notes.append("has no moving averages: they begin with the weights")
    if has_averages and not averaged:
        notes.append(
            "has moving averages, which the program leaves out (it was compiled without --ema)"
        )
    return notes


def stored_buffer(
    stored: StoredParameters, binding: ModuleBufferBinding, rank: int
) -> StoredBuffer | None:
    """Return the checkpoint's tensor for a module buffer on a rank; None where there is none.

    Where more ranks load than saved, the ranks that saved are reused in turn. A checkpoint from a library that does not
    distinguish parameters from buffers may list the buffer among its parameters.
    """
    saver = rank % stored.manifest.origin.world_size
    return next(
        (
            buffer
            for buffer in stored.manifest.buffers
            if binding.name in (buffer.name, *buffer.aliases) and saver in buffer.ranks
        ),
        stored.as_buffer(binding.name),
    )


def _require_parameters(program: Program, stored: StoredParameters) -> None:
    for flat in program.flats:
        for slot in flat.slots:
            _require_parameter(slot, stored)
    known = {*program.parameter_by_name, *(binding.name for binding in program.module_buffers)}
    for saved in stored.manifest.flats:
        for parameter in saved.parameters:
            if known.isdisjoint((parameter.name, *parameter.aliases)):
                raise UserError(
                    f"'{stored.path}' has a parameter '{parameter.name}', which the program lacks: {_OTHER_MODEL}."
                )


def _require_counters(program: Program, stored: StoredParameters) -> None:
    """Reject counters that no training produces: below 0 or not finite, and a loss scale that is not above 0."""
    scalars = {scalar.name: scalar.values for scalar in stored.manifest.scalars}
    scale = program.report_of.get(Quantity.LOSS_SCALE)
    for name in program.counters:
        values = scalars.get(name)
        if values is None:
            continue
        is_scale = scale is not None and scale.buffer == name
        is_valid = all(0 <= value <= _LARGEST_F32 for value in values)
        if (
            len(values) != program.buffer_by_name[name].numel
            or not is_valid
            or (is_scale and values[0] == 0)
        ):
            raise UserError(
                f"'{stored.path}' has the values {list(values)} of the scalar '{name}', which no training has: use "
                "another checkpoint."
            )


def _require_parameter(slot: Slot, stored: StoredParameters) -> None:
    home = stored.home(slot)
    if home is None:
        near = get_close_matches(slot.name, list(stored.names), n=3)
        names = f" (names like it are {', '.join(near)})" if near else ""
        raise UserError(
            f"'{stored.path}' has no parameter '{slot.name}'{names}, which the program has: {_OTHER_MODEL}."
        )
    flat, index = home
    shape = flat.parameters[index].shape
    if shape != slot.shape:
        raise UserError(
            f"'{slot.name}' has the shape {list(shape)} in '{stored.path}', but {list(slot.shape)} in the program: "
            f"{_OTHER_MODEL}."
        )
    for quantity in flat.quantities:
        if quantity.name in stored.quantities(flat):
            stored.dtype(quantity.dtype, f"{quantity.name} of '{slot.name}'")
    if slot.numel and TRAINED not in stored.quantities(flat):
        raise UserError(
            f"'{stored.path}' has no values of the parameter '{slot.name}': use another checkpoint."
        )


def _require_algorithms(program: Program, stored: StoredParameters) -> None:
    """Reject a parameter that another optimizer updated."""
    algorithms = {
        name: group.algorithm for group in stored.manifest.groups for name in group.parameters
    }
    for name, algorithm in _algorithms(program).items():
        slot = program.parameter_by_name[name][1]
        saved = next((algorithms[n] for n in (slot.name, *slot.aliases) if n in algorithms), "")
        if saved and saved != algorithm:
            raise _another_optimizer(stored, name, saved, algorithm)


def _check_states(program: Program, stored: StoredParameters) -> Iterator[str]:
    """Reject states that do not match; yield sentences on states of another width and on parameters once frozen."""
    algorithms = _algorithms(program)
    states = state_quantities(program)
    thawed: list[str] = []
    rounded: list[str] = []
    widened: list[str] = []
    for flat in program.flats:
        for slot in flat.slots if flat.is_trainable else ():
            home = stored.home(slot)
            if home is None or not slot.numel:
                continue
            if not home[0].is_trainable:
                thawed.append(slot.name)
                continue
            saved = stored.quantities(home[0]) - {TRAINED, EMA}
            own = states[flat.name]
            if saved != own and _states_of(saved) == _states_of(own):
                (widened if len(saved) > len(own) else rounded).append(slot.name)
            elif saved != own:
                raise _another_optimizer(
                    stored,
                    slot.name,
                    f"an optimizer with {_listed(saved)}",
                    f"{algorithms.get(slot.name, 'one')} with {_listed(states[flat.name])}",
                )
    if rounded:
        yield f"has states of 32 bits of '{rounded[0]}': they are rounded to 8 bits"
    if widened:
        yield f"has states of 8 bits of '{widened[0]}': they are widened to 32 bits"
    if thawed:
        yield f"was saved with '{thawed[0]}' frozen: its optimizer state begins anew"


def _states_of(quantities: frozenset[str]) -> frozenset[str]:
    """Return the names of the states, whatever their form (FP32, or codes and scales)."""
    return frozenset(map(state_of, quantities))


def _algorithms(program: Program) -> Mapping[str, str]:
    """Return the algorithm of each trained parameter, by its name, for programs with optimizer groups."""
    algorithms: dict[str, str] = {}
    for group in program.groups:
        for name, start, stop in group.intervals:
            for slot in program.flat_by_name[name].slots:
                if start <= slot.offset < stop:
                    algorithms[slot.name] = group.algorithm.value
    return algorithms


def _another_optimizer(stored: StoredParameters, name: str, saved: str, own: str) -> UserError:
    return UserError(
        f"'{stored.path}' was saved while '{name}' was trained by {saved}, and the program trains it by {own}: compile "
        "the program with the optimizer of the checkpoint, or load the weights alone (weights_only=True)."
    )


def _listed(states: frozenset[str]) -> str:
    return " and ".join(sorted(states)) or "no state"


def _check_buffers(
    program: Program, stored: StoredParameters, *, has_values: bool
) -> Iterator[str]:
    changed = {region.buffer for op in program.ops() for region in effects(op).writes}
    for binding in program.module_buffers:
        buffer = program.buffer_by_name[binding.buffer]
        if binding.data is not None or not buffer.numel:
            continue
        saved = stored_buffer(stored, binding, 0)
        if saved is not None and saved.shape == binding.shape:
            stored.dtype(saved.dtype, f"the buffer '{saved.name}'")
            continue
        problem = f"has no buffer '{binding.name}'"
        if saved is not None:
            problem = (
                f"has the buffer '{binding.name}' in the shape {list(saved.shape)} instead of "
                f"{list(binding.shape)}"
            )
        if binding.buffer in changed or not has_values:
            raise UserError(f"'{stored.path}' {problem}, which the program has: {_OTHER_MODEL}.")
        yield f"{problem}: it keeps the value that the model gave it"
