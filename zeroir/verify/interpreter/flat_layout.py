"""The places of parameters and padding in flats; contents as abstract values, and gradients in flat coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from zeroir.ir.contents import (
    GRAD,
    Content,
    FlatContent,
    Micro,
    NamedContent,
    SnapshotContent,
    WeightContent,
    Zeros,
)
from zeroir.ir.program import MICRO_STEP, Holding, Program, Slot
from zeroir.verify.interpreter.domain import (
    ALL_TERM,
    PAST_TERM,
    STALE,
    UNKNOWN_GUESS,
    ZERO,
    Cover,
    Elements,
    FlatKey,
    Gradient,
    NamedKey,
    PieceList,
    Pieces,
    Slice,
    Strides,
    Term,
    Value,
    Weight,
    current_term,
    opened,
    rebased,
    simplify,
    spread,
    window,
)
from zeroir.verify.interpreter.intervals import IntervalMap


class FlatLayout:
    """The places of parameters and padding in each flat."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._slots: dict[str, IntervalMap[Slot | None]] = {}
        self._groups: dict[str, IntervalMap[str | None]] = {}
        self.sizes = {axis.name: axis.size for axis in program.mesh.axes}

    def cuts(self, flat: str) -> list[tuple[int, int, Slot | None]]:
        """Return the flat's elements in order: ``(start, stop, slot)``, with None for padding."""
        return self.between(flat, 0, self._program.flat_by_name[flat].padded_numel)

    def between(self, flat: str, start: int, stop: int) -> list[tuple[int, int, Slot | None]]:
        """Return the cuts of ``[start, stop)``; elements outside the flat have its last slot, or padding."""
        slots = self._slots.get(flat)
        if slots is None:
            declared = self._program.flat_by_name[flat]
            slots = self._slots[flat] = IntervalMap(declared.padded_numel, None)
            for slot in declared.slots:
                slots.write(slot.offset, slot.offset + slot.numel, slot)
        inside = slots.read(max(start, 0), min(stop, slots.numel))
        # No element outside the flat has the right value, so none may be left unchecked.
        return inside if inside or start >= stop else [(start, stop, slots.values[-1])]

    def covered(self, cover: Cover) -> Iterator[tuple[int, int, Slot]]:
        """Yield the parts of parameters among the elements that all ranks cover together: ``(start, stop, slot)``."""
        for start, stop in cover.intervals(self.sizes):
            for a, b, slot in self.between(cover.flat, start, stop):
                if slot is not None:
                    yield a, b, slot

    def grouped(self, cover: Cover) -> Iterator[tuple[int, int, str | None, Slot]]:
        """Yield the parts of parameters among the covered elements, split by group: ``(start, stop, group, slot)``.

        The group is None if no group contains the elements.
        """
        for start, stop, slot in self.covered(cover):
            for a, b, group in self._groups_of(cover.flat).read(start, stop):
                yield a, b, group, slot

    def _groups_of(self, flat: str) -> IntervalMap[str | None]:
        if not self._groups:
            for declared in self._program.flats:
                self._groups[declared.name] = IntervalMap(declared.padded_numel, None)
            for group in self._program.groups:
                for name, start, stop in group.intervals:
                    self._groups[name].write(start, stop, group.name)
        return self._groups[flat]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes over which a gradient must be summed, those with more than one rank, in that order: innermost first.

        Another order of sums would round differently.
        """
        return tuple(name for name, size in reversed(self.sizes.items()) if size > 1)

    @cached_property
    def has_past(self) -> bool:
        """Whether micro-steps come before the last one."""
        return MICRO_STEP in self._program.section_by_name

    # ------------------------------------------------------------------------------------------ contents as values

    def pieces(self, content: Content, numel: int) -> PieceList:
        """Return the values of a region of ``numel`` local elements that has this content at a section's entry."""
        match content:
            case Zeros():
                return [(0, numel, ZERO)]
            case NamedContent():
                return [(0, numel, Elements(NamedKey(content.name, content.version)))]
            case WeightContent():
                return self._weights(content, numel)
            case SnapshotContent():
                return [(0, numel, STALE)]
            case FlatContent():
                strides = self.strides(content, numel)
                if content.quantity == GRAD:
                    array = self._gradients(content)
                    if not strides:
                        return window(array, content.offset, numel)
                    value: Value = Slice(array, content.offset, strides)
                    return [(0, numel, simplify(value, numel, self.sizes))]
                guess = UNKNOWN_GUESS if content.guessed else None
                key = FlatKey(content.quantity, content.flat, content.version, guess)
                return [(0, numel, Elements(key, content.offset, strides))]

    def beside(self, holding: Holding, resting: Content) -> Content:
        """Return the content outside the own slice that a holding describes.

        Other ranks' slices of a gradient are stale, with padding of zeros; any other content is the resting one.
        """
        content = holding.content
        axis = holding.region.shard
        if isinstance(content, FlatContent) and content.quantity == GRAD and content.shard == axis:
            return replace(content, shard=None, reduced=(), micro=Micro.STALE)
        return resting

    def strides(self, content: FlatContent, numel: int) -> Strides:
        """Return the distance by which the elements of a content move with each coordinate."""
        if content.shard is None or self.sizes[content.shard] == 1:
            return ()
        return ((content.shard, numel if content.stride is None else content.stride),)

    def reduced(self, content: FlatContent | WeightContent) -> tuple[str, ...]:
        """Return the axes of more than one rank over which a gradient or a weight is summed, in that order."""
        return tuple(axis for axis in self.axes if axis in content.reduced)

    def _weights(self, content: WeightContent, numel: int) -> PieceList:
        """Return one weight, or one for each micro-batch of the section."""
        summed = self.reduced(content)
        match content.micro:
            case Micro.ALL:
                return [(0, numel, Weight((Term(ALL_TERM, summed, 1),)))]
            case Micro.CURRENT:
                terms = (Term(current_term(index), summed, 1) for index in range(numel))
                return [(index, index + 1, Weight((term,))) for index, term in enumerate(terms)]
            case Micro.PAST:
                past = Weight((Term(PAST_TERM, summed, 1),)) if self.has_past else ZERO
                return [(0, numel, past)]
            case Micro.STALE:
                return [(0, numel, STALE)]

    def _gradients(self, content: FlatContent) -> Pieces:
        summed = self.reduced(content)
        value: Value
        if content.micro is Micro.ALL:
            value = Gradient(content.flat, (Term(ALL_TERM, summed, 1),))
        elif content.micro is Micro.PAST:
            # The first micro-step starts with zeros, each later one with the sum so far.
            past = Gradient(content.flat, (Term(PAST_TERM, summed, 1),))
            value = past if self.has_past else ZERO
        else:
            value = STALE
        return tuple(
            (start, stop, ZERO if slot is None else value)
            for start, stop, slot in self.cuts(content.flat)
        )

    # ------------------------------------------------------------------------------------- gradients on their flat

    def on_flat(
        self, pieces: PieceList, numel: int, shift: int, strides: Strides
    ) -> list[tuple[int, int, Value]] | None:
        """Return the values of all ranks together, at positions that are flat elements.

        The pieces cover ``[0, numel)``, and position p is flat element ``p + shift + Σ stride × coordinate``. Return
        None where slices of different ranks overlap.
        """
        if not strides:
            return rebased(opened(pieces), -shift)
        length = numel
        spreads = list(pieces)
        for axis, stride in sorted(strides, key=lambda item: item[1]):
            if stride < length:
                return None
            size = self.sizes[axis]
            spreads = spread(spreads, axis, size, length, stride)
            length = stride * (size - 1) + length
        return rebased(spreads, -shift)
