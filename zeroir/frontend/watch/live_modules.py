"""Modules whose code runs as it is at each step, beside a program that computes what the other modules do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from zeroir.frontend.watch.reached_code import ReachedCode


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModules:
    """Modules whose forward runs at each step: what that reads counts by itself.

    ``outermost`` are those whose forward is called, and ``modules`` these with the modules inside them. ``code`` is
    that of the other modules, which may read attributes of these.
    """

    outermost: tuple[nn.Module, ...]
    modules: frozenset[nn.Module]
    code: ReachedCode

    @classmethod
    def of(
        cls, model: nn.Module | None, paths: Iterable[str], functions: Iterable[object]
    ) -> LiveModules | None:
        """Return the modules of these names; None where there are none."""
        outermost = () if model is None else tuple(map(model.get_submodule, paths))
        if not outermost:
            return None
        modules = frozenset(module for each in outermost for module in each.modules())
        return cls(
            outermost=outermost, modules=modules, code=ReachedCode.of(model, functions, modules)
        )
