"""What was done to deferred tensors, and any one of them made of it: see ``zeroir.runtime.deferred``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroir.runtime.draws import Draws, Moment, call


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A tensor on a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.size)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements stand in a row, the last dimension's side by side."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recorded op. Tensors among the arguments are geometries of deferred storages, or real copies.

    An op that draws does so at the moment ``before``, and torch's own generator is at ``after`` then.
    """

    function: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: frozenset[int]
    made: tuple[Geometry | None, ...]
    replaces: int | None
    before: Moment | None
    after: Moment | None


@dataclass(slots=True)
class Recording:
    """What was done to deferred tensors, in order."""

    draws: Draws
    _entries: list[Entry] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    # A storage's address is its name, so none may die while the recording lives.
    _alive: dict[int, Tensor] = field(default_factory=dict)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is deferred."""
        return tensor.is_meta and storage_of(tensor) in self._writers

    def position(self, tensor: Tensor) -> int:
        """Where in the recording the first random op stands that a tensor depends on; before all others if none."""
        if not self.knows(tensor):
            return -1
        needed = self._needed(storage_of(tensor))
        return next((index for index in needed if self._entries[index].before is not None), -1)

    def materialise(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """The tensor's values, on the CPU; a real tensor as it is.

        They may be made in ``into``, contiguous and of the same dtype and numel, which then is what the result shows.
        """
        if not tensor.is_meta:
            return tensor.detach()
        if not self.knows(tensor):
            raise RuntimeError("a tensor on the meta device was made outside the recording")
        geometry = geometry_of(tensor)
        made: dict[int, _Home] = {}
        if into is not None and is_whole(tensor):
            start = int(into.storage_offset()) * into.dtype.itemsize
            made[geometry.storage] = _Home(storage=into.untyped_storage(), start_bytes=start)
        begun: set[int] = set()
        with torch.no_grad():
            for index in self._needed(geometry.storage):
                self._replay(self._entries[index], made, begun)
        if geometry.storage not in begun:
            raise RuntimeError("a tensor has no elements yet")
        return _on(geometry, made)

    def note(self, entry: Entry, writes: dict[int, Tensor]) -> None:
        """Append an op that writes the storages of the given tensors."""
        index = len(self._entries)
        self._entries.append(entry)
        for storage, tensor in writes.items():
            self._writers.setdefault(storage, []).append(index)
            self._alive[storage] = tensor

    def _needed(self, storage: int) -> list[int]:
        """The ops that the storage's values depend on, in order."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        demands = [(storage, len(self._entries))]
        while demands:
            demand = demands.pop()
            if demand in seen:
                continue
            seen.add(demand)
            wanted, before = demand
            for index in reversed(self._writers.get(wanted, [])):
                if index >= before:
                    continue
                needed.add(index)
                entry = self._entries[index]
                demands.extend((read, index) for read in entry.reads if read != wanted)
                if entry.replaces == wanted:
                    break
        return sorted(needed)

    def _replay(self, entry: Entry, made: dict[int, _Home], begun: set[int]) -> None:
        def real(value: object) -> object:
            if not isinstance(value, Geometry):
                return value
            if value.storage not in made:  # its first writer replaces it whole
                nbytes = self._alive[value.storage].untyped_storage().nbytes()
                made[value.storage] = _Home.of(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            begun.add(value.storage)
            return _on(value, made)

        def run(generator: torch.Generator) -> object:
            return call(entry.function, args, kwargs, generator)

        args = tuple(mapped(real, arg) for arg in entry.args)
        kwargs = {name: mapped(real, value) for name, value in entry.kwargs.items()}
        if entry.before is None:
            result: object = entry.function(*args, **kwargs)
        else:
            result = self.draws.carry_out(entry.before, entry.after, run)
        for geometry, tensor in zip(entry.made, tensors_in(result), strict=False):
            if geometry is None or geometry.storage in begun:
                continue
            is_alike = tensor.stride() == geometry.stride and tensor.storage_offset() == 0
            dense = tensor
            if not is_alike:
                dense = torch.empty_strided(
                    geometry.size, geometry.stride, dtype=geometry.dtype, device="cpu"
                )
                dense.copy_(tensor)
            made[geometry.storage] = _Home.of(dense)
            begun.add(geometry.storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    """Real memory of a deferred storage: bytes of a storage from ``start_bytes`` on."""

    storage: torch.UntypedStorage
    start_bytes: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> _Home:
        return cls(storage=tensor.untyped_storage())


def tensors_in(*values: object) -> list[Tensor]:
    """The tensors among values, and in the lists and mappings among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def mapped(function: Callable[[object], object], value: object) -> object:
    """A value of an op with the function applied to its leaves: it is one, or a list of them."""
    if isinstance(value, list | tuple):
        return [mapped(function, one) for one in value]
    return function(value)


def storage_of(tensor: Tensor) -> int:
    """What a recording calls a tensor's storage."""
    address: int = tensor.untyped_storage()._cdata
    return address


def geometry_of(tensor: Tensor) -> Geometry:
    """Where a tensor lies on its storage."""
    return Geometry(
        storage=storage_of(tensor),
        dtype=tensor.dtype,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )


def _on(geometry: Geometry, made: dict[int, _Home]) -> Tensor:
    home = made[geometry.storage]
    offset = geometry.offset + home.start_bytes // geometry.dtype.itemsize
    empty = torch.empty(0, dtype=geometry.dtype, device="cpu")
    return empty.set_(home.storage, offset, geometry.size, geometry.stride)


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in a row."""
    numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.is_contiguous() and tensor.numel() == numel
