"""What is to be placed in one block of memory: buffers, their lives, and which of them may meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zeroir.memory.lifetimes import Lifetimes

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_MOST_KEPT: Final = 2_000
"""Whom a buffer may meet is remembered where there are no more buffers than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Buffers by number, in the order of their first lives, and their lives, in the order of their beginnings.

    Of each buffer: its name, its bytes and how long its lives last in all. Of each life: its buffer, the stream that
    begins it (a number among those that begin any), the moment when it begins, and ``until`` when every stream knows
    that it ended; ``free[s]`` is when the s-th stream does. The lives of buffer ``b`` are ``lives[b]``. ``stop`` is the
    end of the last section.
    """

    names: Sequence[str]
    sizes: Ints
    spans: Ints
    buffer_of: Ints
    streams: Ints
    firsts: Ints
    free: Sequence[Ints]
    untils: Ints
    lives: Sequence[Sequence[int]]
    stop: int

    @classmethod
    def of(cls, found: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> Field:
        """Prepare these lives; ``sizes`` are the bytes of every life."""
        chosen = np.array(lives)
        firsts = np.array(found.firsts)[chosen]
        used, streams = np.unique(np.array(found.streams)[chosen], return_inverse=True)
        free = [np.array(found.free_from[stream])[chosen] for stream in used.tolist()]
        names: dict[str, int] = {}
        buffer_of = np.array([names.setdefault(found.buffers[i], len(names)) for i in lives])
        bytes_of = np.zeros(len(names), dtype=np.int64)
        bytes_of[buffer_of] = np.array(sizes)[chosen]
        spans = np.zeros(len(names), dtype=np.int64)
        np.add.at(spans, buffer_of, np.array(found.lasts)[chosen] - firsts)
        by_buffer = np.argsort(buffer_of, kind="stable").tolist()
        ends = np.cumsum(np.bincount(buffer_of)).tolist()
        return cls(
            names=list(names),
            sizes=bytes_of,
            spans=spans,
            buffer_of=buffer_of,
            streams=streams,
            firsts=firsts,
            free=free,
            untils=np.maximum.reduce(free),
            lives=[by_buffer[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)],
            stop=found.stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Whom each buffer may meet; those apart, by ``is_apart``, are nobody's neighbours.

    Of two lives the later may meet the earlier where the stream that begins it does not know that one ended.
    ``begun[s]`` are the lives that the s-th stream begins and ``moments[s]`` when; ``known[s]`` is, for each life, when
    the stream knows that this and all lives before it ended.
    """

    of_field: Field
    is_apart: Bools
    begun: Sequence[Ints]
    moments: Sequence[Ints]
    known: Sequence[Ints]
    kept: dict[int, Ints] = field(default_factory=dict)

    @classmethod
    def of(cls, field: Field, is_apart: Bools) -> Neighbours:
        """Prepare to be asked."""
        begun = [np.flatnonzero(field.streams == stream) for stream in range(len(field.free))]
        counts = ~is_apart[field.buffer_of]
        return cls(
            of_field=field,
            is_apart=is_apart,
            begun=begun,
            moments=[field.firsts[lives] for lives in begun],
            known=[np.maximum.accumulate(np.where(counts, free, 0)) for free in field.free],
        )

    def __call__(self, buffer: int) -> Ints:
        """The numbers of the buffers that may meet this one, in order."""
        found = self.kept.get(buffer)
        if found is None:
            found = self._find(buffer)
            if len(self.of_field.names) <= _MOST_KEPT:
                self.kept[buffer] = found
        return found

    def _find(self, buffer: int) -> Ints:
        of, parts = self.of_field, []
        for life in of.lives[buffer]:
            stream, first = int(of.streams[life]), int(of.firsts[life])
            start = int(self.known[stream][:life].searchsorted(first, side="right"))
            parts.append(np.flatnonzero(of.free[stream][start:life] > first) + start)
            for begun, moments, free in zip(self.begun, self.moments, of.free, strict=True):
                start = int(begun.searchsorted(life, side="right"))
                parts.append(begun[start : int(moments.searchsorted(free[life], side="left"))])
        found: Ints = of.buffer_of[np.concatenate(parts)]
        return np.unique(found[(found != buffer) & ~self.is_apart[found]])
