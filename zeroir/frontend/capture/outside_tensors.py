"""Tensors of the user's code that a step uses and that are no part of the model, such as a teacher's weights.

A program has their values as constants. In the process in which it was compiled their present values count: an engine
reads them before each micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from zeroir.frontend._torch_private import storage_address
from zeroir.torch_ops.followed_numbers import FollowedNumbers

_Place = tuple[object, ...]


class OutsideTensors:
    """The tensors that code outside the model holds, and those of the numbers that the program follows.

    ``standing`` has, for tensors that stand in for others, what they stand for.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        numbers: FollowedNumbers | None = None,
        standing: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> None:
        self._numbers = numbers
        self._by_place = {
            _place(x): x for x in tensors if x.layout is torch.strided and not x.is_meta
        } | {_place(other): x for other, x in standing.items()}

    def holder(self, constant: Tensor) -> Tensor | None:
        """Return the user's tensor in whose memory a constant is; None if no code can change it."""
        place = _place(constant)
        # A trace makes tensors of numbers as it meets them.
        for tensor in () if self._numbers is None else self._numbers.tensors:
            self._by_place.setdefault(_place(tensor), tensor)
        return self._by_place.get(place)


def _place(tensor: Tensor) -> _Place:
    geometry = (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (storage_address(tensor), *geometry)
