"""Modules outside the model whose values another engine has, or that the script's optimizer does not train.

A program has their tensors as constants. While the code is traced, tensors without gradients stand in for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroir.torch_ops.absent_tensors import home_of


@contextmanager
def stand_ins(
    modules: Iterable[nn.Module], own: Collection[int], *, are_constants: bool
) -> Iterator[Mapping[Tensor, Tensor]]:
    """Let tensors stand in for those of ``modules`` within the block, and yield what each stands for.

    They do so for tensors whose values another engine has, and where modules ``are_constants`` also for those that
    require a gradient; not for the model's ``own``, which are given by their ids.
    """
    replaced: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    standing: dict[Tensor, Tensor] = {}
    for module in dict.fromkeys(part for whole in modules for part in whole.modules()):
        for container in (module._parameters, module._buffers):
            for key, tensor in container.items():
                if tensor is None or id(tensor) in own:
                    continue
                if id(tensor) not in made:
                    other = _stand_in(tensor, are_constants=are_constants)
                    if other is None:
                        continue
                    made[id(tensor)] = other
                    standing[other] = tensor
                replaced.append((container, key, tensor))  # type: ignore[arg-type]
    try:
        for container, key, tensor in replaced:
            container[key] = made[id(tensor)]
        yield standing
    finally:
        for container, key, tensor in replaced:
            container[key] = tensor


def _stand_in(tensor: Tensor, *, are_constants: bool) -> Tensor | None:
    if home_of(tensor) is not None:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach() if tensor.requires_grad and are_constants else None


@contextmanager
def replaced_by_copies(
    modules: Mapping[str, nn.Module], copies: Mapping[str, nn.Module]
) -> Iterator[None]:
    """Let modules that the user's code calls be their copies within the block, with their tensors and submodules."""
    own = {
        module: vars(module)
        for name in modules
        for module in dict.fromkeys(modules[name].modules())
    }
    pairs = [
        (module, copies[name].get_submodule(path))
        for name, whole in modules.items()
        for path, module in whole.named_modules()
    ]
    try:
        for module, copied in pairs:
            object.__setattr__(module, "__dict__", vars(copied))
        yield
    finally:
        for module, attributes in own.items():
            object.__setattr__(module, "__dict__", attributes)


def tensor_ids(module: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters and buffers of a module."""
    return frozenset(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
