"""Indices that depend on dims, as in ``x[:, x.shape[1] // 2]``: torch's own indexing makes plain numbers of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import SymInt, Tensor

_getitem: Callable[..., Tensor] = Tensor.__getitem__


def has_sizes(index: object) -> bool:
    """Return whether an index without tensors, lists and flags has a number that depends on dims."""
    items = index if isinstance(index, tuple) else (index,)
    is_basic = all(
        item is None
        or item is Ellipsis
        or (isinstance(item, int | slice | SymInt) and not isinstance(item, bool))
        for item in items
    )
    return is_basic and any(isinstance(item, SymInt) for item in items)


def item_of(x: Tensor, index: object) -> Tensor:
    """Compute ``x[index]`` for such an index."""
    items = list(index) if isinstance(index, tuple) else [index]
    at = next((place for place, item in enumerate(items) if item is Ellipsis), None)
    if at is not None:
        others = sum(item is not None and item is not Ellipsis for item in items)
        items[at : at + 1] = [slice(None)] * (x.dim() - others)
    axis = sum(item is not None for item in items)
    for place in reversed(range(len(items))):
        item = items[place]
        if item is None:
            continue
        axis -= 1
        if isinstance(item, SymInt):
            x = x.select(axis, item)
            del items[place]
    return _getitem(x, tuple(items))
