"""The tensors of a module by name, and their replacement wherever the module refers to them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

_swap: Final[Callable[[Tensor, Tensor], None]] = swap_tensors


class NamedTensors:
    """The parameters, buffers and plain attributes of a module that are tensors, by fully-qualified name.

    A tensor with several names, such as a tied parameter, is one object. The names are those at the time of
    construction.
    """

    def __init__(self, module: nn.Module) -> None:
        # The dictionaries of ``nn.Module`` hold values of several types, hence ``object``.
        self._places: dict[str, tuple[dict[str, object], str]] = {}
        self._non_persistent: set[str] = set()
        self._has_collected = False
        for prefix, child in module.named_modules(remove_duplicate=False):
            attributes = vars(child)
            for container in (
                child.__dict__["_parameters"],
                child.__dict__["_buffers"],
                attributes,
            ):
                for key, value in container.items():
                    if isinstance(value, Tensor):
                        name = f"{prefix}.{key}" if prefix else key
                        self._places[name] = container, key
                        if container is attributes or key in child._non_persistent_buffers_set:
                            self._non_persistent.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor itself, not a copy; KeyError where there is none of that name."""
        container, key = self._places[name]
        value = container[key]
        assert isinstance(value, Tensor)
        return value

    def is_saved(self, name: str) -> bool:
        """Return whether the module's ``state_dict`` has the tensor: a parameter or a persistent buffer."""
        return name not in self._non_persistent

    def names_by_tensor(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """Return every tensor with all its names, in the order of the first ones."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name in self._places:
            tensor = self[name]
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
        return [(tensors[key], tuple(group)) for key, group in names.items()]

    def replace(self, old: Tensor, new: Tensor, *, everywhere: bool = True) -> None:
        """Replace a tensor by ``new``, under all its names; its attributes are kept.

        With ``everywhere`` the tensor's object itself becomes ``new``, so other references to it, for example an
        optimizer's, do not keep its old memory. Without ``everywhere``, or where torch forbids that because of a weak
        reference or an autograd graph, only the module changes.
        """
        vars(new).update(vars(old))
        if everywhere and (_is_swapped(old, new) or (self._collects() and _is_swapped(old, new))):
            return
        for container, key in self._places.values():
            if container.get(key) is old:
                container[key] = new

    def _collects(self) -> bool:
        """Collect garbage the first time; return whether it did.

        What a trace leaves behind has weak references to the tensors, until Python happens to collect it: on some ranks
        earlier than on others, which must all see the same objects afterwards.
        """
        if self._has_collected:
            return False
        self._has_collected = True
        gc.collect()
        return True


def _is_swapped(old: Tensor, new: Tensor) -> bool:
    """Let each of two tensors become the other; return whether torch allows it."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            _swap(old, new)
    except RuntimeError:
        return False
    return True


def without_memory(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the shape, dtype and strides of ``tensor``, or a meta parameter."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
        empty = torch.empty_like(tensor.detach(), device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
