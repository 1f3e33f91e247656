"""The buffers that bounds limit, and their groups, as ``zeroir.ir.bounds`` defines them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.bounds import BoundKind
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.ops import Op

_OF_ROLE: Final = {Role.GATHERED: BoundKind.FULL_PARAMETERS, Role.PAGE: BoundKind.PAGES}
_STAGING: Final = {
    Space.DEVICE: BoundKind.DEVICE_STAGING,
    Space.HOST: BoundKind.HOST_STAGING,
}
_OF_FIRST_READER: Final = frozenset(
    {BoundKind.FULL_PARAMETERS, BoundKind.DISK_STAGING, *_STAGING.values()}
)


def bounded_buffers(buffers: Iterable[Buffer], body: Iterable[Op]) -> Mapping[str, BoundKind]:
    """Return the buffers of a program to which bounds can apply, by name; ``body`` are its ops."""
    temporary = {buffer.name: buffer for buffer in buffers if not buffer.is_persistent}
    kinds: dict[str, BoundKind] = {}
    for name, buffer in temporary.items():
        if buffer.role in _OF_ROLE:
            kinds[name] = _OF_ROLE[buffer.role]
        elif buffer.role in (Role.SAVED, Role.ACTIVATION) and buffer.space is Space.DEVICE:
            kinds[name] = BoundKind.ACTIVATIONS
    for op in body:
        match op:
            case ops.Compute():
                for destination in op.destinations:
                    if destination is not None and destination.gradient is not None:
                        name = destination.view.region.buffer
                        if name in temporary:
                            kinds[name] = BoundKind.FULL_GRADIENTS
            case ops.Transfer():
                for name in (op.source.buffer, op.destination.buffer):
                    moved = temporary.get(name)
                    if moved is None or moved.role is not Role.STAGING:
                        continue
                    staging = _STAGING.get(moved.space)
                    if staging is BoundKind.HOST_STAGING and isinstance(op, ops.Load | ops.Store):
                        kinds[name] = BoundKind.DISK_STAGING
                    elif staging is not None:
                        kinds.setdefault(name, staging)
            case _:
                pass
    return kinds


def groups(body: Sequence[Op], kinds: Mapping[str, BoundKind]) -> Mapping[int, int]:
    """Return for each ``release`` of a bounded buffer, by its index, the index of the op that identifies the group.

    A release of a buffer without such an op in the section is a group of its own.
    """
    makers: dict[str, int] = {}
    group_of_release: dict[int, int] = {}
    for index, op in enumerate(body):
        match op:
            case ops.Wait():
                pass
            case ops.Alloc():
                makers.pop(op.buffer, None)
            case ops.Release():
                if op.buffer in kinds:
                    group_of_release[index] = makers.pop(op.buffer, index)
            case _:
                _note_makers(index, op, kinds, makers)
    return group_of_release


def _note_makers(
    index: int, op: Op, kinds: Mapping[str, BoundKind], makers: dict[str, int]
) -> None:
    effect = effects(op)
    read = {region.buffer for region in effect.reads} & kinds.keys()
    for name in read:
        if kinds[name] in _OF_FIRST_READER:
            makers.setdefault(name, index)
    for region in (*effect.writes, *effect.accumulates):
        match kinds.get(region.buffer):
            case BoundKind.FULL_GRADIENTS:
                makers[region.buffer] = index
            case BoundKind.ACTIVATIONS:
                makers.setdefault(region.buffer, index)
            case BoundKind.DEVICE_STAGING | BoundKind.HOST_STAGING | BoundKind.DISK_STAGING:
                if not isinstance(op, ops.Transfer):
                    makers.setdefault(region.buffer, index)
            case _:
                pass
    if isinstance(op, ops.ReduceScatter):
        reduced = [name for name in read if kinds[name] is BoundKind.FULL_GRADIENTS]
        last = max((makers.get(name, index) for name in reduced), default=index)
        makers.update(dict.fromkeys(reduced, last))
