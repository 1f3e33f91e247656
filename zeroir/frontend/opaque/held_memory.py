"""Counts the memory that tensors hold while code runs, on real tensors or on fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class HeldMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes of the storages that operators make; ``most_bytes`` is the most of them at once.

    It does not see what an operator allocates and frees within one call.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func``, and count what it makes."""
        given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        returned = func(*args, **(kwargs or {}))
        for tensor in _tensors(returned):
            storage = tensor.untyped_storage()
            key, size_bytes = id(storage), storage.nbytes()
            if key not in self._known and key not in given:
                self._known.add(key)
                self._bytes += size_bytes
                weakref.finalize(storage, self._end, key, size_bytes)
        self.most_bytes = max(self.most_bytes, self._bytes)
        return returned

    def _end(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self._bytes -= size_bytes


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
