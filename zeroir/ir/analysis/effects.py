"""The effects of each op on memory, events and communicators, precise to region and stream.

Liveness, verification, scheduling and simulation use only effects, so an op with correct effects is handled correctly
by all of them. They follow from the declared fields of an op, and are derived once for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.fields import DeclaredField, FieldUse
from zeroir.ir.op_fields import Operand, op_field, operands
from zeroir.ir.ops import Mode


class Effects(NamedTuple):
    """One op's effects.

    ``reads``, ``writes`` and ``accumulates`` (a read and a write that keeps the previous value) are regions; ``allocs``
    and ``frees`` buffer names; ``signals`` and ``waits`` event names; ``comm`` a communicator. ``stream`` is where the
    effects happen; a wait happens on the stream (or the host) that it orders.
    """

    stream: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    accumulates: tuple[Region, ...] = ()
    allocs: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    comm: str | None = None


def effects(op: ops.Op) -> Effects:
    """Return the effects of one op."""
    try:
        return cast("Effects", op.known_effects)
    except AttributeError:
        derived = _EFFECTS[type(op)](op)
        object.__setattr__(op, "known_effects", derived)  # An op is frozen, and so are its effects.
        return derived


# ------------------------------------------------------------------------------------------------------ derivation

_Getter = Callable[[object], tuple[Any, ...]]

_REGIONS: Final = {
    "reads": FieldUse.READ,
    "writes": FieldUse.WRITTEN,
    "accumulates": FieldUse.ACCUMULATED,
}
_NAMES: Final = {
    "allocs": FieldUse.BEGUN,
    "frees": FieldUse.ENDED,
    "signals": FieldUse.SIGNALLED,
    "waits": FieldUse.AWAITED,
}
_MODES: Final = {FieldUse.WRITTEN: Mode.WRITE, FieldUse.ACCUMULATED: Mode.ACCUMULATE}


def _effects_of(kind: type[ops.Op]) -> Callable[[ops.Op], Effects]:
    """Return a function from an op of that class to its effects, as the fields declare them."""
    getters: dict[str, Callable[[object], object]] = {}
    for use, effect in ((FieldUse.STREAM, "stream"), (FieldUse.COMM, "comm")):
        if (field := op_field(kind, use)) is not None:
            getters[effect] = attrgetter(field.name)
    for effect, use in _NAMES.items():
        if (field := op_field(kind, use)) is not None:
            getters[effect] = _values(field)
    for effect, use in _REGIONS.items():
        parts = [part for operand in operands(kind) if (part := _regions(operand, use))]
        if parts:
            getters[effect] = parts[0] if len(parts) == 1 else _joined(parts)
    places = tuple((Effects._fields.index(effect), get) for effect, get in getters.items())
    nothing = Effects(stream="")

    def derived(op: ops.Op) -> Effects:
        values: list[Any] = list(nothing)
        for place, get in places:
            values[place] = get(op)
        return tuple.__new__(Effects, values)  # as _make does, at half the cost

    return derived


def _regions(operand: Operand, use: FieldUse) -> _Getter | None:
    """Return a function from an op to the regions of one operand with that use; None if none can have it."""
    field, path = operand.field, operand.path
    if operand.use is not FieldUse.RESULT:
        if operand.use is not use:
            return None
        values = _values(field)
        if not path:
            return values
        read = attrgetter(path)
        return lambda op: tuple(map(read, values(op)))
    if use is FieldUse.READ:
        return None
    wanted = _MODES[use]
    if not path:
        value = attrgetter(field.name)
        return lambda op: (value(op),) if _mode(op) is wanted else ()
    values, read = _values(field), attrgetter(path)
    return lambda op: tuple([read(item) for item in values(op) if _mode(item) is wanted])


_mode = attrgetter("mode")


def _values(field: DeclaredField) -> _Getter:
    """Return a function from an op to the values of a field, without those that are None."""
    value = attrgetter(field.name)
    if field.is_tuple:
        if field.is_optional:
            return lambda op: tuple([item for item in value(op) if item is not None])
        return value
    if field.is_optional:
        return lambda op: () if (item := value(op)) is None else (item,)
    return lambda op: (value(op),)


def _joined(parts: Sequence[_Getter]) -> _Getter:
    return lambda op: tuple([region for part in parts for region in part(op)])


_EFFECTS: Final = {kind: _effects_of(kind) for kind in ops.OP_CLASSES}
