"""Optimizers with their settings, for ``zeroir.compile(..., optimizer=zeroir.optim.AdamW(lr=1e-3))``.

Each has the name of its class in ``torch.optim``, or its own if torch lacks it; ``dir(zeroir.optim)`` lists them. It
accepts the settings that have an effect on it, by the names of ``zeroir compile --help``, with the defaults of
``torch.optim``; ``no_decay`` excludes parameters of fewer than two dimensions from weight decay, and ``bits=8`` stores
states in 8 bits. Classes and instances of ``torch.optim`` are accepted, too.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Final

from zeroir.config.optimizer import OptimizerOptions
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import OPTIONS, Algorithm, with_settings


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule to call with its settings, which determine which of the ``algorithms`` it is."""

    name: str
    algorithms: tuple[Algorithm, ...]

    @property
    def settings(self) -> dict[str, object]:
        """The settings that it accepts, and their defaults."""
        usual = OptimizerOptions()
        own: dict[str, object] = {}
        for algorithm in self.algorithms:
            own |= {
                name: option.defaults[algorithm]
                for name, option in OPTIONS.items()
                if algorithm in option.defaults
            }
        own |= {name: value for name, value in self.algorithms[0].fixed.items() if name in own}
        has_states = any(algorithm.has_states_of_elements for algorithm in self.algorithms)
        bits = {"bits": usual.bits} if has_states else {}
        return {"lr": usual.lr, **own, "no_decay": usual.no_decay, **bits}

    @property
    def __signature__(self) -> inspect.Signature:
        """The settings as parameters, for editors and ``help``."""
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature(
            [
                inspect.Parameter(name, kind, default=default)
                for name, default in self.settings.items()
            ]
        )

    def __call__(self, **settings: object) -> OptimizerOptions:
        """Return the compile options for these settings.

        Raises:
            UserError: if a setting does not exist or has a wrong value.
        """
        for name in settings:
            if name not in self.settings:
                known = ", ".join(self.settings)
                raise UserError(
                    f"zeroir.optim.{self.name} has no setting {name}; its settings are {known}."
                )
        algorithm = with_settings(self.algorithms, settings)
        values = {
            name: value
            for name, value in settings.items()
            if value is not None and name not in algorithm.fixed
        }
        return OptimizerOptions.model_validate({"algorithm": algorithm, **values})


_BY_NAME: Final = {
    name: Optimizer(
        name, tuple(algorithm for algorithm in Algorithm if algorithm.class_name == name)
    )
    for name in dict.fromkeys(algorithm.class_name for algorithm in Algorithm)
}


def __getattr__(name: str) -> Optimizer:
    if name not in _BY_NAME:
        raise AttributeError(f"zeroir.optim has no {name}; it has {', '.join(_BY_NAME)}", name=name)
    return _BY_NAME[name]


def __dir__() -> list[str]:
    return list(_BY_NAME)
