"""Hooks and versions of tensors and modules, which torch keeps in private attributes; it imports no tracer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.modules import module as nn_module

GradientHook = Callable[[Tensor], Tensor | None]

HOOKS_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""The attributes of a module with its hooks: dicts from handles to functions."""


def gradient_hooks(tensor: Tensor) -> tuple[GradientHook, ...]:
    """Return the hooks that the user's code registered with ``register_hook``, in order."""
    return tuple((tensor._backward_hooks or {}).values())


def global_hooks() -> tuple[Callable[..., object], ...]:
    """Return the hooks that the user's code registered for all modules of the process."""
    hooks = (
        nn_module._global_forward_pre_hooks,
        nn_module._global_forward_hooks,
        nn_module._global_backward_pre_hooks,
        nn_module._global_backward_hooks,
    )
    return tuple(hook for by_handle in hooks for hook in by_handle.values())


def version_of(tensor: Tensor) -> int:
    """Return a number that every change of a tensor in place raises; -1 for one of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version
