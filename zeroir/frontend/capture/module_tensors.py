"""A model's parameters and buffers while it is traced: fake tensors replace them, buffers' changes are recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
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


def register_plain_tensors(model: nn.Module, without: Set[str] = frozenset()) -> frozenset[str]:
    """Register tensors that are plain attributes as buffers, so that they have a name and a value at run time.

    Tensors that were computed from parameters are not registered, because as buffers they would lose their gradient.
    Parameters without elements also become buffers, because they cannot be trained. Attributes with a name in
    ``without`` are deleted.

    Returns:
        The names of the attributes.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.grad_fn is None:
                delattr(module, name)
                full = f"{path}.{name}".strip(".")
                if full not in without:
                    module.register_buffer(name, value, persistent=False)
                    names.add(full)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.numel() == 0:
                delattr(module, name)
                module.register_buffer(name, parameter.detach(), persistent=False)
    return frozenset(names)


def become_fake(
    model: nn.Module, mode: FakeTensorMode
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Replace every parameter and buffer by a fake tensor; return their infos, by their first name."""
    fakes: dict[int, Tensor] = {}
    # These lists keep the originals alive, so that no two of them share an id.
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    infos = _infos("parameter", parameters), _infos("buffer", buffers)
    with mode:
        for module in model.modules():
            for name, parameter_or_none in module._parameters.items():
                if parameter_or_none is not None:
                    original: Tensor = parameter_or_none
                    if id(original) not in fakes:
                        fake = torch.empty(original.shape, dtype=original.dtype)
                        fakes[id(original)] = nn.Parameter(
                            fake, requires_grad=original.requires_grad
                        )
                    module._parameters[name] = fakes[id(original)]  # type: ignore[assignment]
            for name, buffer_or_none in module._buffers.items():
                if buffer_or_none is not None:
                    original = buffer_or_none
                    if id(original) not in fakes:
                        fakes[id(original)] = torch.empty(original.shape, dtype=original.dtype)
                    module._buffers[name] = fakes[id(original)]
    return infos


def _infos(kind: str, tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorInfo, ...]:
    """Return the infos of tensors by their first names, with their other names as aliases."""
    names: dict[int, list[str]] = {}
    by_id: dict[int, Tensor] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
        by_id.setdefault(id(tensor), tensor)
    return tuple(
        tensor_info(f"{kind} {name}", name, by_id[key], tuple(aliases))
        for key, (name, *aliases) in names.items()
    )


def tensor_info(what: str, name: str, tensor: Tensor, aliases: tuple[str, ...] = ()) -> TensorInfo:
    """Return name, dtype and shape of a tensor.

    Raises:
        UserError: for a dtype that programs do not have; ``what`` describes the tensor in it.
    """
    if tensor.dtype not in IR_DTYPE:
        raise UserError(f"The {what} is {tensor.dtype}, an element type that programs do not have.")
    return TensorInfo(
        name=name, dtype=IR_DTYPE[tensor.dtype], shape=tuple(tensor.shape), aliases=aliases
    )


class OtherShapeError(UserError):
    """Forward replaces the buffer of this name by a tensor of another shape."""

    def __init__(self, name: str, before: Tensor, after: Tensor) -> None:
        super().__init__(
            f"The model's forward replaces the buffer {name}, of shape {tuple(before.shape)}, by a tensor of shape "
            f"{tuple(after.shape)}, but a program keeps the shapes of buffers."
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class BufferCopy:
    """A module's buffer, and the copy that temporarily replaces it; ``version`` is the copy's initial version.

    ``path`` is the module's name.
    """

    path: str
    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor
    version: int


def substitute_buffers(model: nn.Module) -> list[BufferCopy]:
    """Replace every module's buffers by copies, so that the buffers themselves change once, after the forward.

    A model may change a buffer in place, replace it by another tensor or buffer, and use its earlier value; the
    backward must not see any of these changes. A buffer with several names has one copy.
    """
    copies: dict[int, Tensor] = {}
    substituted: list[BufferCopy] = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            copy = copies[id(buffer)]
            substituted.append(BufferCopy(path, module, name, buffer, copy, copy._version))
    for item in substituted:
        item.module._buffers[item.name] = item.copy
    return substituted


def put_back_buffers(substituted: Sequence[BufferCopy]) -> None:
    """Restore the original buffers."""
    for item in substituted:
        item.module._buffers[item.name] = item.buffer


def write_back_buffers(substituted: Sequence[BufferCopy]) -> frozenset[str]:
    """Restore the buffers, and copy the new value to each whose copy was changed or replaced.

    Returns:
        The names of those that were replaced.

    Raises:
        OtherShapeError: where the new value has another shape.
    """
    replaced: set[str] = set()
    for item in substituted:
        value = item.module._buffers[item.name]
        item.module._buffers[item.name] = item.buffer
        if value is not None and (value is not item.copy or value._version != item.version):
            name = f"{item.path}.{item.name}".strip(".")
            if value is not item.copy:
                replaced.add(name)
            if value.shape != item.buffer.shape:
                raise OtherShapeError(name, item.buffer, value)
            with torch.no_grad():
                item.buffer.copy_(value)
    return frozenset(replaced)
