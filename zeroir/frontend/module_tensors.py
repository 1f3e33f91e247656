"""A model's parameters and buffers while it is traced: fake ones in the place of its own, and what it does to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import UserError
from zeroir.ir.dtypes import DType
from zeroir.torch_ops.types import IR_DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A parameter, buffer or batch tensor; ``aliases`` are the other names of a tied parameter."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


def register_plain_tensors(model: nn.Module) -> None:
    """Tensors kept as plain attributes become buffers, so that they have a name and a value at run time.

    Not those that were computed from parameters: as buffers they would lose their gradient. Parameters without
    elements, of which there is nothing to train, become buffers, too.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.grad_fn is None:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.numel() == 0:
                delattr(module, name)
                module.register_buffer(name, parameter.detach(), persistent=False)


def become_fake(
    model: nn.Module, mode: FakeTensorMode
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Replace every parameter and buffer; return them by their first name."""
    fakes: dict[int, Tensor] = {}
    # The originals live on, so that no two of them share an id.
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    infos = _infos("parameter", parameters), _infos("buffer", buffers)
    with mode:
        for module in model.modules():
            for name, parameter_or_none in module._parameters.items():
                if parameter_or_none is not None:
                    old: Tensor = parameter_or_none
                    if id(old) not in fakes:
                        fake = torch.empty(old.shape, dtype=old.dtype)
                        fakes[id(old)] = nn.Parameter(fake, requires_grad=old.requires_grad)
                    module._parameters[name] = fakes[id(old)]  # type: ignore[assignment]
            for name, buffer_or_none in module._buffers.items():
                if buffer_or_none is not None:
                    old = buffer_or_none
                    if id(old) not in fakes:
                        fakes[id(old)] = torch.empty(old.shape, dtype=old.dtype)
                    module._buffers[name] = fakes[id(old)]
    return infos


def _infos(kind: str, tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorInfo, ...]:
    """The tensors by their first names, their other names with them."""
    names: dict[int, list[str]] = {}
    firsts: dict[int, Tensor] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
        firsts.setdefault(id(tensor), tensor)
    return tuple(
        tensor_info(f"{kind} {first}", first, firsts[key], tuple(others))
        for key, (first, *others) in names.items()
    )


def tensor_info(what: str, name: str, tensor: Tensor, aliases: tuple[str, ...] = ()) -> TensorInfo:
    """Name, dtype and shape of a tensor; UserError, which says ``what`` it is, for a dtype that programs lack."""
    if tensor.dtype not in IR_DTYPE:
        raise UserError(f"The {what} is {tensor.dtype}, an element type that programs do not have.")
    return TensorInfo(
        name=name, dtype=IR_DTYPE[tensor.dtype], shape=tuple(tensor.shape), aliases=aliases
    )


@dataclass(frozen=True, slots=True)
class Lent:
    """A module's buffer, and the copy that the module has in its place."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor
    version: int


def lend_buffers(model: nn.Module) -> list[Lent]:
    """Give every module a copy of its buffers, so that what it does to them happens when it is done, and at once.

    A model may change a buffer in place, put another tensor or another buffer in its place, and use what it held
    before: none of that is to change the buffer under the backward. One that has several names has one copy.
    """
    copies: dict[int, Tensor] = {}
    lent: list[Lent] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            copy = copies[id(buffer)]
            lent.append(Lent(module, name, buffer, copy, copy._version))
    for item in lent:
        item.module._buffers[item.name] = item.copy
    return lent


def return_unchanged(lent: Sequence[Lent]) -> None:
    """Put buffers back in their places and forget what became of their copies."""
    for item in lent:
        item.module._buffers[item.name] = item.buffer


def take_back(lent: Sequence[Lent]) -> None:
    """Change the buffers whose copies were changed or replaced, and put them back in their places."""
    for item in lent:
        new = item.module._buffers[item.name]
        item.module._buffers[item.name] = item.buffer
        if new is not None and (new is not item.copy or new._version != item.version):
            with torch.no_grad():
                item.buffer.copy_(new)
