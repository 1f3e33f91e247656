"""The initial values of persistent buffers.

Rank 0 builds the user's module whole, on the CPU (see ``construction``), and sends its values to all ranks, tensor by
tensor, in messages of a few MiB; every rank copies the elements of its own buffers. So the host of rank 0 holds the
whole model once, until everything is sent, and no other rank ever does. The parameters are those of plain PyTorch,
whatever the constructor does. Digests then prove that the ranks hold the values that rank 0 built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import EMA, MASTER, PARAM
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import round_up
from zeroir.ir.mesh import Mesh
from zeroir.ir.program import Program
from zeroir.runtime.comm.handout import ALONE, Handout
from zeroir.runtime.comm.job import PeerError
from zeroir.runtime.construction import Factory, construct
from zeroir.runtime.digests import Digester
from zeroir.runtime.rank_memory import RankMemory
from zeroir.runtime.state import fill_scalars, flat_buffers
from zeroir.runtime.tensors import IR_DTYPE, TORCH_DTYPE

MESSAGE_BYTES: Final = 4 << 20
_ALIGNMENT_BYTES: Final = 16
_DTYPES: Final = tuple(DType)


def initialise(
    program: Program,
    ranks: Iterable[RankMemory],
    factory: Factory,
    seed: int,
    handout: Handout = ALONE,
) -> None:
    """Fill the persistent buffers of the ranks for step 0; in a job all ranks call this together.

    Parameters, masters, averages and module buffers get the module's values (masters and averages without rounding to
    16 bits), constants their data, and scalars the program's values. Everything else, padding included, is zero.
    Without a ``handout`` this process builds the module itself.

    Raises:
        UserError: where the program was compiled from another module, or the values of a rank differ from the module's.
    """
    memories = list(ranks)
    for binding in program.module_buffers:
        if binding.data:
            # A copy, because torch refuses read-only memory.
            buffer = program.buffer_by_name[binding.buffer]
            data = torch.frombuffer(bytearray(binding.data), dtype=TORCH_DTYPE[buffer.dtype])
            for memory in memories:
                memory.buffer(buffer.name).copy_(data)
    fill_scalars(program, memories)
    tensors = _tensors(program)
    if tensors:
        with torch.no_grad():
            built = _hand_out(program, tensors, memories, factory, seed, handout)
            _require_agreement(program, tensors, memories, built, handout)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HoldingBuffer:
    """A buffer that holds elements of a tensor, from the ``start``-th on; ``start`` may be negative.

    With ``axis`` each coordinate holds the elements that follow those of the previous coordinate.
    """

    buffer: Buffer
    start: int
    axis: str | None = None

    def on(self, mesh: Mesh, rank: int) -> range:
        """The elements in the buffer of one rank."""
        shift = 0 if self.axis is None else mesh.coordinate(rank)[self.axis] * self.buffer.numel
        return range(self.start + shift, self.start + shift + self.buffer.numel)

    def anywhere(self, mesh: Mesh) -> range:
        """The elements in the buffers of all coordinates together."""
        count = 1 if self.axis is None else mesh.size(self.axis)
        return range(self.start, self.start + count * self.buffer.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleTensor:
    """A tensor of the module that the program holds."""

    name: str
    numel: int
    homes: Sequence[_HoldingBuffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessagePart:
    """Elements of the ``index``-th tensor in a message, from the ``offset_bytes``-th byte on."""

    index: int
    elements: range
    offset_bytes: int


def _tensors(program: Program) -> list[_ModuleTensor]:
    """The tensors that rank 0 sends, each with at least one element, in the same order on all ranks."""
    tensors: list[_ModuleTensor] = []
    for flat in program.flats:
        buffers = flat_buffers(program, flat.name, (PARAM, MASTER, EMA))
        for slot in flat.slots:
            homes = [
                _HoldingBuffer(
                    buffer=buffer, start=content.offset - slot.offset, axis=content.shard
                )
                for buffer, content in buffers
            ]
            everything = range(slot.numel)
            held = [h for h in homes if _common(h.anywhere(program.mesh), everything)]
            if held:
                tensors.append(_ModuleTensor(name=slot.name, numel=slot.numel, homes=held))
    for binding in program.module_buffers:
        buffer = program.buffer_by_name[binding.buffer]
        if binding.data is None and buffer.numel:
            home = _HoldingBuffer(buffer=buffer, start=0)
            tensors.append(_ModuleTensor(name=binding.name, numel=buffer.numel, homes=[home]))
    return tensors


def _messages(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[list[_MessagePart]]:
    """Cut tensors into parts, and fill one message after the other with them."""
    parts: list[_MessagePart] = []
    used = 0
    for index, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True)):
        first = 0
        while first < numel:
            if used + dtype.itemsize > MESSAGE_BYTES:
                yield parts
                parts, used = [], 0
            stop = min(numel, first + (MESSAGE_BYTES - used) // dtype.itemsize)
            parts.append(_MessagePart(index=index, elements=range(first, stop), offset_bytes=used))
            used = round_up(used + (stop - first) * dtype.itemsize, _ALIGNMENT_BYTES)
            first = stop
    if parts:
        yield parts


def _hand_out(
    program: Program,
    tensors: Sequence[_ModuleTensor],
    memories: Sequence[RankMemory],
    factory: Factory,
    seed: int,
    handout: Handout,
) -> Tensor:
    """Build the module on rank 0, and fill the buffers of all ranks.

    Returns the digests of the values that rank 0 built (i64, one for each home of each tensor); zeros on other ranks.
    """
    mesh, digester = program.mesh, Digester()
    source = handout.make(lambda: construct(program, factory, seed))
    codes = torch.zeros(len(tensors), dtype=torch.uint8)
    if source is not None:
        for index, tensor in enumerate(tensors):
            codes[index] = _DTYPES.index(IR_DTYPE[source.tensor(tensor.name).dtype])
    codes = codes.to(handout.device)
    handout.send(codes)
    dtypes = [TORCH_DTYPE[_DTYPES[code]] for code in codes.tolist()]
    built = [[torch.zeros((), dtype=torch.int64) for _ in tensor.homes] for tensor in tensors]
    message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=handout.device)
    for parts in _messages([tensor.numel for tensor in tensors], dtypes):
        contents = [
            message[part.offset_bytes :][: len(part.elements) * dtypes[part.index].itemsize].view(
                dtypes[part.index]
            )
            for part in parts
        ]
        if source is not None:
            for part, values in zip(parts, contents, strict=True):
                tensor = tensors[part.index]
                values.copy_(_slice(source.elements(tensor.name), part.elements, 0))
                for number, home in enumerate(tensor.homes):
                    whole = _common(home.anywhere(mesh), part.elements)
                    rounded = _slice(values, whole, part.elements.start).to(
                        TORCH_DTYPE[home.buffer.dtype]
                    )
                    built[part.index][number] += digester.digest(rounded, whole.start).cpu()
        last = parts[-1]
        handout.send(message[: last.offset_bytes + contents[-1].numel() * contents[-1].itemsize])
        for part, values in zip(parts, contents, strict=True):
            for home in tensors[part.index].homes:
                for memory in memories:
                    own = home.on(mesh, memory.rank)
                    local = _common(own, part.elements)
                    target = _slice(memory.buffer(home.buffer.name), local, own.start)
                    target.copy_(_slice(values, local, part.elements.start))
    return torch.stack([total for totals in built for total in totals])


def _require_agreement(
    program: Program,
    tensors: Sequence[_ModuleTensor],
    memories: Sequence[RankMemory],
    built: Tensor,
    handout: Handout,
) -> None:
    """Raise a UserError unless the ranks, each or together, hold the values that rank 0 built."""
    mesh, digester = program.mesh, Digester()
    homes = [(tensor, home) for tensor in tensors for home in tensor.homes]
    held = torch.zeros(len(memories), len(homes), dtype=torch.int64)
    for row, memory in zip(held, memories, strict=True):
        for column, (tensor, home) in enumerate(homes):
            own = home.on(mesh, memory.rank)
            local = _common(own, range(tensor.numel))
            row[column] = digester.digest(
                _slice(memory.buffer(home.buffer.name), local, own.start), local.start
            )
    built = built.to(handout.device)
    handout.send(built)
    expected = built.cpu()
    by_rank = handout.gather(held)
    if len(by_rank) < mesh.world_size:
        return  # the other ranks are only simulated
    for axis in dict.fromkeys(home.axis for _, home in homes):
        columns = torch.tensor(
            [number for number, (_, home) in enumerate(homes) if home.axis == axis]
        )
        groups = mesh.groups(axis) if axis else [(rank,) for rank in range(mesh.world_size)]
        for group in groups:
            differs = by_rank[list(group)][:, columns].sum(0) != expected[columns]
            if differs.any():
                tensor, _ = homes[int(columns[int(differs.nonzero()[0])])]
                is_reporter = any(memory.rank == group[0] for memory in memories)
                raise (UserError if is_reporter else PeerError)(
                    f"The values of '{tensor.name}' on {_named(group)} differ from those that rank 0 built: "
                    "memory or a connection is faulty; start again, and use another machine if it happens again."
                )


def _named(group: Sequence[int]) -> str:
    if len(group) == 1:
        return f"rank {group[0]}"
    return f"the {len(group)} ranks from {group[0]} to {group[-1]} together"


def _common(a: range, b: range) -> range:
    """The intersection of two ranges of elements."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _slice(values: Tensor, elements: range, start: int) -> Tensor:
    """These elements, out of a flat tensor that begins with the ``start``-th."""
    return values[elements.start - start : elements.stop - start] if elements else values[:0]
