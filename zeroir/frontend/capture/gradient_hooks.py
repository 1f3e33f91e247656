"""Hooks of the user's code on the gradients of parameters: traced with the backward, or rejected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend._torch_hooks import GradientHook, gradient_hooks


class ParameterHooks:
    """The hooks of a model's parameters. ``idle`` names the parameters whose hook did not change the gradient.

    Raises:
        UserError: if a program cannot call a hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self.idle: set[str] = set()
        self._hooks: list[tuple[str, GradientHook]] = []
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for name, parameter in model.named_parameters():
            hooks = gradient_hooks(parameter)
            _require_traceable(names[id(parameter)], hooks)
            self._hooks += [(name, hook) for hook in hooks]

    @property
    def functions(self) -> tuple[GradientHook, ...]:
        """The hooks, once for every parameter on which each was registered."""
        return tuple(hook for _, hook in self._hooks)

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on the model's current parameters."""
        self.idle.clear()
        for name, hook in self._hooks:
            owner, _, attribute = name.rpartition(".")
            getattr(model.get_submodule(owner), attribute).register_hook(
                self._noting_idle(name, hook)
            )

    def note(self) -> str | None:
        """Return a sentence on hooks that did not change gradients in the traced backward.

        None if there are none.
        """
        if not self.idle:
            return None
        names = ", ".join(sorted(self.idle))
        return f"A hook on the gradient of {names} leaves it as it is, so the program does not call it."

    def _noting_idle(self, name: str, hook: GradientHook) -> GradientHook:
        def call(gradient: Tensor) -> Tensor | None:
            version = gradient._version
            result = hook(gradient)
            if result is None and gradient._version == version:
                self.idle.add(name)
            return result

        return call


def _require_traceable(names: Sequence[str], hooks: Sequence[GradientHook]) -> None:
    name, *aliases = names
    if hooks and aliases:
        raise UserError(
            f"The parameter {name} of the model has a hook of register_hook and is {aliases[0]} as well; a program "
            "adds up the gradients of a tied parameter where no hook sees the sum, so remove one of the two."
        )
