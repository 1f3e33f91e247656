"""The values that a program takes over from one with other flats, parameter by parameter.

Which parameters are trained decides in which flat each lies, and whether it has optimizer states. Those of a parameter
that the next program does not train wait in host memory, a part on each rank, until a program trains it again: torch's
optimizers keep the states of parameters without a gradient, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import EMA, MASTER, PARAM, PASSING, FlatContent
from zeroir.ir.own_coordinates import extents
from zeroir.ir.program import Flat, Program, Slot
from zeroir.runtime.checkpoint.parts import elements_on
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.runtime.state.state import full_flat
from zeroir.runtime.state.waiting_states import Key, WaitingStates, own_part, whole_values
from zeroir.torch_ops.types import TORCH_DTYPE

_INSTEAD: Final[Mapping[str, tuple[str, ...]]] = {
    PARAM: (MASTER,),
    MASTER: (PARAM,),
    EMA: (MASTER, PARAM),
}
"""The quantities whose values a quantity gets where it has none of its own; any other is zero then."""


_SEVERAL: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedValues:
    """The contents of buffers of the following program on this rank, and the names of its buffers that begin as zeros.

    ``scalars`` are its counts of steps. ``frozen`` are the parameters that it trains no longer, ``resumed`` those that
    it trains again with the states that they had, and ``begun`` those whose states begin anew.
    """

    buffers: Mapping[str, Tensor]
    cleared: tuple[str, ...]
    scalars: Mapping[str, float]
    frozen: tuple[str, ...]
    resumed: tuple[str, ...]
    begun: tuple[str, ...]


def carried_values(
    present: Program,
    following: Program,
    memory: RankMemory,
    comm: Comm,
    waiting: WaitingStates,
) -> CarriedValues:
    """Return what the following program's buffers get where it has other flats; all ranks call this together.

    ``waiting`` loses the states of parameters that the following program trains, and gets those of the parameters that
    only the present one trains. One flat at a time is gathered.

    Raises:
        UserError: where the following program counts the steps of parameters together that were not trained together.
    """
    counts = counts_of_steps(present, memory, waiting)
    scalars = _following_counts(following, counts)
    wanted, buffers, cleared = _wanted(present, following, memory.rank)
    homes = {slot.name: flat for flat in present.flats for slot in flat.slots}
    quantities = {flat.name: _quantities(present, flat) for flat in present.flats}
    trained = _trained(following)
    readers: dict[Key, list[_OwnedElements]] = {}
    begun, resumed = set[str](), set[str]()
    for (name, quantity), pieces in wanted.items():
        source = (name, quantity)
        own = quantities[homes[name].name]
        if quantity in own:
            readers.setdefault(source, []).extend(pieces)
        elif source in waiting.values:
            _fill(pieces, whole_values(present, memory, comm, waiting.values[source]))
            resumed.add(name)
        else:
            if quantity not in _INSTEAD:
                begun.add(name)
            instead = next((each for each in _INSTEAD.get(quantity, ()) if each in own), None)
            if instead is not None:
                readers.setdefault((name, instead), []).extend(pieces)
    kept = {
        (slot.name, quantity)
        for flat in present.flats
        if flat.is_trainable
        for slot in flat.slots
        if slot.name not in trained
        for quantity in quantities[flat.name] - {PARAM}
    }
    waiting.values = {key: each for key, each in waiting.values.items() if key[0] not in trained}
    for flat in present.flats:
        for quantity in sorted(quantities[flat.name]):
            keys = {(slot.name, quantity) for slot in flat.slots}
            if keys.isdisjoint(readers) and keys.isdisjoint(kept):
                continue
            copies = full_flat(present, [memory], comm, flat, quantity)
            assert copies is not None
            for extent in extents(quantity, flat):
                key = extent.slot.name, quantity
                values = copies[0][extent.offset : extent.offset + extent.numel]
                _fill(readers.get(key, ()), values)
                if key in kept:
                    waiting.values[key] = own_part(present, memory.rank, values)
    was_trained = _trained(present)
    waiting.counts = {
        name: count for name, count in counts.of_parameter.items() if name not in trained and count
    }
    return CarriedValues(
        scalars=scalars,
        buffers=buffers,
        cleared=cleared,
        frozen=tuple(name for name in was_trained if name not in trained),
        resumed=tuple(name for name in trained if name in resumed - begun),
        begun=tuple(
            name for name in trained if name not in was_trained and name not in resumed - begun
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnedElements:
    """Elements of a quantity of a parameter, from ``start`` on, in a buffer of this rank."""

    start: int
    target: Tensor


def _wanted(
    present: Program, following: Program, rank: int
) -> tuple[dict[Key, list[_OwnedElements]], dict[str, Tensor], tuple[str, ...]]:
    """Return the places of parameters' quantities in new buffers, these buffers, and those that begin as zeros."""
    wanted: dict[Key, list[_OwnedElements]] = {}
    buffers: dict[str, Tensor] = {}
    cleared: list[str] = []
    for buffer, content in _persistent(following):
        if _is_same(present, following, buffer, content):
            continue
        if content.quantity in PASSING:
            cleared.append(buffer.name)
            continue
        values = torch.zeros(buffer.numel, dtype=TORCH_DTYPE[buffer.dtype])
        buffers[buffer.name] = values
        held = elements_on(following, buffer, content, rank)
        for extent in extents(content.quantity, following.flat_by_name[content.flat]):
            own = common(held, range(extent.offset, extent.offset + extent.numel))
            if own:
                target = values[own.start - held.start : own.stop - held.start]
                piece = _OwnedElements(start=own.start - extent.offset, target=target)
                wanted.setdefault((extent.slot.name, content.quantity), []).append(piece)
            else:
                wanted.setdefault((extent.slot.name, content.quantity), [])
    return wanted, buffers, tuple(cleared)


def _is_same(present: Program, following: Program, buffer: Buffer, content: FlatContent) -> bool:
    """Return whether the present program has the same elements of the same parameters in a buffer of the same name."""
    own = present.buffer_by_name.get(buffer.name)
    if own is None or (own.space, own.dtype, own.numel) != (
        buffer.space,
        buffer.dtype,
        buffer.numel,
    ):
        return False
    flats = (program.flat_by_name.get(content.flat) for program in (present, following))
    return own.is_persistent and own.holds == content and len(set(flats)) == 1


def _persistent(program: Program) -> Iterator[tuple[Buffer, FlatContent]]:
    for buffer in program.buffers:
        if buffer.is_persistent and isinstance(buffer.holds, FlatContent):
            yield buffer, buffer.holds


def _quantities(program: Program, flat: Flat) -> frozenset[str]:
    return frozenset(
        content.quantity
        for _, content in _persistent(program)
        if content.flat == flat.name and content.quantity not in PASSING
    )


def _trained(program: Program) -> dict[str, Slot]:
    return {slot.name: slot for flat in program.flats if flat.is_trainable for slot in flat.slots}


def _fill(pieces: Iterable[_OwnedElements], values: Tensor) -> None:
    for piece in pieces:
        piece.target.copy_(values[piece.start : piece.start + piece.target.numel()])


# ----------------------------------------------------------------------------------------------------- counts of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsOfSteps:
    """The number of updates so far, and the number of those in which each parameter was trained."""

    of_all: float
    of_parameter: Mapping[str, float]


def counts_of_steps(program: Program, memory: RankMemory, waiting: WaitingStates) -> CountsOfSteps:
    """Return the present counts; this waits for the device."""
    values = {name: float(memory.buffer(name)[0]) for name in program.counts_of_steps}
    of_flat = buffers_of_counts(program)
    return CountsOfSteps(
        of_all=next(iter(values.values()), 0.0),
        of_parameter={
            slot.name: values[of_flat[flat.name]]
            if flat.is_trainable and values
            else waiting.counts.get(slot.name, 0.0)
            for flat in program.flats
            for slot in flat.slots
        },
    )


def _following_counts(program: Program, counts: CountsOfSteps) -> dict[str, float]:
    """Return the values of a program's counts of steps."""
    values = dict.fromkeys(program.counts_of_steps[:1], counts.of_all)
    of_flat = buffers_of_counts(program)
    for flat in program.flats:
        for slot in flat.slots if flat.is_trainable and values else ():
            count = counts.of_parameter[slot.name]
            if values.setdefault(of_flat[flat.name], count) != count:
                raise UserError(
                    f"'{slot.name}' was trained in {count:.0f} of {counts.of_all:.0f} steps, and the program to go on "
                    "with counts the steps of all parameters alike: let the engine compile it (compile_again=True)."
                )
    return values


def buffers_of_counts(program: Program) -> dict[str, str]:
    """Return the buffer of the count of steps of each trained flat."""
    names = program.counts_of_steps
    if len(names) < _SEVERAL:
        return {flat.name: name for name in names for flat in program.flats if flat.is_trainable}
    found: dict[str, str] = {}
    for op in program.ops():
        if not isinstance(op, ops.OptimizerStep):
            continue
        param, step = program.at_rest(op.param), program.at_rest(op.step)
        content = None if param is None else program.buffer_by_name[param.buffer].holds
        if isinstance(content, FlatContent) and step is not None:
            found[content.flat] = step.buffer
    return found
