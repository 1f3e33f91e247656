"""Optimizers with their settings, for ``zeroir.compile(..., optimizer=zeroir.optim.Muon(lr=2e-2))``.

Each takes the settings that have an effect with it, by the names of ``zeroir compile --help``, and the defaults of
``torch.optim``; ``no_decay`` leaves parameters of fewer than two dimensions without weight decay, and ``bits=8`` keeps
states of 8 bits. Classes and instances of ``torch.optim`` do as well.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Final

from zeroir.config.optimizer import OptimizerOptions
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import OPTIONS, Algorithm

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Lion", "Muon", "Shampoo"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule that is called with its settings."""

    name: str
    algorithm: Algorithm

    @property
    def settings(self) -> dict[str, object]:
        """The settings that it takes, and their defaults."""
        algorithm = Algorithm.MOMENTUM if self.algorithm is Algorithm.SGD else self.algorithm
        usual = OptimizerOptions()
        own = {
            name: option.defaults[algorithm]
            for name, option in OPTIONS.items()
            if algorithm in option.defaults
        }
        if self.algorithm is Algorithm.SGD:
            own["momentum"] = 0.0
        bits = {"bits": usual.bits} if algorithm.has_states_of_elements else {}
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
        """The options of a compilation that these settings amount to.

        Raises:
            UserError: where a setting does not exist or has a wrong value.
        """
        for name in settings:
            if name not in self.settings:
                known = ", ".join(self.settings)
                raise UserError(
                    f"zeroir.optim.{self.name} has no setting {name}; its settings are {known}."
                )
        algorithm = self.algorithm
        if algorithm is Algorithm.SGD and settings.get("momentum"):
            algorithm = Algorithm.MOMENTUM
        elif algorithm is Algorithm.SGD:
            settings = {name: value for name, value in settings.items() if name != "momentum"}
        values = {name: value for name, value in settings.items() if value is not None}
        return OptimizerOptions.model_validate({"algorithm": algorithm, **values})


SGD: Final = Optimizer("SGD", Algorithm.SGD)
Adam: Final = Optimizer("Adam", Algorithm.ADAM)
AdamW: Final = Optimizer("AdamW", Algorithm.ADAMW)
Lion: Final = Optimizer("Lion", Algorithm.LION)
Muon: Final = Optimizer("Muon", Algorithm.MUON)
Adafactor: Final = Optimizer("Adafactor", Algorithm.ADAFACTOR)
Shampoo: Final = Optimizer("Shampoo", Algorithm.SHAMPOO)
