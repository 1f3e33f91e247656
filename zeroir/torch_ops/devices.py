"""Ignore the devices that a model names: the device of a program is selected when it runs.

Models call ``.cuda()`` and ``.to("cuda:0")`` and pass ``device="cuda"``. Under the mode ``OneDevice`` a move to another
device leaves a tensor on its device, and a tensor made on an accelerator is made on the default device. A tensor made
explicitly on the CPU or on the meta device is made there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MOVES: frozenset[object] = frozenset({Tensor.cpu, Tensor.cuda, Tensor.xpu})


class OneDevice(TorchFunctionMode):
    """A mode in which every torch function runs on the device of its tensors, or on the default one."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` without the device that it names."""
        return on_one_device(func)(*args, **(kwargs or {}))


READING: Final[tuple[Callable[..., object], ...]] = (Tensor.item, Tensor.numpy, Tensor.tolist)
"""The functions that return the values of a tensor to Python."""


@contextmanager
def one_device() -> Iterator[None]:
    """Run the user's code, ignoring the devices that it names or sets as default."""
    with OneDevice(), mock.patch.object(torch, "set_default_device", _ignore):
        yield


def on_one_device(func: Callable[..., object]) -> Callable[..., object]:
    """Return a torch function that leaves tensors on their device and makes new ones on the default device."""
    if func in _MOVES:
        return _stay
    if func is Tensor.to:
        return _convert
    if func in READING:
        return func

    def call(*args: object, **kwargs: object) -> object:
        if _is_accelerator(kwargs.get("device")):
            del kwargs["device"]
        return func(*args, **kwargs)

    return call


def _ignore(_: object) -> None:
    return None


def _stay(tensor: Tensor, *_: object, **__: object) -> Tensor:
    return tensor


def _convert(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Call ``Tensor.to`` without the device, unless that is the meta device."""
    if args and not isinstance(args[0], Tensor | torch.dtype):
        names = ("device", "dtype", "non_blocking", "copy")
        args, kwargs = (), {**kwargs, **dict(zip(names, args, strict=False))}
    device = kwargs.pop("device", None)
    if isinstance(device, str | torch.device) and torch.device(device).type == "meta":
        kwargs["device"] = device
    if not args and all(value is None or value is False for value in kwargs.values()):
        return tensor
    converted: Tensor = Tensor.to(tensor, *args, **kwargs)  # type: ignore[call-overload]
    return converted


def _is_accelerator(device: object) -> bool:
    if isinstance(device, str | torch.device):
        return torch.device(device).type not in ("cpu", "meta")
    return isinstance(device, int)  # the index of a device
