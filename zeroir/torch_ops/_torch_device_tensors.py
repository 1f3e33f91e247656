"""The part of torch that says what the operators of a device produce, whether or not the device is there.

All tensors of a trace are on the CPU, so autograd, modes and the user's code need no other device. They say that they
are on the device only while an operator finds out what its results are, such as FP32 statistics of a norm on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload, _higher_order_ops
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses._fake_tensor_utils import _CacheKeyState
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _DispatchCacheKey
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_DEVICE: Final = "fake_device"
"""The attribute of a fake tensor that says where it is."""
_STORED: Final = "_fake_device" if _DEVICE in vars(FakeTensor) else _DEVICE
"""The attribute in which it is stored; the other one is a property in some versions of torch."""

_CONVOLUTIONS: Final = frozenset(
    {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
)
_CHANNELS_LAST: Final = {torch.channels_last: 4, torch.channels_last_3d: 5}
"""The memory formats in which cuDNN writes channels last, with the number of dimensions of their tensors."""


class DeviceTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call] # a function of torch without types
    """A mode whose tensors have no data, and whose operators produce what those of ``device`` do: ``cpu`` or ``cuda``.

    Real tensors that a model holds become constants.
    """

    def __init__(self, env: ShapeEnv | None = None, device: str = "cpu") -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
        self.device = device
        self.is_within_operator = False
        for operator in _higher_order_ops.values():
            # Torch finds the rules of its own mode by the class.
            rule = operator.python_key_table.get(FakeTensorMode)
            if rule is not None:
                operator.python_key_table.setdefault(DeviceTensorMode, rule)

    def dispatch(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Find the results of an operator."""
        kwargs = {} if kwargs is None else kwargs
        if self.device == "cpu":
            return super().dispatch(func, types, args, kwargs)
        if func is torch.ops.prim.device.default:
            # Torch's code in C++ asks, which has no guard for a device that is not there.
            return _META if self.in_kernel_invocation else _stored(args[0])
        if func in fake_tensor._DISPATCH_META_HANDLERS:
            return super().dispatch(func, types, args, kwargs)
        is_outermost = not self.is_within_operator
        if is_outermost and any(not isinstance(x, FakeTensor) for x in _tensors((args, kwargs))):
            args, kwargs = pytree.tree_map_only(Tensor, self._without_data, (args, kwargs))
        self.is_within_operator = True
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self.is_within_operator = not is_outermost
        if is_outermost and func in _CONVOLUTIONS:
            result = self._as_cudnn_writes(result, args)
        for tensor in _tensors((result,)):
            if isinstance(tensor, FakeTensor):
                tensor.fake_device = _CPU
        return result

    def _cache_key(
        self,
        state: _CacheKeyState,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> _DispatchCacheKey:
        """Keep results apart from those of other devices: torch remembers results of all modes in one place."""
        key = super()._cache_key(state, func, args, kwargs)
        return key if self.device == "cpu" else _DispatchCacheKey((*key.key, self.device))

    def _without_data(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        return self.fake_tensor_converter.from_real_tensor(self, tensor)

    def _as_cudnn_writes(self, results: object, args: Sequence[object]) -> object:
        """Give the results of a convolution the memory format in which cuDNN writes them.

        Torch asks the library for it, which a torch without CUDA lacks.
        """
        tensors = [x for x in args if isinstance(x, FakeTensor)]
        # The backward has the gradient of the output first.
        image, weight = tensors[0 if isinstance(results, Tensor) else 1 :][:2]
        if torch.float64 in (image.dtype, weight.dtype):
            return results
        formats = (suggest_memory_format(image), suggest_memory_format(weight))
        last = next(
            (f for f, rank in _CHANNELS_LAST.items() if f in formats and rank == image.dim()), None
        )
        if last is None:
            return results

        def laid_out(x: FakeTensor) -> Tensor:
            if x.dim() != image.dim():
                return x
            with self:
                return torch.empty_like(x, memory_format=last)

        return pytree.tree_map_only(FakeTensor, laid_out, results)


@contextmanager
def tensors_of(device: str) -> Iterator[None]:
    """Within the block, let tensors say that they are on a device while an operator finds out what its results are."""
    if device == "cpu":
        yield
        return
    make: Any = Tensor._make_subclass

    def on_cpu(*args: object, device_for_backend_keys: object = None, **named: object) -> Tensor:
        del device_for_backend_keys
        made: Tensor = make(*args, device_for_backend_keys=_CPU, **named)
        return made

    place = torch.device(device, 0)

    def said(tensor: FakeTensor) -> torch.device:
        mode = vars(tensor).get("fake_mode")
        is_within = isinstance(mode, DeviceTensorMode) and mode.is_within_operator
        return place if is_within else _stored(tensor)

    def store(tensor: FakeTensor, value: torch.device) -> None:
        vars(tensor)[_STORED] = value

    with ExitStack() as stack:
        for owner, name, value in (
            (FakeTensor, _DEVICE, property(said, store)),
            # Torch answers these in C++, where the tensor is on the CPU.
            (FakeTensor, "is_cpu", property(lambda tensor: said(tensor).type == "cpu")),
            (FakeTensor, "is_cuda", property(lambda tensor: said(tensor).type == "cuda")),
            (Tensor, "_make_subclass", on_cpu),
            (fake_tensor, "init_gpu_context", _nothing),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def _stored(tensor: object) -> torch.device:
    device: torch.device = vars(tensor)[_STORED]
    return device


def _nothing(_: object) -> None:
    return None


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors among values, and in lists and dictionaries of them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
