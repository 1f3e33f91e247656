"""What persistent buffers hold before the first step, and how to read parameters back.

Parameters come from the user's module one at a time: the module is built once with its large tensors deferred
(see ``deferred``), and each rank replays only the parameters that its buffers hold a piece of, keeps the piece, and
drops the rest. The values equal those of ``torch.manual_seed(seed); model()``. Where a model cannot be deferred it is
built whole, with the same values, and dropped afterwards.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroir.errors import InternalError, UserError
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import GRAD, MASTER, PARAM, FlatContent, Zeros
from zeroir.ir.layout import used_numel
from zeroir.ir.program import Flat, ModuleBufferBinding, Program, Slot, State
from zeroir.runtime.comm.base import Comm, Launch, Piece
from zeroir.runtime.deferred import build_deferred
from zeroir.runtime.recording import Recording
from zeroir.runtime.storage import Memory
from zeroir.runtime.tensors import TORCH_DTYPE

Factory = Callable[[], nn.Module]


class Source:
    """The tensors of a module, by fully-qualified name, one at a time."""

    def __init__(self, module: nn.Module, recording: Recording | None) -> None:
        self._module = module
        self._recording = recording
        self._tensors = dict(module.named_buffers(remove_duplicate=False))
        self._tensors.update(module.named_parameters(remove_duplicate=False))

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; UserError where the module has no tensor of that name."""
        return tuple(self._find(name).shape)

    def position(self, name: str) -> int:
        """Where the tensor's values come in the order in which they are had fastest."""
        return 0 if self._recording is None else self._recording.position(self._find(name))

    def tensor(self, name: str, places: Sequence[Tensor] = ()) -> Tensor:
        """The tensor's values on the CPU, perhaps made in one of the places: contiguous tensors of as many elements.

        UserError where the module has no tensor of that name.
        """
        found = self._find(name)
        if self._recording is None:
            return found.detach()
        fit = (place for place in places if place.is_cpu and place.dtype == found.dtype)
        return self._recording.materialise(found, next(fit, None))

    def _find(self, name: str) -> Tensor:
        found: object = self._tensors.get(name)
        if found is None:  # a tensor that is a plain attribute
            with contextlib.suppress(AttributeError):
                found = operator.attrgetter(name)(self._module)
        if isinstance(found, Tensor):
            return found
        raise UserError(
            f"The model has no parameter or buffer '{name}', which the program was compiled with; "
            "compile it again from this model file."
        )


def build(factory: Factory, seed: int) -> Source:
    """Build the user's module under ``torch.manual_seed(seed)``, deferred where that is possible."""
    for is_lazy in (True, False):
        # Whatever user code makes of tensors without data; a real error comes again.
        with contextlib.suppress(Exception):
            return _deferred(factory, seed, is_lazy=is_lazy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = factory()
    return Source(module, None)


def _deferred(factory: Factory, seed: int, *, is_lazy: bool) -> Source:
    module, recording = build_deferred(factory, seed, is_lazy=is_lazy)
    for name, parameter in module.named_parameters():
        if parameter.is_meta and not recording.knows(parameter):
            raise RuntimeError(f"{name} was made on the meta device")
    return Source(module, recording)


def initialise(program: Program, ranks: Iterable[Memory], factory: Factory, seed: int) -> None:
    """Fill the persistent buffers of the ranks for step 0.

    Parameters and masters get the module's values (masters before they are rounded to 16 bits), module buffers the
    module's, constants their data, scalars the program's; everything else, padding included, is zero.

    Raises:
        UserError: where the module is not the one that the program was compiled from.
    """
    memories = list(ranks)
    source = build(factory, seed)
    for flat in program.flats:
        for slot in flat.slots:
            if source.shape(slot.name) != slot.shape:
                raise UserError(
                    f"The model's '{slot.name}' has the shape {list(source.shape(slot.name))}, but the program was "
                    f"compiled with {list(slot.shape)}; compile it again from this model file."
                )
    slots = [(flat, slot) for flat in program.flats for slot in flat.slots]
    targets = {flat.name: _targets(program, flat, memories) for flat in program.flats}
    with torch.no_grad():
        for flat, slot in sorted(slots, key=lambda one: source.position(one[1].name)):
            _fill_slot(slot, targets[flat.name], source)
        for binding in program.module_buffers:
            value = _module_buffer(program, binding, source)
            for memory in memories:
                memory.buffer(binding.buffer).copy_(value)
    fill_scalars(program, memories)


def initialise_flats(
    program: Program, ranks: Iterable[Memory], initial: Mapping[str, Tensor]
) -> None:
    """Fill the persistent buffers of the ranks from values by buffer name.

    The value of a buffer that holds part of a flat is the whole flat (padding at the end may be missing, or longer),
    of which each rank takes its part; the value of any other buffer is its elements. Masters that are not given equal
    the parameters, scalars get the program's values, and all else is zero.

    Raises:
        UserError: where the program has no buffer of a given name.
    """
    memories = list(ranks)
    for name in initial:
        if name not in program.buffer_by_name:
            raise UserError(f"The program has no buffer %{name} to give a value to.")
    fill_scalars(program, memories)
    for buffer in program.buffers:
        value = initial.get(buffer.name)
        content = buffer.holds
        if value is None and isinstance(content, FlatContent) and content.quantity == MASTER:
            params = flat_buffers(program, content.flat, (PARAM,))
            value = initial.get(params[0].name) if params else None
        if value is None:
            continue
        for memory in memories:
            values = value.reshape(-1)
            if isinstance(content, FlatContent):
                start = flat_start(program, buffer, memory.rank)
                values = values[start : start + buffer.numel]
            target = memory.buffer(buffer.name)
            target.zero_()
            target[: values.numel()].copy_(values)


def fill_scalars(program: Program, ranks: Iterable[Memory]) -> None:
    """Give every scalar its value before the first step."""
    for memory in ranks:
        for scalar in program.scalars:
            buffer = memory.buffer(scalar.buffer)
            buffer.copy_(torch.tensor(scalar.values, dtype=torch.float64))


def flat_buffers(program: Program, flat: str, quantities: Sequence[str]) -> list[Buffer]:
    """The persistent buffers that rest with a quantity of a flat."""
    return [
        buffer
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
        and buffer.holds.flat == flat
        and buffer.holds.quantity in quantities
    ]


def flat_start(program: Program, buffer: Buffer, rank: int) -> int:
    """The flat element that a buffer's first element is on this rank."""
    content = buffer.holds
    assert isinstance(content, FlatContent)
    if content.shard is None:
        return content.offset
    return content.offset + program.mesh.coordinate(rank)[content.shard] * buffer.numel


def _targets(
    program: Program, flat: Flat, memories: Sequence[Memory]
) -> Sequence[tuple[Tensor, int]]:
    """The buffers that rest with parts of a flat's parameters, each with the element that is its first."""
    return [
        (memory.buffer(buffer.name), flat_start(program, buffer, memory.rank))
        for memory in memories
        for buffer in flat_buffers(program, flat.name, (PARAM, MASTER))
    ]


def _fill_slot(slot: Slot, targets: Sequence[tuple[Tensor, int]], source: Source) -> None:
    pieces: list[tuple[Tensor, int, int]] = []
    for tensor, start in targets:
        first = max(start, slot.offset)
        stop = min(start + tensor.numel(), slot.offset + slot.numel)
        if first < stop:
            piece = tensor[first - start : stop - start]
            pieces.append((piece, first - slot.offset, stop - slot.offset))
    if not pieces:
        return
    whole = [piece for piece, first, stop in pieces if stop - first == slot.numel]
    values = source.tensor(slot.name, whole).reshape(-1)
    for piece, first, stop in pieces:
        if values.data_ptr() != piece.data_ptr():
            piece.copy_(values[first:stop])


def _module_buffer(program: Program, binding: ModuleBufferBinding, source: Source) -> Tensor:
    buffer = program.buffer_by_name[binding.buffer]
    if binding.data is None:
        return source.tensor(binding.name).reshape(-1)
    if not binding.data:
        return torch.empty(0)
    # A copy, because torch refuses read-only memory.
    return torch.frombuffer(bytearray(binding.data), dtype=TORCH_DTYPE[buffer.dtype])


def full_flat(
    program: Program, ranks: Sequence[Memory], comm: Comm, flat: Flat, quantity: str
) -> list[Tensor] | None:
    """All elements of a quantity of a flat, once per local rank; None where no persistent buffer holds it.

    On a real backend every rank must call this alike: shards are gathered.
    """
    found = flat_buffers(program, flat.name, (quantity,))
    if not found:
        return None
    first = program.buffer_by_name[found[0].name]
    full = [
        torch.zeros(flat.padded_numel, dtype=TORCH_DTYPE[first.dtype], device=memory.device)
        for memory in ranks
    ]
    for buffer in found:
        content = buffer.holds
        assert isinstance(content, FlatContent)
        if content.shard is None:
            for memory, tensor in zip(ranks, full, strict=True):
                start = content.offset
                tensor[start : start + buffer.numel].copy_(memory.buffer(buffer.name))
            continue
        stop = content.offset + buffer.numel * program.mesh.size(content.shard)
        pieces = []
        for memory, tensor in zip(ranks, full, strict=True):
            own = memory.buffer(buffer.name).to(memory.device, copy=True)
            pieces.append([Piece(source=own, destination=tensor[content.offset : stop])])
        name = next(c.name for c in program.comms if c.axis == content.shard)
        comm.all_gather(Launch(comm=name, pieces=pieces, staging=[None] * len(ranks)))
    return full


def parameters_of(flat: Flat, values: Tensor) -> Mapping[str, Tensor]:
    """The parameters of a flat by name, aliases included, as views of its elements."""
    return {
        name: values[slot.offset : slot.offset + slot.numel].view(slot.shape)
        for slot in flat.slots
        for name in (slot.name, *slot.aliases)
    }


def establish(program: Program, ranks: Sequence[Memory], comm: Comm, entry: State) -> None:
    """Bring about what the first section finds live before any step has run: buffers that a step hands to the next.

    They hold parameters that the step before would have gathered, or zeros. Every rank calls this alike.
    """
    for name in entry.live:
        for memory in ranks:
            memory.alloc(name)
    for holding in entry.holdings:
        content = holding.content
        if holding.region.buffer not in entry.live:
            continue
        if isinstance(content, Zeros):
            for memory in ranks:
                memory.region(holding.region).zero_()
        elif isinstance(content, FlatContent):
            flat = program.flat_by_name[content.flat]
            copies = full_flat(program, ranks, comm, flat, content.quantity)
            for memory, values in zip(ranks, copies or (), strict=True):
                target = memory.region(holding.region)
                start = content.offset
                if content.shard is not None:
                    start += program.mesh.coordinate(memory.rank)[content.shard] * target.numel()
                target.copy_(values[start : start + target.numel()])


def full_parameters(program: Program, ranks: Sequence[Memory], comm: Comm) -> dict[str, Tensor]:
    """Every parameter by name, whole, FP32 masters where there are some; every rank calls this alike."""
    found: dict[str, Tensor] = {}
    for flat in program.flats:
        for quantity in (MASTER, PARAM):
            full = full_flat(program, ranks, comm, flat, quantity)
            if full is not None:
                found.update(parameters_of(flat, full[0]))
                break
    return found


def full_state(
    program: Program, ranks: Sequence[Memory], comm: Comm
) -> dict[tuple[str, str], Tensor]:
    """Parameters, masters and optimizer states by (flat, quantity), whole, without the padding at the end.

    Every rank calls this alike.

    Raises:
        InternalError: where local ranks hold different bits of the same elements, or padding is not zero.
    """
    found: dict[tuple[str, str], Tensor] = {}
    for flat in program.flats:
        stop = used_numel(flat)
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
            if first[stop:].any():
                raise InternalError(f"the padding of {quantity} of {flat.name} is not zero")
            # As bytes, because NaN differs from itself.
            if not all(torch.equal(first.view(torch.uint8), c.view(torch.uint8)) for c in copies):
                raise InternalError(f"ranks hold different bits of {quantity} of {flat.name}")
            found[flat.name, quantity] = first[:stop]
    return found
