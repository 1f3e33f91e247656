"""The uses of buffers in a section: readers, writers and lives of each, and the op that computes the loss.

Ops are identified by their indices in the section's body. Everything is derived from the ops' effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.buffers import Buffer, whole
from zeroir.ir.ops import Cast, Compute, Mode, Op
from zeroir.ir.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBuffer:
    """A temporary buffer that has one life in a section and is filled once, completely, by a result of a compute op.

    ``writer`` is that op, ``output`` the index of the result among the op's, and ``readers`` the ops that read it.
    """

    buffer: Buffer
    writer: int
    output: int
    readers: frozenset[int]


class SectionView:
    """Readers, writers and lives of the buffers of one section; each part is computed at its first use."""

    def __init__(self, program: Program, body: Sequence[Op]) -> None:
        self._program = program
        self.body = body

    @cached_property
    def effects(self) -> tuple[Effects, ...]:
        """The effects of each op."""
        return tuple(effects(op) for op in self.body)

    @cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """For each buffer the ops that read any of it, in order; accumulating is both reading and writing."""
        return _by_buffer(
            [region.buffer for region in (*effect.reads, *effect.accumulates)]
            for effect in self.effects
        )

    @cached_property
    def writers(self) -> Mapping[str, tuple[int, ...]]:
        """For each buffer the ops that write any of it, in order; accumulating is both reading and writing."""
        return _by_buffer(
            [region.buffer for region in (*effect.writes, *effect.accumulates)]
            for effect in self.effects
        )

    @cached_property
    def allocs(self) -> Mapping[str, tuple[int, ...]]:
        """For each temporary buffer the ops that begin it, in order."""
        return _by_buffer(effect.allocs for effect in self.effects)

    @cached_property
    def releases(self) -> Mapping[str, tuple[int, ...]]:
        """For each temporary buffer the ops that end it, in order."""
        return _by_buffer(effect.frees for effect in self.effects)

    @cached_property
    def computes(self) -> Mapping[int, Compute]:
        """The ops that call segments, in order."""
        return {index: op for index, op in enumerate(self.body) if isinstance(op, Compute)}

    @cached_property
    def loss(self) -> int | None:
        """The last compute op that computes the loss, None if there is none. It ends the forward.

        The loss may be copied from the destination of that op.
        """
        names = {self._program.loss or ""}
        for op in reversed(self.body):
            if isinstance(op, Cast) and op.destination.buffer in names:
                names.add(op.source.buffer)
        written = {index for name in names for index in self.writers.get(name, ())}
        return max(written & self.computes.keys(), default=None)

    @property
    def backward(self) -> range:
        """The ops after the loss; none if the section computes no loss."""
        return range(len(self.body) if self.loss is None else self.loss + 1, len(self.body))

    @cached_property
    def filled(self) -> Mapping[str, FilledBuffer]:
        """The temporary buffers that one result of one compute op fills, by name, in the order of those results."""
        filled: dict[str, FilledBuffer] = {}
        for index, op in self.computes.items():
            for output, destination in enumerate(op.destinations):
                if destination is None or destination.mode is not Mode.WRITE:
                    continue
                name = destination.view.region.buffer
                buffer = self._program.buffer_by_name[name]
                is_filled = destination.view.region == whole(buffer)
                lives = len(self.allocs.get(name, ())), len(self.releases.get(name, ()))
                if is_filled and lives == (1, 1) and self.writers[name] == (index,):
                    filled[name] = FilledBuffer(
                        buffer=buffer,
                        writer=index,
                        output=output,
                        readers=frozenset(self.readers.get(name, ())),
                    )
        return filled


def _by_buffer(names_of_ops: Iterable[Sequence[str]]) -> Mapping[str, tuple[int, ...]]:
    """Return for each buffer the indices of the ops that name it, each once."""
    indices: dict[str, list[int]] = {}
    for index, names in enumerate(names_of_ops):
        for name in dict.fromkeys(names):
            indices.setdefault(name, []).append(index)
    return {name: tuple(of_name) for name, of_name in indices.items()}
