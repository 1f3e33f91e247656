"""New values of the parameters of a frozen module between two steps: given ones, or those of another module.

Each rank changes the elements that it holds. Those of the other module are read from this rank where every rank holds
what it needs, as where both modules have the same parameters in their units. Otherwise they are gathered, flat by flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.contents import EMA, MASTER, PARAM
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Flat, Program, Slot
from zeroir.runtime.checkpoint.parts import elements_on
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.runtime.state.full_parameters import flat_buffers, require_averages, whole_parameters
from zeroir.runtime.state.waiting_states import WaitingStates
from zeroir.torch_ops.types import IR_DTYPE

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModule:
    """The parameters of a frozen module, by their names in it."""

    name: str
    parameters: Mapping[str, tuple[Flat, Slot]]


def frozen_module(program: Program, name: str) -> FrozenModule:
    """Return the frozen module of this name.

    Raises:
        UserError: if the program has no parameters of such a module, or trains one of them.
    """
    parameters = _inside(name, program.parameter_by_name)
    if not parameters or not name:
        modules = {
            each.rpartition(".")[0]
            for each, (flat, _) in program.parameter_by_name.items()
            if not flat.is_trainable
        }
        outer = {".".join(each.split(".")[:n]) for each in modules for n in range(1, 9)} - {""}
        near = get_close_matches(name, sorted(outer), n=3) or sorted(outer, key=len)[:3]
        raise UserError(
            f"The program has no frozen module '{name}'; names like it are {', '.join(near) or 'none'}. Modules "
            "outside the model are there if compile(frozen=...) names them."
        )
    trained = next((key for key, (flat, _) in parameters.items() if flat.is_trainable), None)
    if trained is not None:
        raise UserError(
            f"'{name}.{trained}' is trained, and update_frozen changes frozen parameters alone: freeze it with "
            "requires_grad_(False), or load values with engine.load_state_dict."
        )
    return FrozenModule(name=name, parameters=parameters)


def other_tensors(
    program: Program, memory: RankMemory, others: Mapping[str, Tensor], name: str
) -> Mapping[str, Tensor]:
    """Return the buffers of a module by their names in it, with what the program does not hold of the ``others``."""
    held = {
        each.name: memory.buffer(each.buffer).view(each.shape)
        for each in program.module_buffers
        if each.data is None
    }
    return _inside(name, {**others, **held})


def _inside(name: str, values: Mapping[str, T]) -> dict[str, T]:
    prefix = f"{name}." if name else ""
    return {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
    }


def set_values(
    program: Program,
    memory: RankMemory,
    others: Mapping[str, Tensor],
    target: FrozenModule,
    values: Mapping[str, Tensor],
) -> None:
    """Set the parameters of a frozen module, and those of its buffers that ``values`` has; nothing if that is wrong.

    Raises:
        UserError: where a parameter is missing, a name is unknown or a tensor has another shape.
    """
    shapes = {name: slot.shape for name, (_, slot) in target.parameters.items()}
    tensors = other_tensors(program, memory, others, target.name)
    shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in shapes.items():
        if name not in values and name in target.parameters:
            raise UserError(
                f"The values for '{target.name}' lack '{name}': give those of its state_dict."
            )
        if name in values and tuple(values[name].shape) != shape:
            raise UserError(
                f"The values for '{target.name}' have '{name}' of the shape {list(values[name].shape)}, but it is "
                f"{list(shape)} in the program."
            )
    for name, (flat, _) in target.parameters.items():
        if not _is_convertible(IR_DTYPE.get(values[name].dtype), flat.dtype):
            raise UserError(
                f"The values for '{target.name}' have '{name}' with elements of {values[name].dtype}, but it has "
                f"{flat.dtype} in the program."
            )
    unknown = next((name for name in values if name not in shapes), None)
    if unknown is not None:
        raise UserError(f"The values for '{target.name}' have '{unknown}', which the module lacks.")
    for name, (flat, slot) in target.parameters.items():
        own = values[name].detach().reshape(-1)
        for held in _held(program, memory.rank, flat, slot):
            memory.write(held.buffer, held.start, own[held.elements.start : held.elements.stop])
    for name, tensor in tensors.items():
        if name in values:
            tensor.copy_(values[name].detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Elements of a parameter in a buffer of a rank, from element ``start`` of the buffer on."""

    buffer: str
    start: int
    elements: range


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingValues:
    """How a frozen module gets values of another one on this rank.

    ``local`` pairs elements that it holds with those of the other module on this rank. ``gathered`` has what it holds
    of parameters that follow another one of this name, whose values are gathered. ``narrow`` is the name of a parameter
    that has not at least FP32, if there is one.
    """

    name: str
    local: tuple[tuple[_Held, _Held], ...]
    gathered: Mapping[str, tuple[_Held, ...]]
    narrow: str | None


def following_values(
    program: Program,
    rank: int,
    target: FrozenModule,
    source: str,
    *,
    averages: bool,
    waiting: WaitingStates,
) -> FollowingValues:
    """Return how a frozen module gets the values of the parameters with the same names in the module ``source``.

    They are those that are trained, in FP32 where the program has master weights, or with ``averages`` their moving
    averages.

    Raises:
        UserError: where the other module lacks a parameter, or has one of another shape.
    """
    own = _inside(source, program.parameter_by_name)
    local: list[tuple[_Held, _Held]] = []
    gathered: dict[str, list[_Held]] = {}
    narrow: str | None = None
    for slot_name, name in {
        slot.name: name for name, (_, slot) in target.parameters.items()
    }.items():
        flat, slot = target.parameters[name]
        of_source, other = _counterpart(own, target, name, source)
        if not flat.dtype.is_floating or flat.dtype.itemsize_bytes < torch.float32.itemsize:
            narrow = narrow or slot_name
        quantity = _quantity(program, of_source, averages=averages)
        held = list(_held(program, rank, flat, slot))
        is_waiting = (other.name, MASTER) in waiting.values
        if not is_waiting and _is_local(program, (flat, slot), (of_source, other), quantity):
            local += (
                (each, _part(program, rank, of_source, other, quantity, each)) for each in held
            )
        else:
            gathered.setdefault(other.name, []).extend(held)
    return FollowingValues(
        name=target.name,
        local=tuple(local),
        gathered={name: tuple(held) for name, held in gathered.items()},
        narrow=narrow,
    )


def _counterpart(
    own: Mapping[str, tuple[Flat, Slot]], target: FrozenModule, name: str, source: str
) -> tuple[Flat, Slot]:
    flat, slot = target.parameters[name]
    if name not in own:
        near = get_close_matches(name, own, n=3)
        hint = f" (names like it are {', '.join(near)})" if near else ""
        raise UserError(
            f"'{target.name}.{name}' has no counterpart in {_called(source)}{hint}: update the parts that correspond "
            "one by one, as in update_frozen('teacher.encoder', source='encoder')."
        )
    of_source, other = own[name]
    if other.shape != slot.shape:
        raise UserError(
            f"'{target.name}.{name}' has the shape {list(slot.shape)}, but {list(other.shape)} in {_called(source)}."
        )
    if not _is_convertible(of_source.dtype, flat.dtype):
        raise UserError(
            f"'{target.name}.{name}' has elements of {flat.dtype}, but {of_source.dtype} in {_called(source)}."
        )
    return of_source, other


def _is_convertible(given: DType | None, wanted: DType) -> bool:
    """Return whether values of one dtype may be rounded to another: other codes than floats have another meaning."""
    return given is wanted or (given is not None and given.is_floating and wanted.is_floating)


def follow(
    program: Program,
    memory: RankMemory,
    comm: Comm,
    values: FollowingValues,
    *,
    decay: float,
    averages: bool,
    waiting: WaitingStates,
) -> None:
    """Let a frozen module become ``decay`` parts of itself and the rest of the values, as ``Tensor.lerp`` rounds.

    All ranks call this together.

    Raises:
        UserError: where values of 16 bits are to be averaged, or the program has no ``averages``; nothing has changed.
    """
    if decay and values.narrow is not None:
        raise UserError(
            f"'{values.narrow}' is not in FP32, and an average of it would lose small changes: keep the module in FP32 "
            f"(keep_fp32=['{values.name}']), or compile with ema={decay:g} and copy these averages "
            f"(update_frozen('{values.name}', averages=True))."
        )

    def change(held: _Held, new: Tensor) -> None:
        if decay:
            old = memory.read(held.buffer, held.start, held.start + len(held.elements))
            new = torch.lerp(old, new.to(old.device, old.dtype), 1 - decay)
        memory.write(held.buffer, held.start, new)

    if averages:
        require_averages(program)
    for held, other in values.local:
        change(held, memory.read(other.buffer, other.start, other.start + len(other.elements)))
    if values.gathered:
        for slot, (whole,) in whole_parameters(
            program,
            [memory],
            comm,
            values.gathered.keys(),
            masters=True,
            ema=averages,
            waiting=waiting,
        ):
            flat_values = whole.reshape(-1)
            for held in values.gathered[slot.name]:
                change(held, flat_values[held.elements.start : held.elements.stop])


def _called(source: str) -> str:
    return f"the module '{source}'" if source else "the model"


def paired_buffers(
    program: Program, memory: RankMemory, others: Mapping[str, Tensor], name: str, source: str
) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers of a frozen module, each with that of the same name in the module ``source``.

    Raises:
        UserError: where that module lacks one, or has one of another shape.
    """
    theirs = other_tensors(program, memory, others, source)
    pairs: list[tuple[Tensor, Tensor]] = []
    for key, tensor in other_tensors(program, memory, others, name).items():
        if key not in theirs or theirs[key].shape != tensor.shape:
            raise UserError(
                f"'{name}.{key}' has no counterpart of its shape in {_called(source)}: leave out buffers=True."
            )
        pairs.append((tensor, theirs[key]))
    return pairs


def _quantity(program: Program, flat: Flat, *, averages: bool) -> str:
    wanted = (EMA, MASTER, PARAM) if averages else (MASTER, PARAM)
    return next(each for each in wanted if flat_buffers(program, flat.name, (each,)))


def _held(
    program: Program, rank: int, flat: Flat, slot: Slot, quantity: str = PARAM
) -> Iterator[_Held]:
    """Yield the elements of a parameter that a rank holds, buffer by buffer."""
    for buffer, content in flat_buffers(program, flat.name, (quantity,)):
        held = elements_on(program, buffer, content, rank)
        own = common(held, range(slot.offset, slot.offset + slot.numel))
        if own:
            elements = range(own.start - slot.offset, own.stop - slot.offset)
            yield _Held(buffer=buffer.name, start=own.start - held.start, elements=elements)


def _is_local(
    program: Program, target: tuple[Flat, Slot], source: tuple[Flat, Slot], quantity: str
) -> bool:
    """Return whether every rank holds those elements of a parameter that it needs for another one."""
    for rank in range(program.mesh.world_size):
        there = [each.elements for each in _held(program, rank, *source, quantity)]
        for held in _held(program, rank, *target):
            if all(common(each, held.elements) != held.elements for each in there):
                return False
    return True


def _part(
    program: Program, rank: int, flat: Flat, slot: Slot, quantity: str, needed: _Held
) -> _Held:
    """Return where a rank holds these elements of a parameter."""
    for held in _held(program, rank, flat, slot, quantity):
        if common(held.elements, needed.elements) == needed.elements:
            start = held.start + needed.elements.start - held.elements.start
            return _Held(buffer=held.buffer, start=start, elements=needed.elements)
    raise AssertionError("the elements are on this rank")
