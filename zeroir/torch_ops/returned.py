"""What the user's code returns beside the loss in a training step: it is kept where a hook of the model asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_RETURNED: Final = "_returned_for_zeroir"
"""The attribute of the model in which it is kept."""


@contextmanager
def returned_kept(model: nn.Module) -> Iterator[None]:
    """Keep within the block what a step returns beside the loss."""
    hook = model.register_forward_hook(_asks)
    try:
        yield
    finally:
        hook.remove()
        vars(model).pop(_RETURNED, None)


def is_returned_kept(model: nn.Module) -> bool:
    """Return whether what a step returns beside the loss is to be kept."""
    return _asks in model._forward_hooks.values()


def keep_returned(model: nn.Module, value: object) -> None:
    """Keep a value that a step has returned, detached."""
    detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)
    vars(model)[_RETURNED] = detached


def last_returned(model: nn.Module) -> object:
    """Return what the last step has returned beside the loss; None if that was nothing."""
    return vars(model).get(_RETURNED)


def _asks(_: nn.Module, __: object, ___: object) -> None:
    """Ask for what the step returns: a hook that does nothing, but whose presence counts."""
