"""Interpolation to sizes that depend on dims, by the operators that eager PyTorch calls.

``torch.nn.functional.interpolate`` asks for plain numbers, or computes with other operators, whose bits differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.types import IntLikeType

_Number = TypeVar("_Number", float, IntLikeType)

_LARGEST_DENOMINATOR: Final = 1 << 10

_aten = torch.ops.aten

_of_torch: Callable[..., Tensor] = F.interpolate

_WITHOUT_CORNERS: Final = ("nearest", "nearest-exact", "area")

_OPERATORS: Final[Mapping[tuple[str, bool, int], OpOverload]] = {
    ("nearest", False, 1): _aten.upsample_nearest1d.default,
    ("nearest", False, 2): _aten.upsample_nearest2d.default,
    ("nearest", False, 3): _aten.upsample_nearest3d.default,
    ("nearest-exact", False, 1): _aten._upsample_nearest_exact1d.default,
    ("nearest-exact", False, 2): _aten._upsample_nearest_exact2d.default,
    ("nearest-exact", False, 3): _aten._upsample_nearest_exact3d.default,
    ("linear", False, 1): _aten.upsample_linear1d.default,
    ("bilinear", False, 2): _aten.upsample_bilinear2d.default,
    ("bilinear", True, 2): _aten._upsample_bilinear2d_aa.default,
    ("trilinear", False, 3): _aten.upsample_trilinear3d.default,
    ("bicubic", False, 2): _aten.upsample_bicubic2d.default,
    ("bicubic", True, 2): _aten._upsample_bicubic2d_aa.default,
}
"""The operators by mode, antialiasing, and the number of dimensions that change."""

_FORWARDS: Final = frozenset(_OPERATORS.values())
_BACKWARDS: Final = frozenset(
    getattr(_aten, f"{op._schema.name.removeprefix('aten::')}_backward").default for op in _FORWARDS
)


def resized_shape(func: OpOverload, args: Sequence[object]) -> Sequence[IntLikeType] | None:
    """Return the shape of the result of an operator of interpolation or its backward; None of any other."""
    if func in _BACKWARDS:
        return cast("Sequence[IntLikeType]", args[2])
    if func in _FORWARDS:
        return [*cast("Tensor", args[0]).shape[:2], *cast("Sequence[IntLikeType]", args[1])]
    return None


def interpolate(
    input: Tensor,  # noqa: A002 - torch's names of arguments
    size: IntLikeType | Sequence[IntLikeType] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Compute ``torch.nn.functional.interpolate`` with these arguments, whose sizes may depend on dims.

    Raises:
        NotImplementedError: where a new size is a dim times a number that is no fraction of small numbers.
    """
    present = input.shape[2:]
    count = len(present)
    op = _OPERATORS.get((mode, antialias, count))
    has_corners = mode not in _WITHOUT_CORNERS
    sizes = _of_each(size, count)
    factors = _of_each(scale_factor, count)
    has_dims = any(isinstance(number, SymInt) for number in (*present, *sizes))
    if has_dims and mode == "lanczos":
        raise NotImplementedError(f"interpolate in mode {mode} takes no size that depends on a dim")
    is_wrong = (
        bool(sizes) == bool(factors)
        or len(sizes or factors) != count
        or (align_corners is not None and not has_corners)
        or (op is None and mode != "area")
    )
    if is_wrong or not has_dims:
        return _of_torch(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    new = sizes or [
        _scaled(number, factor) for number, factor in zip(present, factors, strict=True)
    ]
    if op is None:
        return _of_torch(input, new, mode=mode)
    scales = [None] * count if sizes or recompute_scale_factor else factors
    corners = [bool(align_corners)] if has_corners else []
    resized: Tensor = op(input, new, *corners, *scales)
    return resized


def _of_each(given: _Number | Sequence[_Number] | None, count: int) -> list[_Number]:
    """Return a number for each dimension; none where none was given."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given] * count  # type: ignore[list-item]


def _scaled(size: IntLikeType, factor: float) -> IntLikeType:
    """Return the size times the factor, rounded down, as torch computes it in float64."""
    numerator, denominator = float(factor).as_integer_ratio()
    if denominator > _LARGEST_DENOMINATOR:
        raise NotImplementedError(
            f"interpolate multiplies a size that depends on a dim by {factor}, which float64 rounds: give the size of "
            "the result instead of scale_factor"
        )
    return size * numerator // denominator
