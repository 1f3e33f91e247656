"""The mapping from the elements of a program's buffers to the tensors of a checkpoint, parameter by parameter.

A parameter is found by its name or an alias, whichever flat of the checkpoint contains it. So the program that saved it
may have had other units, another stage, mesh or precision.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeroir.checkpoint.consistency import as_flat
from zeroir.checkpoint.manifest import MASTER as TRAINED
from zeroir.checkpoint.manifest import Manifest, Piece, StoredBuffer, StoredFlat
from zeroir.errors import UserError
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import EMA, MASTER, PARAM, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.forms import in_another_form
from zeroir.ir.own_coordinates import extents
from zeroir.ir.program import Program, Slot
from zeroir.runtime.checkpoint.parts import elements_on


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredElements:
    """Elements ``[start, stop)`` of a tensor of a file, and the index in a buffer where they belong."""

    file: str
    tensor: str
    dtype: DType
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """The place of a parameter in a quantity of a checkpoint's flat: its index in the flat, and its first element."""

    flat: str
    quantity: str
    index: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Elements that are contiguous both in a quantity of the checkpoint, from ``start`` on, and in a buffer.

    ``last`` is the index of the last parameter among them.
    """

    flat: str
    quantity: str
    last: int
    start: int
    stop: int
    offset: int

    def continues_at(self, place: StoredPlace, start: int, offset: int) -> bool:
        """Return whether the next parameter follows in both, with nothing but padding between."""
        return (
            (place.flat, place.quantity, place.index) == (self.flat, self.quantity, self.last + 1)
            and start - self.start == offset - self.offset
            and start >= self.stop
        )


class StoredParameters:
    """The parameters of a checkpoint by name.

    ``path`` is for messages; ``weights_only`` leaves out optimizer states.
    """

    def __init__(self, manifest: Manifest, path: str, *, weights_only: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self._weights_only = weights_only
        self._flats = {flat.name: flat for flat in manifest.flats}
        self._homes = {
            name: (flat, index)
            for flat in manifest.flats
            for index, parameter in enumerate(flat.parameters)
            for name in (parameter.name, *parameter.aliases)
        }
        self._starts: dict[tuple[str, str], list[int]] = {}
        self._pieces: dict[tuple[str, str], tuple[DType, list[Piece]]] = {}

    @property
    def names(self) -> Iterable[str]:
        """The names and aliases of all parameters."""
        return self._homes

    def home(self, slot: Slot) -> tuple[StoredFlat, int] | None:
        """Return the checkpoint's flat that contains a parameter, and its index there; None where there is none."""
        return next((self._homes[n] for n in (slot.name, *slot.aliases) if n in self._homes), None)

    def as_buffer(self, name: str) -> StoredBuffer | None:
        """Return a parameter that has a flat and a tensor of its own as a model buffer; None where there is none."""
        flat, _ = self._homes.get(name, (None, 0))
        if flat is None or len(flat.parameters) > 1:
            return None
        trained = next((q for q in flat.quantities if q.name == TRAINED), None)
        if trained is None or len(trained.pieces) != 1:
            return None
        return StoredBuffer(
            name=name,
            dtype=trained.dtype,
            shape=flat.parameters[0].shape,
            ranks=(),
            file=trained.pieces[0].file,
            tensor=trained.pieces[0].tensor,
        )

    def quantities(self, flat: StoredFlat) -> frozenset[str]:
        """Return the names of the quantities that the checkpoint has of a flat."""
        names = frozenset(quantity.name for quantity in flat.quantities)
        return names & {TRAINED, EMA} if self._weights_only else names

    def place(self, slot: Slot, quantity: str) -> StoredPlace | None:
        """Return where the checkpoint has a quantity of a parameter; None where the quantity keeps its initial values.

        Parameters and master weights are saved as one quantity. An average that was not saved starts from the
        parameter.
        """
        home = self.home(slot)
        if home is None:
            return None
        flat, index = home
        stored = self.quantities(flat)
        if quantity in (PARAM, MASTER) or (quantity == EMA and EMA not in stored):
            quantity = TRAINED
        if quantity not in stored:
            return None
        key = flat.name, quantity
        if key not in self._starts:
            self._starts[key] = [extent.offset for extent in extents(quantity, as_flat(flat))]
        return StoredPlace(
            flat=flat.name, quantity=quantity, index=index, start=self._starts[key][index]
        )

    def has(self, slot: Slot, quantity: str) -> bool:
        """Return whether the checkpoint has a quantity of a parameter, possibly as a state of another width."""
        return self.place(slot, quantity) is not None or any(
            self.place(slot, other) is not None for other in in_another_form(quantity)
        )

    def of_parameter(self, slot: Slot, quantity: str, wanted: range) -> Iterator[StoredElements]:
        """Yield elements ``wanted`` of a parameter's quantity, indexed from the parameter's first one.

        ``offset`` in the result is relative to the first wanted element. Yield nothing where the checkpoint lacks the
        quantity.

        Raises:
            UserError: where its manifest omits elements of a quantity that it has.
        """
        place = self.place(slot, quantity)
        if place is not None and wanted:
            run = _Run(
                flat=place.flat,
                quantity=place.quantity,
                last=place.index,
                start=place.start + wanted.start,
                stop=place.start + wanted.stop,
                offset=0,
            )
            yield from self._stored(run)

    def elements(
        self, program: Program, buffer: Buffer, content: FlatContent, rank: int
    ) -> Iterator[StoredElements]:
        """Yield the elements of parameters that a buffer holds on a rank and that the checkpoint has.

        Raises:
            UserError: where its manifest omits elements of a quantity that it has.
        """
        held = elements_on(program, buffer, content, rank)
        run: _Run | None = None
        for extent in extents(content.quantity, program.flat_by_name[content.flat]):
            start = extent.offset
            first, stop = max(start, held.start), min(start + extent.numel, held.stop)
            place = self.place(extent.slot, content.quantity) if first < stop else None
            if place is None:
                continue
            source, offset = place.start + first - start, first - held.start
            is_next = run is not None and run.continues_at(place, source, offset)
            if run is not None and not is_next:
                yield from self._stored(run)
            run = _Run(
                flat=place.flat,
                quantity=place.quantity,
                last=place.index,
                start=run.start if run is not None and is_next else source,
                stop=source + stop - first,
                offset=run.offset if run is not None and is_next else offset,
            )
        if run is not None:
            yield from self._stored(run)

    def _stored(self, run: _Run) -> Iterator[StoredElements]:
        dtype, pieces = self._sorted_pieces(run.flat, run.quantity)
        at = run.start
        index = bisect_right(pieces, at, key=lambda piece: piece.start) - 1
        while at < run.stop:
            piece = pieces[index] if 0 <= index < len(pieces) else None
            if piece is None or not piece.start <= at < piece.stop:
                raise UserError(
                    f"The manifest of '{self.path}' has no element {at} of {run.quantity} of {run.flat}: use another "
                    "checkpoint."
                )
            stop = min(piece.stop, run.stop)
            yield StoredElements(
                file=piece.file,
                tensor=piece.tensor,
                dtype=dtype,
                start=at - piece.start,
                stop=stop - piece.start,
                offset=run.offset + at - run.start,
            )
            at = stop
            index += 1

    def _sorted_pieces(self, flat: str, quantity: str) -> tuple[DType, list[Piece]]:
        key = flat, quantity
        if key not in self._pieces:
            stored = next(q for q in self._flats[flat].quantities if q.name == quantity)
            self._pieces[key] = (
                self.dtype(stored.dtype, f"{quantity} of {flat}"),
                sorted(stored.pieces, key=lambda piece: piece.start),
            )
        return self._pieces[key]

    def dtype(self, name: str, what: str) -> DType:
        """Return the dtype that the manifest names.

        Raises:
            UserError: where programs have no such dtype.
        """
        try:
            return DType(name)
        except ValueError:
            raise UserError(
                f"'{self.path}' has {what} in the dtype {name}, which no program computes with: convert it first."
            ) from None
