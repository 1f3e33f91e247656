"""What chosen modules return in a step, to look at: hooks store it, and count as those of the user's own do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zeroir.runtime.engine.patterns import matching

_OUTPUT: Final = "_output_for_zeroir"
"""The attribute in which a hook stores what its module returns."""


class WatchedModules(Mapping[str, object]):
    """What modules returned in the last micro-step or evaluation of this rank, by their names, detached.

    It is empty before. ``close``, or the end of a ``with`` block, removes the hooks.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        modules = {name: module for name, module in model.named_modules() if name}
        chosen = matching(list(modules), patterns, "module of the model")
        self._modules = {name: modules[name] for name in chosen}
        self._hooks = [module.register_forward_hook(_store) for module in self._modules.values()]

    def __getitem__(self, name: str) -> object:
        try:
            return vars(self._modules[name])[_OUTPUT]
        except KeyError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name, module in self._modules.items() if _OUTPUT in vars(module))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks and what they stored."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules.values():
            vars(module).pop(_OUTPUT, None)


def _store(module: nn.Module, _: object, output: object) -> None:
    detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)
    vars(module)[_OUTPUT] = detached
