"""The user's module together with modules that its loss uses and that are not trained, such as a teacher.

Together they look like one module: the user's own tensors have their own names, and those of a frozen module begin with
its name. A program holds the tensors of both alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn


class WithFrozenModules(nn.Module):
    """A module with others by their names, none of which the module itself has.

    It is no module of its own to those who walk through modules, who find ``module`` where they expect the root.
    """

    def __init__(self, module: nn.Module, frozen: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Who replaces the root's tensors replaces those of the module.
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules = {"": module, **frozen}

    # Properties have names that no submodule has.
    @property
    def _users_module(self) -> nn.Module:
        """The user's module."""
        own = self._modules[""]
        assert own is not None
        return own

    @property
    def _frozen_modules(self) -> Mapping[str, nn.Module]:
        """The frozen modules by their names."""
        return {name: each for name, each in self._modules.items() if name and each is not None}

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the user's module and its submodules, then the frozen ones."""
        memo = set() if memo is None else memo
        yield from self._users_module.named_modules(memo, prefix, remove_duplicate)
        for name, module in self._frozen_modules.items():
            own = f"{prefix}.{name}" if prefix else name
            yield from module.named_modules(memo, own, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule of the user's module, or a frozen one or its submodule."""
        if target.partition(".")[0] in self._frozen_modules:
            return super().get_submodule(target)
        return self._users_module.get_submodule(target)

    def train(self, mode: bool = True) -> WithFrozenModules:
        """Set the mode of the user's module alone; the others keep theirs."""
        self._users_module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as torch declares it
        modules = vars(self).get("_modules", {})
        return modules[name] if name and name in modules else getattr(modules[""], name)


def users_module(module: nn.Module) -> nn.Module:
    """Return the module that the user's code is called with."""
    return module._users_module if isinstance(module, WithFrozenModules) else module


def frozen_modules(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the frozen modules beside the user's, by their names."""
    return module._frozen_modules if isinstance(module, WithFrozenModules) else MappingProxyType({})
