"""The contents of buffers between steps: set by name, restored before the first step, and read back unsharded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zeroir.errors import InternalError, UserError
from zeroir.ir.analysis.held_elements import held_by_all, held_elements
from zeroir.ir.buffers import Buffer, whole
from zeroir.ir.contents import EMA, GRAD, MASTER, PARAM, PASSING, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import used_numel
from zeroir.ir.mesh import Mesh
from zeroir.ir.own_coordinates import OWN_COORDINATES, own_numel
from zeroir.ir.program import Flat, Program, State
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.full_parameters import flat_buffers, flat_part, whole_parameters
from zeroir.runtime.state.waiting_states import WaitingStates
from zeroir.torch_ops.types import TORCH_DTYPE

_TRAINED = (PARAM, MASTER, EMA)
"""Quantities whose values equal the parameters before the first step."""


def initialise_flats(
    program: Program, ranks: Iterable[RankMemory], initial: Mapping[str, Tensor]
) -> None:
    """Fill the persistent buffers of the ranks from values by buffer name.

    For a buffer that holds part of a flat, the value is the whole flat, with any amount of padding at the end, and each
    rank copies its part; for any other buffer it is the buffer's elements. Master weights, averages and other copies of
    parameters without a value equal the parameters, scalars get the program's values, and everything else is zero.

    Raises:
        UserError: where the program has no buffer of such a name.
    """
    memories = list(ranks)
    for name in initial:
        if name not in program.buffer_by_name:
            raise UserError(f"The program has no buffer %{name} to give a value to.")
    fill_scalars(program, memories)
    for buffer in program.buffers:
        value = initial.get(buffer.name)
        content = buffer.holds
        if value is None and isinstance(content, FlatContent) and content.quantity in _TRAINED:
            params = flat_buffers(program, content.flat, (PARAM,))
            value = next((initial[b.name] for b, _ in params if b.name in initial), None)
        if value is None:
            continue
        for memory in memories:
            values = value.reshape(-1)
            if isinstance(content, FlatContent):
                start = flat_start(program, buffer, memory.rank)
                values = values[start : start + buffer.numel]
            memory.clear_elements(buffer.name, values.numel())
            memory.write(buffer.name, 0, values)


def take_over(program: Program, memory: RankMemory, earlier: RankMemory) -> None:
    """Take over the persistent buffers of another program's memory, and initialise the remaining scalars.

    Constants are the program's own, and the loss starts with 0, because a program for one micro-step leaves that of its
    last step there.
    """
    kept = memory.adopt(earlier) - {b.buffer for b in program.module_buffers if b.data is not None}
    memory.clear({b.buffer for b in program.module_buffers if b.data is not None})
    fill_constants(program, [memory])
    fill_scalars(program, [memory], without=kept)
    if program.loss is not None:
        memory.buffer(program.loss).zero_()


def require_same_state(present: Program, following: Program, others: Collection[str] = ()) -> None:
    """Raise UserError unless a program can continue with the values of the present one.

    Both must have the same mesh, the same parameters, and the same states of those that both train; which they train,
    and where the values lie, may differ. Buffers of the model may be in one of them alone if ``others``, names of
    tensors outside the present program, has those that only the following one has. Constants, sums of gradients,
    inputs and outputs may differ.
    """
    if present.mesh != following.mesh:
        raise UserError(
            f"The engine runs on {_text(present.mesh)}, but the program to go on with is for {_text(following.mesh)}: "
            "compile it for the same mesh."
        )
    own_buffers, their_buffers = _model_buffers(present), _model_buffers(following)
    movable = (own_buffers.keys() - their_buffers.keys()) | set(others)
    for name in movable - (own_buffers.keys() & their_buffers.keys()):
        own_buffers.pop(name, None)
        their_buffers.pop(name, None)
    _require_equal(_parameters(present), _parameters(following))
    _require_equal(own_buffers, their_buffers)
    own_states, their_states = _states(present), _states(following)
    for name in own_states.keys() & their_states.keys():
        _require_equal(own_states[name], their_states[name])


def _require_equal(own: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    for name in {**own, **theirs}:
        if own.get(name) == theirs.get(name):
            continue
        if name in own and name in theirs:
            raise UserError(
                f"'{name}' is another one in the program to go on with: compile it from the same model with the same "
                "options, and with other batches, outputs or micro-steps alone."
            )
        owner = "only the program to go on with" if name not in own else "only the engine's program"
        raise UserError(
            f"'{name}' is in {owner}: compile both from the same model with the same options."
        )


def _parameters(program: Program) -> dict[str, object]:
    return {
        slot.name: (slot.shape, slot.aliases, flat.dtype)
        for flat in program.flats
        for slot in flat.slots
    }


def _states(program: Program) -> dict[str, dict[str, DType]]:
    """Return the dtypes of what a program keeps of each trained parameter beside its value."""
    of_flat: dict[str, dict[str, DType]] = {}
    for buffer in program.buffers:
        content = buffer.holds
        if isinstance(content, FlatContent) and content.quantity not in (PARAM, *PASSING):
            of_flat.setdefault(content.flat, {})[content.quantity] = buffer.dtype
    return {
        slot.name: {f"{what} of {slot.name}": dtype for what, dtype in of_flat[flat.name].items()}
        for flat in program.flats
        if flat.is_trainable and flat.name in of_flat
        for slot in flat.slots
    }


def _model_buffers(program: Program) -> dict[str, object]:
    return {b.name: (b.buffer, b.shape) for b in program.module_buffers if b.data is None}


def names_of_buffers(program: Program) -> frozenset[str]:
    """Return the names of the buffers of the model that a program holds; constants are none."""
    return frozenset(b.name for b in program.module_buffers if b.data is None)


def _text(mesh: Mesh) -> str:
    return "the mesh " + ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)


def fill_constants(program: Program, ranks: Iterable[RankMemory]) -> None:
    """Set every constant of the program to its value, and the number of each rank."""
    memories = list(ranks)
    for binding in program.module_buffers:
        if binding.data:
            # A copy, because torch rejects read-only memory.
            dtype = TORCH_DTYPE[program.buffer_by_name[binding.buffer].dtype]
            values = torch.frombuffer(bytearray(binding.data), dtype=dtype)
            for memory in memories:
                memory.write(binding.buffer, 0, values)
    if program.rank is not None:
        for memory in memories:
            memory.write(program.rank, 0, torch.tensor([memory.rank]))


def fill_scalars(
    program: Program, ranks: Iterable[RankMemory], *, without: Collection[str] = ()
) -> None:
    """Set every scalar to its value before the first step, except those ``without``."""
    for memory in ranks:
        for scalar in program.scalars:
            if scalar.buffer in without:
                continue
            buffer = memory.buffer(scalar.buffer)
            buffer.copy_(torch.tensor(scalar.values, dtype=torch.float64))


def flat_start(program: Program, buffer: Buffer, rank: int) -> int:
    """Return the index in the flat of a buffer's first element on this rank."""
    content = buffer.holds
    assert isinstance(content, FlatContent)
    return held_elements(content, buffer.numel, program.mesh.coordinate(rank)).start


def full_flat(
    program: Program, ranks: Sequence[RankMemory], comm: Comm, flat: Flat, quantity: str
) -> list[Tensor] | None:
    """Return all elements of a quantity of a flat, once per local rank; None where no persistent buffer holds it.

    On a real backend all ranks must call this together, because it gathers shards.
    """
    buffers = flat_buffers(program, flat.name, (quantity,))
    if not buffers:
        return None
    dtype = TORCH_DTYPE[buffers[0][0].dtype]
    numel = flat.padded_numel
    if quantity in OWN_COORDINATES:
        numel = max(
            held_by_all(content, buffer.numel, program.mesh)[-1].stop for buffer, content in buffers
        )
    holders = [(whole(buffer), content) for buffer, content in buffers]
    return flat_part(program, ranks, comm, holders, dtype, range(numel))


_EQUAL_AT_FIRST = {PARAM: (MASTER,), MASTER: (PARAM,), EMA: (MASTER, PARAM)}
"""The quantities with the same values before the first step, where no persistent buffer holds the quantity itself."""


def establish(program: Program, ranks: Sequence[RankMemory], comm: Comm, entry: State) -> None:
    """Create the entry state of the first section: the live buffers that a step passes to the next.

    They contain elements of a flat that an earlier step would have gathered, or zeros, like gradients and quantities
    that no persistent buffer holds. All ranks call this together.
    """
    for name in entry.live:
        for memory in ranks:
            memory.alloc(name)
    for holding in entry.holdings:
        content = holding.content
        if holding.region.buffer not in entry.live:
            continue
        copies = None
        if isinstance(content, FlatContent) and content.quantity != GRAD:
            flat = program.flat_by_name[content.flat]
            sources = (content.quantity, *_EQUAL_AT_FIRST.get(content.quantity, ()))
            found = (full_flat(program, ranks, comm, flat, source) for source in sources)
            copies = next(filter(None, found), None)
        if copies is None or not isinstance(content, FlatContent):
            for memory in ranks:
                memory.region(holding.region).zero_()
            continue
        for memory, values in zip(ranks, copies, strict=True):
            target = memory.region(holding.region)
            coordinate = program.mesh.coordinate(memory.rank)
            elements = held_elements(content, target.numel(), coordinate)
            target.copy_(values[elements.start : elements.stop])


def full_parameters(
    program: Program,
    ranks: Sequence[RankMemory],
    comm: Comm,
    *,
    ema: bool = False,
    waiting: WaitingStates | None = None,
) -> dict[str, Tensor]:
    """Return all parameters by name, unsharded, FP32 where the program has master weights.

    All ranks call this together.

    With ``ema`` these are the moving averages; frozen parameters have no average and are returned themselves.

    Raises:
        UserError: with ``ema``, where the program keeps no averages.
    """
    return {
        name: values[0]
        for slot, values in whole_parameters(
            program, ranks, comm, masters=True, ema=ema, waiting=waiting
        )
        for name in (slot.name, *slot.aliases)
    }


def full_state(
    program: Program, ranks: Sequence[RankMemory], comm: Comm
) -> dict[tuple[str, str], Tensor]:
    """Return parameters, master weights and states by (flat, quantity), unsharded, without the padding at the end.

    All ranks call this together.

    Raises:
        InternalError: where local ranks have different bits for one element, or padding is not zero.
    """
    values: dict[tuple[str, str], Tensor] = {}
    for flat in program.flats:
        quantities = [
            buffer.holds.quantity
            for buffer in program.buffers
            if isinstance(buffer.holds, FlatContent) and buffer.holds.flat == flat.name
        ]
        for quantity in dict.fromkeys(quantities):
            copies = full_flat(program, ranks, comm, flat, quantity) if quantity != GRAD else None
            if copies is None:
                continue
            first = copies[0]
            is_own = quantity in OWN_COORDINATES
            stop = own_numel(quantity, flat) if is_own else used_numel(flat)
            if first[stop:].any():
                raise InternalError(f"the padding of {quantity} of {flat.name} is not zero")
            # Compare bytes, because NaN differs from itself.
            if not all(torch.equal(first.view(torch.uint8), c.view(torch.uint8)) for c in copies):
                raise InternalError(f"ranks hold different bits of {quantity} of {flat.name}")
            values[flat.name, quantity] = first[:stop]
    return values
