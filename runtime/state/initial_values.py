"""The initial values of persistent buffers.

Rank 0 has the module: it builds it on the CPU, or got it from the user (``initial_module``). It sends the values to all
ranks, tensor by tensor, in messages of a few MiB; every rank copies the elements of its own buffers. As soon as the
values of a tensor are sent, rank 0 frees it, so the model exists only once. The parameters are those of plain PyTorch,
whatever the constructor does. Digests then verify that the ranks have the values of rank 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from zeroir.errors import ModelWarning, UserError
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import EMA, MASTER, PARAM
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import round_up
from zeroir.ir.mesh import Mesh
from zeroir.ir.program import Program
from zeroir.runtime.comm.job import PeerError
from zeroir.runtime.comm.rank_zero_values import ALONE, RankZeroValues
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.runtime.state.digests import Digester
from zeroir.runtime.state.full_parameters import flat_buffers
from zeroir.runtime.state.initial_module import (
    Factory,
    InitialModule,
    StateSource,
    built,
    built_without_values,
    free_module,
)
from zeroir.runtime.state.state import fill_constants, fill_scalars
from zeroir.torch_ops.types import IR_DTYPE, TORCH_DTYPE

MESSAGE_BYTES: Final = 4 << 20
_BATCH_NUMEL: Final = 16 << 20
"""Elements of the tensors that rank 0 reads from a state before it sends them; a single tensor may have more."""
_ALIGNMENT_BYTES: Final = 16
_DTYPES: Final = tuple(DType)


def initialise(
    program: Program,
    ranks: Iterable[RankMemory],
    source: Factory | nn.Module,
    seed: int,
    from_rank_zero: RankZeroValues = ALONE,
    *,
    state: StateSource | None = None,
    keep_module: bool = False,
) -> Mapping[str, Tensor]:
    """Fill the persistent buffers of the ranks for step 0; in a job all ranks call this together.

    Parameters, master weights, averages and module buffers get the values of rank 0 (master weights and averages
    without rounding to 16 bits), constants their data, and scalars the program's values. Everything else, including
    padding, is zero. Rank 0 calls the factory, or reads the given module; a ``state`` takes precedence over their
    values. The tensors of a given module are freed as their values move to the buffers, on the other ranks without
    being read, unless ``keep_module`` is True. Without ``from_rank_zero`` this process is rank 0.

    Returns:
        Rank 0's values of the module's tensors that the program does not hold, on the CPU or where the module has them.

    Raises:
        UserError: where the program was compiled from another module, the state fails, or the values of a rank differ
            from the module's. A note on the error says in which state a given module is left.
    """
    memories = list(ranks)
    fill_constants(program, memories)
    fill_scalars(program, memories)
    tensors = _tensors(program)
    open_values = partial(_open, program, source, seed, state, keep_module=keep_module)
    task = "use its module" if isinstance(source, nn.Module) else "build the model"
    values = from_rank_zero.make(open_values, task)
    with torch.no_grad(), _noting(source, is_kept=keep_module):
        if values is None and isinstance(source, nn.Module) and not keep_module:
            free_module(program, source)
        others = from_rank_zero.send_tensors(None if values is None else values.others())
        if tensors:
            sent = _hand_out(program, tensors, memories, values, from_rank_zero)
            _require_agreement(program, tensors, memories, sent, from_rank_zero)
    return others


def _open(
    program: Program,
    source: Factory | nn.Module,
    seed: int,
    state: StateSource | None,
    *,
    keep_module: bool,
) -> InitialModule:
    """Return the values of rank 0."""
    is_in_hand = isinstance(source, nn.Module)
    if isinstance(source, nn.Module):
        module = source
    else:
        module = built(source, seed) if state is None else built_without_values(source)
    values = InitialModule(
        program, module, state, is_kept=keep_module and is_in_hand, is_made=not is_in_hand
    )
    shared = values.shared_storage()
    if is_in_hand and shared is not None:
        first, second, size_bytes = shared
        warnings.warn(
            f"'{first}' and '{second}' of the module share {size_bytes} bytes of memory, which are freed only when the "
            "engine has the values of all tensors in them: until then this rank holds them twice.",
            ModelWarning,
            stacklevel=2,
        )
    return values


@contextmanager
def _noting(source: Factory | nn.Module, *, is_kept: bool) -> Iterator[None]:
    """Add a note to an error that says in which state it leaves a given module."""
    try:
        yield
    except BaseException as error:
        if isinstance(source, nn.Module) and not is_kept:
            error.add_note(
                "The module is not whole any more: tensors whose values had moved to the engine are on the meta "
                "device, and their values are lost; load the module again."
            )
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _HoldingBuffer:
    """A buffer that holds elements of a tensor, from the ``start``-th on; ``start`` may be negative.

    With ``axis`` each coordinate holds the elements after those of the previous coordinate.
    """

    buffer: Buffer
    start: int
    axis: str | None = None

    def on(self, mesh: Mesh, rank: int) -> range:
        """Return the elements in the buffer of one rank."""
        shift = 0 if self.axis is None else mesh.coordinate(rank)[self.axis] * self.buffer.numel
        return range(self.start + shift, self.start + shift + self.buffer.numel)

    def anywhere(self, mesh: Mesh) -> range:
        """Return the elements in the buffers of all coordinates together."""
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
    """Return the tensors that rank 0 sends, each with at least one element, in the same order on all ranks."""
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
            held = [h for h in homes if common(h.anywhere(program.mesh), everything)]
            if held:
                tensors.append(_ModuleTensor(name=slot.name, numel=slot.numel, homes=held))
    for binding in program.module_buffers:
        buffer = program.buffer_by_name[binding.buffer]
        if binding.data is None and buffer.numel:
            home = _HoldingBuffer(buffer=buffer, start=0)
            tensors.append(_ModuleTensor(name=binding.name, numel=buffer.numel, homes=[home]))
    return tensors


def _messages(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[list[_MessagePart]]:
    """Split tensors into parts, and yield messages that consist of these."""
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


def _batches(tensors: Sequence[_ModuleTensor]) -> Iterator[range]:
    """Yield ranges of indices of tensors that are read from a state together."""
    start, numel = 0, 0
    for index, tensor in enumerate(tensors):
        if numel and numel + tensor.numel > _BATCH_NUMEL:
            yield range(start, index)
            start, numel = index, 0
        numel += tensor.numel
    yield range(start, len(tensors))


def _hand_out(
    program: Program,
    tensors: Sequence[_ModuleTensor],
    memories: Sequence[RankMemory],
    values: InitialModule | None,
    from_rank_zero: RankZeroValues,
) -> Tensor:
    """Fill the buffers of all ranks with the values, which rank 0 has.

    Returns:
        The digests of the values of rank 0 (i64, one for each home of each tensor); zeros on other ranks.
    """
    message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=from_rank_zero.device)
    sent: list[Tensor] = []
    for batch in _batches(tensors):
        members = [tensors[index] for index in batch]
        codes = from_rank_zero.make(
            partial(_dtype_codes, members, values), "give the model's values"
        )
        codes = torch.zeros(len(members), dtype=torch.uint8) if codes is None else codes
        codes = codes.to(from_rank_zero.device)
        from_rank_zero.send(codes)
        dtypes = [TORCH_DTYPE[_DTYPES[code]] for code in codes.tolist()]
        sent += _hand_out_batch(program, members, dtypes, memories, values, from_rank_zero, message)
    return torch.stack(sent)


def _dtype_codes(tensors: Sequence[_ModuleTensor], values: InitialModule | None) -> Tensor:
    """Read tensors; return the dtypes of their values, as positions in ``_DTYPES``."""
    assert values is not None  # on rank 0
    codes = [_DTYPES.index(IR_DTYPE[values.fetch(tensor.name)]) for tensor in tensors]
    return torch.tensor(codes, dtype=torch.uint8)


def _hand_out_batch(
    program: Program,
    tensors: Sequence[_ModuleTensor],
    dtypes: Sequence[torch.dtype],
    memories: Sequence[RankMemory],
    source: InitialModule | None,
    from_rank_zero: RankZeroValues,
    message: Tensor,
) -> list[Tensor]:
    """Fill buffers as ``_hand_out`` does, for tensors whose values have these dtypes."""
    mesh, digester = program.mesh, Digester()
    sent = [[torch.zeros((), dtype=torch.int64) for _ in tensor.homes] for tensor in tensors]
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
                if part.elements.stop == tensor.numel:
                    source.free(tensor.name)
                for number, home in enumerate(tensor.homes):
                    whole = common(home.anywhere(mesh), part.elements)
                    rounded = _slice(values, whole, part.elements.start).to(
                        TORCH_DTYPE[home.buffer.dtype]
                    )
                    sent[part.index][number] += digester.digest(rounded, whole.start).cpu()
        last = parts[-1]
        from_rank_zero.send(
            message[: last.offset_bytes + contents[-1].numel() * contents[-1].itemsize]
        )
        for part, values in zip(parts, contents, strict=True):
            for home in tensors[part.index].homes:
                for memory in memories:
                    own = home.on(mesh, memory.rank)
                    local = common(own, part.elements)
                    if local:
                        elements = _slice(values, local, part.elements.start)
                        memory.write(home.buffer.name, local.start - own.start, elements)
    return [total for totals in sent for total in totals]


def _require_agreement(
    program: Program,
    tensors: Sequence[_ModuleTensor],
    memories: Sequence[RankMemory],
    sent: Tensor,
    from_rank_zero: RankZeroValues,
) -> None:
    """Raise UserError unless all ranks, each or together, have the values of rank 0."""
    mesh, digester = program.mesh, Digester()
    homes = [(tensor, home) for tensor in tensors for home in tensor.homes]
    held = torch.zeros(len(memories), len(homes), dtype=torch.int64)
    for row, memory in zip(held, memories, strict=True):
        for column, (tensor, home) in enumerate(homes):
            own = home.on(mesh, memory.rank)
            local = common(own, range(tensor.numel))
            first = local.start
            for chunk in memory.read_in_chunks(
                home.buffer.name, local.start - own.start, local.stop - own.start
            ):
                row[column] += digester.digest(chunk, first).cpu()
                first += chunk.numel()
    sent = sent.to(from_rank_zero.device)
    from_rank_zero.send(sent)
    expected = sent.cpu()
    by_rank = from_rank_zero.gather(held)
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
                    f"The values of '{tensor.name}' on {_named(group)} differ from those of rank 0: "
                    "memory or a connection is faulty; start again, and use another machine if it happens again."
                )


def _named(group: Sequence[int]) -> str:
    if len(group) == 1:
        return f"rank {group[0]}"
    return f"the {len(group)} ranks from {group[0]} to {group[-1]} together"


def _slice(values: Tensor, elements: range, start: int) -> Tensor:
    """Return these elements of a flat tensor that starts with the ``start``-th."""
    return values[elements.start - start : elements.stop - start] if elements else values[:0]
