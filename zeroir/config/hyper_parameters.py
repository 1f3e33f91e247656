"""The hyper-parameters of each optimizer beside the learning rate, and their defaults: those of torch.optim.

Lion has the defaults of its paper (Chen et al. 2023, arXiv 2302.06675), without weight decay. Shampoo's paper (Gupta et
al. 2018, arXiv 1802.09568) has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from zeroir.ir.ops import Algorithm

AdjustLr = Literal["original", "match_rms_adamw"]
Value = float | str | tuple[float, ...]

_ADAM: Final[Mapping[str, Value]] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

DEFAULTS: Final[Mapping[Algorithm, Mapping[str, Value]]] = {
    Algorithm.SGD: {"weight_decay": 0.0},
    Algorithm.MOMENTUM: {
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
    },
    Algorithm.ADAM: {**_ADAM, "weight_decay": 0.0},
    Algorithm.ADAMW: {**_ADAM, "weight_decay": 0.01},
    Algorithm.LION: {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    Algorithm.MUON: {
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.1,
        "eps": 1e-7,
        "ns_steps": 5,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "adjust_lr_fn": "original",
    },
    Algorithm.ADAFACTOR: {
        "beta2_decay": -0.8,
        "eps": 2.0**-23,
        "eps2": 1e-3,
        "d": 1.0,
        "weight_decay": 0.0,
    },
    Algorithm.SHAMPOO: {"eps": 1e-4, "weight_decay": 0.0},
}
"""The options that have an effect with an optimizer, and their values where they are not given."""

NAMES: Final = tuple(dict.fromkeys(name for values in DEFAULTS.values() for name in values))
"""Every such option."""

ADJUST_LR_FNS: Final[Mapping[str, float]] = {"original": 0.0, "match_rms_adamw": 1.0}
"""How ``%hyper`` holds the choice of ``adjust_lr_fn``."""


def users(name: str) -> str:
    """The optimizers with which an option has an effect, as a sentence lists them."""
    names = [str(algorithm) for algorithm, values in DEFAULTS.items() if name in values]
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
