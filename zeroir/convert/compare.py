"""The difference between two checkpoints, tensor by tensor, independent of the flats, files and dtypes that hold them.

A parameter of one is compared with that of the same name (or alias) in the other, for each quantity that both have; a
buffer with the buffer of the same name on the same rank. Values are compared in FP64, slice by slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan, prod, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.state_tree import tensor_names
from zeroir.convert.stored_tensors import Extent, StoredTensors, TensorInFiles
from zeroir.ir.optimizers.catalogue import OWN_STATES

SLICE_NUMEL: Final = 1 << 21
"""The elements compared at once: 16 MB of each side, and 16 MB of their difference, in FP64."""

BUFFER: Final = "buffer"
"""The quantity of module buffers in comparisons."""

_NUMPY_DTYPES: Final[Mapping[str, str]] = {
    "f64": "<f8",
    "f32": "<f4",
    "f16": "<f2",
    "i64": "<i8",
    "i32": "<i4",
    "i16": "<i2",
    "i8": "i1",
    "u64": "<u8",
    "u32": "<u4",
    "u16": "<u2",
    "u8": "u1",
    "bool": "u1",
    "c64": "<f4",
}
"""Real dtypes in numpy; a complex number is two of them. BF16 is missing: it is the upper half of FP32."""


def _float_of_eight_bits(code: int) -> float:
    """Return the number of a code of ``f8_e4m3``: 1 bit for the sign, 4 for the exponent, 3 for the mantissa.

    See table 1 of Micikevicius et al. 2022 (arXiv 2209.05433).
    """
    exponent, mantissa = code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return nan
    size = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
    return -size if code & 128 else size


_FLOATS_OF_EIGHT_BITS: Final = np.array([_float_of_eight_bits(code) for code in range(256)])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKey:
    """A tensor in a comparison: the name of its parameter or buffer, and the quantity (``buffer`` for the latter).

    ``exp_avg`` of ``blocks.0.weight`` is an example. ``ranks`` are those whose buffers were compared, where not all
    have the same values; otherwise it is empty.
    """

    name: str
    quantity: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """The difference between a tensor of the second checkpoint and that of the first.

    ``norm`` and ``first_norm`` are the Euclidean norms of the difference and of the first tensor, and ``largest`` is
    the largest absolute difference of an element. An element has changed if its bits differ, or, between two dtypes,
    its values. Where only one side of an element is NaN, the norms and the largest difference are NaN, too.
    """

    key: TensorKey
    numel: int
    changed_numel: int
    norm: float
    first_norm: float
    largest: float

    @property
    def relative(self) -> float:
        """The norm of the difference divided by that of the first tensor."""
        if self.norm == 0:
            return 0.0
        return self.norm / self.first_norm if self.first_norm else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FactDifference:
    """A scalar, a setting or another fact with its two values; None if a checkpoint lacks it."""

    name: str
    first: JsonValue
    second: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """The comparison of two checkpoints. ``tensors`` includes those without a difference.

    ``incomparable`` are tensors with different shapes, or with layouts or dtypes that cannot be compared.
    ``changed_states`` names the states of ranks that differ, such as their data positions.
    """

    tensors: tuple[TensorDifference, ...]
    only_in_first: tuple[TensorKey, ...]
    only_in_second: tuple[TensorKey, ...]
    incomparable: tuple[TensorKey, ...]
    facts: tuple[FactDifference, ...]
    changed_states: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether training would continue identically from both."""
        return not (
            self.only_in_first
            or self.only_in_second
            or self.incomparable
            or self.facts
            or self.changed_states
            or any(tensor.changed_numel for tensor in self.tensors)
        )


def compare(first: str, second: str) -> CheckpointComparison:
    """Compare the checkpoints at two paths; the checksum of every byte is verified first.

    Raises:
        UserError: if one is not a checkpoint, or is damaged.
    """
    with StoredTensors(first) as a, StoredTensors(second) as b:
        ours = _by_key(a, {})
        theirs = _by_key(b, _names_in(a, b))
        differences: list[TensorDifference] = []
        incomparable: list[TensorKey] = []
        for key in ours.keys() & theirs.keys():
            for ranks, left, right in _pairs(ours[key], theirs[key]):
                pair_key = TensorKey(name=key.name, quantity=key.quantity, ranks=ranks)
                if left.is_comparable(right):
                    differences.append(_difference(pair_key, (a, left.tensor), (b, right.tensor)))
                else:
                    incomparable.append(pair_key)
        order = {key: number for number, key in enumerate(ours)}

        def position(key: TensorKey) -> tuple[int, tuple[int, ...]]:
            return order[TensorKey(name=key.name, quantity=key.quantity)], key.ranks

        return CheckpointComparison(
            tensors=tuple(sorted(differences, key=lambda difference: position(difference.key))),
            only_in_first=tuple(key for key in ours if key not in theirs),
            only_in_second=tuple(key for key in theirs if key not in ours),
            incomparable=tuple(sorted(incomparable, key=position)),
            facts=tuple(_fact_differences(_facts(a.manifest), _facts(b.manifest))),
            changed_states=tuple(
                fact.name for fact in _fact_differences(_states(a.manifest), _states(b.manifest))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A tensor on some ranks; ``layout`` describes the meaning of its elements if its name alone does not."""

    tensor: TensorInFiles
    ranks: tuple[int, ...] = ()
    layout: tuple[object, ...] = ()

    def is_comparable(self, other: _Copy) -> bool:
        dtypes = {self.tensor.dtype, other.tensor.dtype} - {"bf16", "f8_e4m3"}
        return (
            self.tensor.shape == other.tensor.shape
            and self.layout == other.layout
            and dtypes <= _NUMPY_DTYPES.keys()
            and ("c64" not in dtypes or self.tensor.dtype == other.tensor.dtype)
        )


def _names_in(first: StoredTensors, second: StoredTensors) -> dict[str, str]:
    """Map the names of the second checkpoint's parameters and buffers to the first one's where they differ."""
    known = {
        name: buffer.name
        for buffer in first.manifest.buffers
        for name in (buffer.name, *buffer.aliases)
    }
    known |= {name: parameter.name for name, parameter in first.parameter_by_name.items()}
    owners: list[tuple[str, ...]] = [parameter.names for parameter in second.parameters]
    owners += [(buffer.name, *buffer.aliases) for buffer in second.manifest.buffers]
    return {
        names[0]: next((known[name] for name in names if name in known), names[0])
        for names in owners
    }


def _by_key(stored: StoredTensors, names: Mapping[str, str]) -> dict[TensorKey, list[_Copy]]:
    """Return all tensors of a checkpoint by key; ``names`` maps names of the checkpoint to other ones."""
    copies: dict[TensorKey, list[_Copy]] = {}
    for flat in stored.manifest.flats:
        for quantity in flat.quantities:
            if quantity.name in OWN_STATES:
                numel = max((piece.stop for piece in quantity.pieces), default=0)
                copies[TensorKey(name=flat.name, quantity=quantity.name)] = [
                    _Copy(
                        tensor=stored.elements(quantity, 0, (numel,), flat.name),
                        layout=tuple((slot.name, slot.shape) for slot in flat.parameters),
                    )
                ]
    for parameter in stored.parameters:
        for quantity in parameter.flat.quantities:
            tensor = stored.state(parameter, quantity.name)
            if quantity.name not in OWN_STATES and tensor is not None:
                name = names.get(parameter.name, parameter.name)
                copies[TensorKey(name=name, quantity=quantity.name)] = [_Copy(tensor=tensor)]
    for buffer in stored.manifest.buffers:
        shape = buffer.shape
        extent = Extent(file=buffer.file, tensor=buffer.tensor, start=0, stop=prod(shape))
        extents = (extent,) if prod(shape) else ()
        tensor = TensorInFiles(dtype=buffer.dtype, shape=shape, extents=extents)
        key = TensorKey(name=names.get(buffer.name, buffer.name), quantity=BUFFER)
        copies.setdefault(key, []).append(_Copy(tensor=tensor, ranks=buffer.ranks))
    return copies


def _pairs(
    ours: list[_Copy], theirs: list[_Copy]
) -> Iterator[tuple[tuple[int, ...], _Copy, _Copy]]:
    """Yield the copies that some ranks have in both checkpoints; the ranks are given where their copies differ."""
    if len(ours) == len(theirs) == 1:
        yield (), ours[0], theirs[0]
        return
    for left in ours:
        for right in theirs:
            common = tuple(sorted({*left.ranks} & {*right.ranks}))
            if common:
                yield common, left, right


def _difference(
    key: TensorKey,
    first: tuple[StoredTensors, TensorInFiles],
    second: tuple[StoredTensors, TensorInFiles],
) -> TensorDifference:
    numel = first[1].numel
    is_same_dtype = first[1].dtype == second[1].dtype
    changed_numel = 0
    largest = squares = first_squares = np.float64(0)
    for start in range(0, numel, SLICE_NUMEL):
        count = min(SLICE_NUMEL, numel - start)
        left, right = (_slice(*side, start, count) for side in (first, second))
        with np.errstate(all="ignore"):
            ours, theirs = _values(left, first[1].dtype), _values(right, second[1].dtype)
            if is_same_dtype:
                has_changed = (left.reshape(count, -1) != right.reshape(count, -1)).any(axis=1)
            else:
                has_changed = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
            changed_numel += int(np.count_nonzero(has_changed))
            # A complex element consists of two values.
            is_compared = np.repeat(has_changed, len(ours) // count)
            changes = np.abs(theirs[is_compared] - ours[is_compared])
            largest = np.maximum(largest, changes.max(initial=0.0))
            squares += np.dot(changes, changes)
            first_squares += np.dot(ours, ours)
    return TensorDifference(
        key=key,
        numel=numel,
        changed_numel=changed_numel,
        norm=sqrt(squares),
        first_norm=sqrt(first_squares),
        largest=float(largest),
    )


def _slice(
    stored: StoredTensors, tensor: TensorInFiles, start: int, count: int
) -> NDArray[np.uint8]:
    """Return the bytes of consecutive elements."""
    parts = list(stored.slices(tensor.elements(start, (count,))))
    return np.concatenate([np.frombuffer(part, dtype=np.uint8) for part in parts])


def _values(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    if dtype == "bf16":
        return (data.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype == "f8_e4m3":
        return _FLOATS_OF_EIGHT_BITS[data]
    return data.view(_NUMPY_DTYPES[dtype]).astype(np.float64)


def _facts(manifest: Manifest) -> dict[str, JsonValue]:
    """Return the facts other than tensors that training depends on."""
    facts: dict[str, JsonValue] = {"training steps": manifest.step, "seed": manifest.seed}
    if manifest.open_step is not None:
        facts["micro-steps of the open step"] = manifest.open_step.micro_steps
    for scalar in manifest.scalars:
        facts[scalar.name] = scalar.values[0] if len(scalar.values) == 1 else list(scalar.values)
    for group in manifest.groups:
        for name, value in {"algorithm": group.algorithm, **group.settings}.items():
            facts[f"{name} of group {group.name}"] = (
                list(value) if isinstance(value, tuple) else value
            )
    return facts


def _states(manifest: Manifest) -> dict[str, JsonValue]:
    """Return the states of all ranks and of each, with checksums in place of their tensors."""
    checksums = {
        (file.name, tensor.name): tensor.checksum
        for file in manifest.files
        for tensor in file.tensors
    }
    by_name = {tensor.name: tensor.checksum for file in manifest.files for tensor in file.tensors}
    states: dict[str, JsonValue] = {}
    if manifest.shared is not None:
        tensors = [by_name.get(name) for name in tensor_names(manifest.shared)]
        states["the state shared by all ranks"] = [manifest.shared, *tensors]
    for rank in manifest.ranks:
        if rank.state is not None:
            tensors = [checksums.get((rank.file or "", name)) for name in tensor_names(rank.state)]
            states[f"the state of rank {rank.rank}"] = [rank.state, *tensors]
    return states


def _fact_differences(
    first: Mapping[str, JsonValue], second: Mapping[str, JsonValue]
) -> Iterator[FactDifference]:
    for name in {**first, **second}:
        ours, theirs = first.get(name), second.get(name)
        if ours != theirs:
            yield FactDifference(name=name, first=ours, second=theirs)
