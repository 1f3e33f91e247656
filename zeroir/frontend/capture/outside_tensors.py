"""Tensors of the user's code that a step uses and that are no part of the model, such as a teacher's weights.

A program has their values as constants. In the process in which it was compiled their present values count: an engine
reads them before each micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zeroir.frontend._torch_private import storage_address

_Place = tuple[object, ...]


class OutsideTensors:
    """The tensors that code outside the model holds."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._by_place = {
            _place(x): x for x in tensors if x.layout is torch.strided and not x.is_meta
        }

    def holder(self, constant: Tensor) -> Tensor | None:
        """Return the user's tensor in whose memory a constant is; None if no code can change it."""
        return self._by_place.get(_place(constant)) if self._by_place else None


def _place(tensor: Tensor) -> _Place:
    geometry = (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (storage_address(tensor), *geometry)
