"""The part of torch that makes views whose sizes depend on dims: the same views by fewer questions about sizes.

Torch gives a new tensor the storage of the viewed one, and computes its bytes and its layout with symbols. A view by
sizes and strides is the same one and asks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import SymInt
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses._fake_tensor_utils import _CacheKeyState, _SymIntOutputStub
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    TensorMetadata,
    _DispatchCacheEntryOutputInfo,
    _DispatchCacheKey,
    in_kernel_invocation_manager,
)
from torch.types import IntLikeType

from zeroir.frontend._torch_dim_nodes import DimNode, PolynomialEnv
from zeroir.ir.size_bounds import lowest
from zeroir.torch_ops._torch_device_tensors import DeviceTensorMode
from zeroir.torch_ops.replaced.interpolation import resized_shape


class DimTensorMode(DeviceTensorMode):  # type: ignore[no-untyped-call] # a function of torch without types
    """A mode whose tensors have no data, and sizes that may depend on dims."""

    def _dispatch_impl(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> FakeTensor | None:
        if func is torch.ops.aten._unsafe_view.default:
            x, shape = cast("tuple[FakeTensor, Sequence[IntLikeType]]", tuple(args))
            strides = self._strides_of_view(x, shape)
            if strides is not None:
                return _view(self, x, shape, strides, x.storage_offset())
        shape_of_image = resized_shape(func, args)
        if shape_of_image is not None:
            # Torch has no kernels for some of these operators that take such sizes.
            image = cast("FakeTensor", args[0])
            made_like = {"dtype": image.dtype, "device": image.device, "pin_memory": False}
            layout = {"memory_format": suggest_memory_format(image)}
            func, args, kwargs = (
                torch.ops.aten.empty.memory_format, (shape_of_image,), made_like | layout,
            )  # fmt: skip
        # Torch finds the results of some operators with others, which take no such sizes without their parts in Python.
        with enable_python_dispatcher():
            return super()._dispatch_impl(func, types, args, kwargs)

    def _strides_of_view(
        self, x: FakeTensor, shape: Sequence[IntLikeType]
    ) -> list[IntLikeType] | None:
        """Return the strides of a view of a contiguous tensor; None where it may not be one, or have no elements."""
        old, new = _sizes(x.shape), _sizes(shape)
        if old is None or new is None or math.prod(old) != math.prod(new):
            return None
        if _sizes(x.stride()) != _contiguous_strides(old):
            return None
        assert isinstance(self.shape_env, PolynomialEnv)
        return [self.shape_env.symint(step) for step in _contiguous_strides(new)]

    def _get_output_tensor_from_cache_entry(
        self,
        state: _CacheKeyState,
        entry: _DispatchCacheEntryOutputInfo,
        key: _DispatchCacheKey,
        func: OpOverload,
        args: Sequence[object],
    ) -> FakeTensor | None:
        kind = entry.metadata
        x = None if entry.view_idx is None else args[entry.view_idx]
        if kind is None or not isinstance(x, FakeTensor) or not _is_plain_view(kind, x):
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)

        def number(value: object) -> IntLikeType:
            if isinstance(value, _SymIntOutputStub):
                assert self.shape_env is not None
                return value.extract(key, self.shape_env)
            return cast("int", value)

        shape, strides = ([number(n) for n in numbers] for numbers in (kind.shape, kind.stride))
        return _view(self, x, shape, strides, number(kind.storage_offset))


def _is_plain_view(kind: TensorMetadata, x: FakeTensor) -> bool:
    """Return whether a view differs from the tensor in sizes and strides only."""
    return (
        kind.dtype == x.dtype
        and kind.layout == x.layout == torch.strided
        and not (kind.requires_grad or kind.is_quantized or kind.dtype.is_complex)
        and kind.is_neg == x.is_neg()
    )


def _view(
    mode: FakeTensorMode,
    x: FakeTensor,
    shape: Sequence[IntLikeType],
    strides: Sequence[IntLikeType],
    offset: IntLikeType,
) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        view = torch.as_strided(x, shape, strides, offset)
    return FakeTensor(mode, view, x.fake_device)


def _sizes(numbers: Sequence[IntLikeType]) -> list[int] | None:
    """Return sizes that are at least 1 for all values of dims; None where there are others."""
    sizes: list[int] = []
    for number in numbers:
        node = number.node if isinstance(number, SymInt) else None
        if isinstance(node, DimNode):
            size = node.size
        elif node is None:
            size = int(number)
        else:
            return None
        if lowest(size) < 1:
            return None
        sizes.append(size)
    return sizes


def _contiguous_strides(sizes: Sequence[int]) -> list[int]:
    strides: list[int] = []
    step: int = 1
    for size in reversed(sizes):
        strides.append(step)
        step = size * step
    return strides[::-1]
