"""Saving a checkpoint: each rank writes its file, then rank 0 publishes the checkpoint by writing the manifest.

This takes two rounds of all ranks. In the first one the ranks report the checksums of their own copies of tensors that
every rank has; rank 0 starts the checkpoint and chooses the rank that writes each. In the second one all ranks write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue, TypeAdapter
from torch import Tensor

from zeroir.checkpoint.checksums import checksum_of
from zeroir.checkpoint.manifest import (
    Manifest,
    OpenStep,
    Piece,
    RankState,
    Record,
    StoredBuffer,
    StoredFile,
    StoredFlat,
    StoredParameter,
    StoredQuantity,
    StoredScalar,
)
from zeroir.checkpoint.publish import Draft, begin
from zeroir.checkpoint.safetensors_header import StoredTensorSpec
from zeroir.checkpoint.state_tree import StoredArray
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint.model_facts import ModelFacts
from zeroir.runtime.checkpoint.parts import saved_parts, saved_quantities
from zeroir.runtime.checkpoint.rounds import Rounds
from zeroir.runtime.checkpoint.snapshots import RankTensor, Snapshot
from zeroir.runtime.checkpoint.torch_trees import Chunks, bytes_of
from zeroir.runtime.disk.elements import ElementsOnDisk

SAVING: Final = "save its part of the checkpoint"
"""The task of these rounds, which tells other ranks what a rank could not do."""

_BUFFER: Final = "buffer"
_SUM: Final = "sum"


class OwnTensors(Record):
    """The names of the tensors of which every rank has its own, each with its checksum."""

    buffers: tuple[tuple[str, str], ...]
    sums: tuple[tuple[str, str], ...]


class Assignment(Record):
    """The checkpoint that rank 0 has started, and the rank that writes each tensor, as ``[name][checksum]``."""

    target: str
    folder: str
    token: str
    buffers: dict[str, dict[str, int]]
    sums: dict[str, dict[str, int]]

    @property
    def draft(self) -> Draft:
        """The unfinished checkpoint."""
        return Draft(target=self.target, folder=self.folder, token=self.token)


class Written(Record):
    """What a rank has written: its file, if it wrote any, and its own state, whose tensors are in the file."""

    file: StoredFile | None
    state: JsonValue


_TensorsOfRanks: Final = TypeAdapter(list[OwnTensors])
_AllWritten: Final = TypeAdapter(list[Written])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSave:
    """What one rank saves. ``state`` is its own state; ``arrays`` has its tensors and those of the shared state.

    ``is_awaited`` says that training waits for the save; otherwise the save leaves the CPU cores to training.
    """

    snapshot: Snapshot
    rank: int
    state: JsonValue
    arrays: Mapping[str, StoredArray]
    is_awaited: bool

    def own_tensors(self) -> OwnTensors:
        """Return the tensors of which this rank has its own."""
        return OwnTensors(
            buffers=tuple(_checked(each) for each in self.snapshot.buffers),
            sums=tuple(_checked(each) for each in self.snapshot.sums),
        )

    def write(self, assignment: Assignment, own_tensors: OwnTensors) -> Written:
        """Write this rank's file.

        Raises:
            UserError: where it cannot be written.
        """
        tensors: list[tuple[StoredTensorSpec, Iterable[memoryview]]] = []

        def add(name: str, dtype: str, values: Tensor | ElementsOnDisk) -> None:
            spec = StoredTensorSpec(name=name, dtype=dtype, numel=values.numel())
            tensors.append((spec, Chunks(values=values)))

        for part, values in self.snapshot.parts:
            add(part.tensor, part.dtype.value, values)
        for kind, own, writers, offered in (
            (_BUFFER, self.snapshot.buffers, assignment.buffers, own_tensors.buffers),
            (_SUM, self.snapshot.sums, assignment.sums, own_tensors.sums),
        ):
            for each, (name, checksum) in zip(own, offered, strict=True):
                if writers[name][checksum] == self.rank:
                    add(_tensor_name(kind, name, self.rank), each.dtype, each.tensor)
        for name, array in self.arrays.items():
            spec = StoredTensorSpec(name=name, dtype=array.dtype, numel=array.numel)
            tensors.append((spec, (array.data,)))
        if not tensors:
            return Written(file=None, state=self.state)
        draft = assignment.draft
        file = write_file(
            open_storage(draft.folder),
            draft.folder,
            draft.file_name(self.rank),
            tensors,
            hashes_beside=self.is_awaited,
        )
        return Written(file=file, state=self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """What rank 0 adds to a checkpoint. ``base`` is the manifest without what the ranks have written.

    ``micro_steps`` is the number of micro-steps done of an unfinished step, or None between steps. ``unread`` are
    tensors in the model's ``state_dict`` that the program does not hold.
    """

    target: str
    program: Program
    base: Manifest
    facts: ModelFacts
    unread: Mapping[str, Tensor]
    micro_steps: int | None

    def assign(self, tensors_of_ranks: Sequence[OwnTensors]) -> Assignment:
        """Start the checkpoint, and let the first rank that has a given version of a tensor write it.

        Raises:
            UserError: where the checkpoint cannot be created.
        """
        draft = begin(self.target)
        return Assignment(
            target=draft.target,
            folder=draft.folder,
            token=draft.token,
            buffers=_writers([own_tensors.buffers for own_tensors in tensors_of_ranks]),
            sums=_writers([own_tensors.sums for own_tensors in tensors_of_ranks]),
        )

    def publish(
        self,
        draft: Draft,
        assignment: Assignment,
        tensors_of_ranks: Sequence[OwnTensors],
        written: Sequence[Written],
        scalars: Sequence[StoredScalar],
    ) -> str:
        """Publish the checkpoint, and return its path.

        Raises:
            UserError: where this machine lacks a file, or the disk fails.
        """
        names = {rank: each.file.name for rank, each in enumerate(written) if each.file is not None}
        open_step = None
        if self.micro_steps is not None:
            sums = _stored(
                _SUM, assignment.sums, [o.sums for o in tensors_of_ranks], names, written
            )
            open_step = OpenStep(micro_steps=self.micro_steps, pieces=tuple(sums))
        buffers = _stored(
            _BUFFER, assignment.buffers, [o.buffers for o in tensors_of_ranks], names, written
        )
        shapes = {name: tuple(value.shape) for name, value in self.unread.items()}
        shapes |= {b.name: b.shape for b in self.program.module_buffers}
        manifest = self.base.model_copy(
            update={
                "files": tuple(each.file for each in written if each.file is not None),
                "scalars": tuple(scalars),
                "flats": tuple(stored_flats(self.program, names)),
                "buffers": tuple(
                    each.model_copy(
                        update={
                            "shape": shapes[each.name],
                            "aliases": self.facts.aliases(each.name),
                            "is_persistent": self.facts.is_persistent(each.name),
                        }
                    )
                    for each in buffers
                ),
                "ranks": tuple(
                    RankState(rank=rank, state=each.state, file=names.get(rank))
                    for rank, each in enumerate(written)
                    if each.state is not None
                ),
                "open_step": open_step,
            }
        )
        return draft.publish(manifest)


def save_in_rounds(rounds: Rounds, take: Callable[[], Sequence[RankSave]], leader: Leader) -> str:
    """Save a checkpoint and return its path. All processes of a job call this together, each for its ranks.

    Raises:
        UserError: where it cannot be saved; then nothing of it remains.
    """
    ranks: list[RankSave] = []
    local_tensors: list[OwnTensors] = []
    tensors_of_ranks: list[OwnTensors] = []

    def assign(answers: Sequence[bytes]) -> bytes:
        tensors_of_ranks.extend(
            each for answer in answers for each in _TensorsOfRanks.validate_json(answer)
        )
        return leader.assign(tensors_of_ranks).model_dump_json().encode()

    def own_tensors() -> bytes:
        ranks.extend(take())
        local_tensors.extend(rank.own_tensors() for rank in ranks)
        return _TensorsOfRanks.dump_json(local_tensors)

    outcome = rounds.hold(SAVING, own_tensors, assign)
    assignment = Assignment.model_validate_json(outcome)
    # It remembers whether its manifest was sent; after that, nothing is removed from an object store.
    draft = assignment.draft

    def write() -> bytes:
        return _AllWritten.dump_json(
            [
                rank.write(assignment, own_tensors)
                for rank, own_tensors in zip(ranks, local_tensors, strict=True)
            ]
        )

    def publish(answers: Sequence[bytes]) -> bytes:
        written = [each for answer in answers for each in _AllWritten.validate_json(answer)]
        scalars = ranks[0].snapshot.scalars
        return leader.publish(draft, assignment, tensors_of_ranks, written, scalars).encode()

    try:
        return rounds.hold(SAVING, write, publish).decode()
    except BaseException:
        if ranks[0].rank == 0:
            draft.abandon()
        raise


def stored_flats(program: Program, files: Mapping[int, str]) -> Iterator[StoredFlat]:
    """Yield the flats of a program for a manifest; ``files`` are the names of the files by rank."""
    pieces: dict[tuple[str, str], list[Piece]] = {}
    saved = saved_quantities(program)
    for rank in range(program.mesh.world_size):
        for part in saved_parts(program, rank, saved):
            piece = Piece(file=files[rank], tensor=part.tensor, start=part.start, stop=part.stop)
            pieces.setdefault((part.flat, part.quantity), []).append(piece)
    quantities: dict[str, list[StoredQuantity]] = {flat.name: [] for flat in program.flats}
    for flat, quantity, held in saved:
        own = sorted(pieces.get((flat.name, quantity), []), key=lambda piece: piece.start)
        stored = StoredQuantity(name=quantity, dtype=held[0][0].dtype.value, pieces=tuple(own))
        quantities[flat.name].append(stored)
    for flat in program.flats:
        yield StoredFlat(
            name=flat.name,
            dtype=flat.dtype.value,
            is_trainable=flat.is_trainable,
            parameters=tuple(
                StoredParameter(name=s.name, offset=s.offset, shape=s.shape, aliases=s.aliases)
                for s in flat.slots
            ),
            quantities=tuple(quantities[flat.name]),
        )


def _checked(own: RankTensor) -> tuple[str, str]:
    return own.name, checksum_of(bytes_of(own.tensor))


def _tensor_name(kind: str, name: str, rank: int) -> str:
    """Return the name of a tensor in the file of the rank that writes it."""
    return f"{kind}.{name}" if rank == 0 else f"{kind}.{name}@{rank}"


def _writers(tensors_of_ranks: Sequence[Sequence[tuple[str, str]]]) -> dict[str, dict[str, int]]:
    writers: dict[str, dict[str, int]] = {}
    for rank, own_tensors in enumerate(tensors_of_ranks):
        for name, checksum in own_tensors:
            writers.setdefault(name, {}).setdefault(checksum, rank)
    return writers


def _stored(
    kind: str,
    writers: Mapping[str, Mapping[str, int]],
    tensors_of_ranks: Sequence[Sequence[tuple[str, str]]],
    files: Mapping[int, str],
    written: Sequence[Written],
) -> Iterator[StoredBuffer]:
    """Yield the tensors of which every rank has its own, each with the ranks whose copies are identical."""
    checksums = [dict(own_tensors) for own_tensors in tensors_of_ranks]
    for name, of_bits in writers.items():
        for checksum, writer in of_bits.items():
            file = written[writer].file
            assert file is not None
            tensor_name = _tensor_name(kind, name, writer)
            stored = next(tensor for tensor in file.tensors if tensor.name == tensor_name)
            yield StoredBuffer(
                name=name,
                dtype=stored.dtype,
                shape=(stored.numel,),
                ranks=tuple(r for r, own in enumerate(checksums) if own[name] == checksum),
                file=files[writer],
                tensor=tensor_name,
            )
