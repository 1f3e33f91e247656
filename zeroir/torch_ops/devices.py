"""One device for everything: a program runs on a device that is chosen when it runs, whatever its model names.

Models say ``.cuda()``, ``.to("cuda:0")`` and ``device="cuda"``. Here a move to another device leaves a tensor where it
is, and a tensor made on an accelerator is made on the default device. What is made on the CPU or on the meta device
on purpose is made there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MOVES: frozenset[object] = frozenset({Tensor.cpu, Tensor.cuda, Tensor.xpu})


class OneDevice(TorchFunctionMode):
    """Every torch function runs on the device where its tensors are, or on the default one."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` without the device that it names."""
        return on_one_device(func)(*args, **(kwargs or {}))


@contextmanager
def one_device() -> Iterator[None]:
    """Run the user's code without the devices that it names, a default device among them."""
    with OneDevice(), mock.patch.object(torch, "set_default_device", _ignore):
        yield


def on_one_device(func: Callable[..., object]) -> Callable[..., object]:
    """A torch function that leaves tensors on the device where they are, and makes them on the default one."""
    if func in _MOVES:
        return _stay
    if func is Tensor.to:
        return _convert

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
    """``Tensor.to`` for all but the device."""
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
    return isinstance(device, int)  # the number of one
