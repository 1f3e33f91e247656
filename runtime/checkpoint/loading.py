"""Loading a checkpoint: all checks come first, then each rank reads the elements of its own buffers.

The ranks share the comparison of checksums: each reads a part of the bytes. Elements are read from the files directly
into the buffers, or through a small block of memory where dtype or device differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

import torch
from pydantic import JsonValue
from torch import Tensor

from zeroir.checkpoint.manifest import Manifest, OpenStep
from zeroir.checkpoint.reading import CheckpointFiles, VerifyItem, read_manifest, verify_items
from zeroir.checkpoint.state_tree import decode
from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.ir.contents import PASSING, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.runtime.checkpoint.compatibility import stored_buffer
from zeroir.runtime.checkpoint.mapping import StoredElements, StoredParameters
from zeroir.runtime.checkpoint.rounds import Rounds
from zeroir.runtime.checkpoint.snapshots import WEIGHT_SUM, open_buffers
from zeroir.runtime.checkpoint.torch_trees import TorchTensors
from zeroir.runtime.eight_bit.checkpoints import fill_states_of_other_bits
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.state import fill_scalars
from zeroir.torch_ops.types import TORCH_DTYPE

_UNTOUCHED: Final = (Role.INPUT, Role.OUTPUT, Role.SNAPSHOT)

LOADING: Final = "load its part of the checkpoint"
"""The task of these rounds, which tells other ranks what a rank could not do."""

SHARED: Final = "shared"
"""The prefix of the names of the tensors of the shared state."""

_CHUNK_BYTES: Final = 32 << 20
"""The most bytes to read at once, and so the memory that a load needs in addition to the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """The result of a load, in addition to the values of buffers.

    ``shared`` is the state that was saved once for all ranks, and ``state`` that of this rank; None where none was
    saved, or where fewer ranks saved. ``micro_steps`` is the number of micro-steps already done of the step in which
    the checkpoint was saved, if the load continues it. ``notes`` say what starts over or was left out.
    """

    path: str
    manifest: Manifest
    shared: object
    state: object
    micro_steps: int
    notes: tuple[str, ...]

    @property
    def step(self) -> int:
        """The number of training steps done."""
        return self.manifest.step

    def state_of(self, rank: int) -> object:
        """Return the state of one of the ranks that saved, read from its file; None where it saved none.

        Raises:
            UserError: where the file cannot be read.
        """
        return rank_state(self.path, self.manifest, rank)


def read_together(rounds: Rounds, path: str, check: Callable[[Manifest], object]) -> Manifest:
    """Return the manifest of a checkpoint, which rank 0 reads and checks. All ranks of a job call this together.

    Raises:
        UserError: where there is no checkpoint, its manifest is damaged, or ``check`` rejects it.
    """

    def checked() -> bytes:
        manifest = read_manifest(path)
        check(manifest)
        return manifest.model_dump_json().encode()

    return Manifest.model_validate_json(rounds.hold(LOADING, lambda: b"", lambda _: checked()))


def verify_share(
    path: str, manifest: Manifest, rank: int, world_size: int, *, from_disk: bool = False
) -> None:
    """Compare the checksums of one rank's share of a checkpoint; all ranks together cover every byte.

    With ``from_disk`` the bytes are read from the disk and not from the page cache, where the system allows that.

    Raises:
        UserError: naming the file and tensor that differs from what was saved.
    """
    with CheckpointFiles(path=path, manifest=manifest, from_disk=from_disk) as files:
        for item in _share(verify_items(manifest), rank, world_size):
            files.verify(item)


def _share(items: Sequence[VerifyItem], rank: int, world_size: int) -> Iterator[VerifyItem]:
    """Yield the items of one rank: consecutive ones, with about the same number of bytes for each rank."""
    total = sum(item.size_bytes for item in items)
    before = 0
    for item in items:
        middle = before + item.size_bytes / 2
        if min(int(middle * world_size / max(total, 1)), world_size - 1) == rank:
            yield item
        before += item.size_bytes


def fill_memory(program: Program, memory: RankMemory, stored: StoredParameters) -> None:
    """Fill the persistent buffers of a rank from a checkpoint that was checked.

    Input buffers stay as they are, and so do the model's buffers that the checkpoint lacks. All other buffers that are
    not saved get their values from before step 1.

    Raises:
        UserError: where a file cannot be read.
    """
    bindings = {binding.buffer: binding for binding in program.module_buffers}
    copied = _Copier()
    with CheckpointFiles(path=stored.path, manifest=stored.manifest) as files, torch.no_grad():

        def fill(elements: Iterable[StoredElements], target: Tensor) -> None:
            for part in elements:
                read = partial(files.read_into, part.file, part.tensor)
                stop = part.offset + part.stop - part.start
                dtype = TORCH_DTYPE[part.dtype]
                copied.copy(read, dtype, part.start, target[part.offset : stop])

        for buffer in program.buffers:
            if not buffer.is_persistent or buffer.role in _UNTOUCHED:
                continue
            binding = bindings.get(buffer.name)
            if binding is not None:
                target = memory.buffer(buffer.name)
                if binding.data is not None:
                    if binding.data:
                        data = torch.frombuffer(bytearray(binding.data), dtype=target.dtype)
                        target.copy_(data)
                    continue
                saved = stored_buffer(stored, binding, memory.rank) if buffer.numel else None
                if saved is not None and saved.shape == binding.shape:
                    dtype = TORCH_DTYPE[stored.dtype(saved.dtype, f"the buffer '{saved.name}'")]
                    read = partial(files.read_into, saved.file, saved.tensor)
                    copied.copy(read, dtype, 0, target)
                continue
            content = buffer.holds
            if not isinstance(content, FlatContent) or content.quantity in PASSING:
                memory.clear_elements(buffer.name)
                continue
            held = stored.elements(program, buffer, content, memory.rank)
            filled = 0  # All persistent buffers before this point are loaded or cleared.
            for elements in sorted(held, key=lambda each: each.offset):
                read = partial(files.read_into, elements.file, elements.tensor)
                dtype = TORCH_DTYPE[elements.dtype]
                stop = elements.offset + elements.stop - elements.start
                memory.clear_elements(buffer.name, filled, max(filled, elements.offset))
                filled = max(filled, stop)
                if memory.is_on_disk(buffer.name):
                    write = partial(memory.write, buffer.name)
                    own = range(elements.offset, stop)
                    copied.copy_to_disk(read, dtype, elements.start, own, write)
                else:
                    target = memory.buffer(buffer.name)[elements.offset : stop]
                    copied.copy(read, dtype, elements.start, target)
            memory.clear_elements(buffer.name, filled)
        fill_states_of_other_bits(program, memory, stored, fill)
    fill_scalars(program, [memory])


def fill_kept_scalars(program: Program, memory: RankMemory, manifest: Manifest) -> None:
    """Set the scalars that persist between steps to their values in a checkpoint, where it has them.

    A count of the steps of some parameters that it lacks becomes that of all steps.
    """
    saved = {scalar.name: scalar.values for scalar in manifest.scalars}
    counts = dict.fromkeys(program.counts_of_steps, saved.get("".join(program.counts_of_steps[:1])))
    for name in program.counters:
        values = saved.get(name, counts.get(name))
        if values is not None:
            target = memory.buffer(name)
            target.copy_(torch.tensor(values, dtype=torch.float64))


def require_open_step(
    program: Program, path: str, open_step: OpenStep, ranks: Iterable[int]
) -> bytes:
    """Check that the program has the sums of an unfinished step, and the checkpoint those of each of the ranks.

    Raises:
        UserError: where a sum is missing or has another size.
    """
    wanted = {name: program.buffer_by_name[name].dtype.value for name in open_buffers(program)}
    numels = {name: program.buffer_by_name[name].numel for name in wanted}
    wanted[WEIGHT_SUM], numels[WEIGHT_SUM] = DType.F64.value, 1
    is_possible = MICRO_STEP in program.section_by_name
    for rank in ranks:
        own = {piece.name: piece for piece in open_step.pieces if rank in piece.ranks}
        is_possible &= own.keys() == wanted.keys() and all(
            (piece.dtype, prod(piece.shape)) == (wanted[name], numels[name])
            for name, piece in own.items()
        )
    if not is_possible or open_step.micro_steps % program.interleaved:
        raise UserError(
            f"'{path}' was saved within a step, and its manifest has other sums of it than the program: use another "
            "checkpoint."
        )
    return b""


def fill_open_step(memory: RankMemory, path: str, manifest: Manifest, open_step: OpenStep) -> float:
    """Fill a rank's sums of an unfinished step that the same program saved; return the rank's sum of weights.

    Raises:
        UserError: where a file cannot be read.
    """
    copied = _Copier()
    total = torch.zeros(1, dtype=torch.float64)
    with CheckpointFiles(path=path, manifest=manifest) as files, torch.no_grad():
        for piece in open_step.pieces:
            if memory.rank not in piece.ranks:
                continue
            target = total if piece.name == WEIGHT_SUM else memory.buffer(piece.name)
            read = partial(files.read_into, piece.file, piece.tensor)
            copied.copy(read, target.dtype, 0, target)
    return float(total)


def rank_state(path: str, manifest: Manifest, rank: int) -> object:
    """Return the state of a rank, as ``LoadedState.state_of`` does."""
    saved = next((each for each in manifest.ranks if each.rank == rank), None)
    if saved is None:
        return None
    return _decoded(path, manifest, saved.state, saved.file)


def shared_state(path: str, manifest: Manifest) -> object:
    """Return the state that was saved once for all ranks; its tensors are in rank 0's file.

    Raises:
        UserError: where the file cannot be read.
    """
    names = [
        file.name
        for file in manifest.files
        if SHARED in {t.name.partition(".")[0] for t in file.tensors}
    ]
    return _decoded(path, manifest, manifest.shared, names[0] if names else None)


def _decoded(path: str, manifest: Manifest, value: JsonValue, file: str | None) -> object:
    with CheckpointFiles(path=path, manifest=manifest) as files:
        numels = {
            tensor.name: tensor.numel
            for each in manifest.files
            if each.name == file
            for tensor in each.tensors
        }

        def load(name: str) -> memoryview:
            if file is None or name not in numels:
                raise UserError(
                    f"'{path}' has no tensor {name} of its state: use another checkpoint."
                )
            return files.bytes(file, name, 0, numels[name])

        return decode(value, load, codec=TorchTensors())


class _Copier:
    """Copies elements of files to tensors; those that need a conversion pass through one block of memory."""

    def __init__(self) -> None:
        self._block: bytearray | None = None

    def copy(
        self,
        read: Callable[[int, memoryview], None],
        dtype: torch.dtype,
        start: int,
        target: Tensor,
    ) -> None:
        """Fill a flat tensor with file elements of ``dtype``; ``read`` reads those from a given index on."""
        per_chunk = _CHUNK_BYTES // dtype.itemsize
        is_direct = target.device.type == "cpu" and target.dtype == dtype
        for first in range(0, target.numel(), per_chunk):
            part = target[first : first + per_chunk]
            if is_direct:
                read(start + first, part.view(torch.uint8).numpy().data)
            else:
                part.copy_(self._read(read, dtype, start + first, part.numel()))

    def copy_to_disk(
        self,
        read: Callable[[int, memoryview], None],
        dtype: torch.dtype,
        start: int,
        own: range,
        write: Callable[[int, Tensor], None],
    ) -> None:
        """Fill elements ``own`` of a buffer on disk: read each chunk into the block, and pass it to ``write``."""
        per_chunk = _CHUNK_BYTES // dtype.itemsize
        for first in range(0, len(own), per_chunk):
            numel = min(per_chunk, len(own) - first)
            write(own.start + first, self._read(read, dtype, start + first, numel))

    def _read(
        self, read: Callable[[int, memoryview], None], dtype: torch.dtype, start: int, numel: int
    ) -> Tensor:
        """Read elements into the block, which the next call overwrites."""
        if self._block is None:
            self._block = bytearray(_CHUNK_BYTES)
        read(start, memoryview(self._block)[: numel * dtype.itemsize])
        return torch.frombuffer(self._block, dtype=dtype, count=numel)
