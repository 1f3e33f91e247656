"""The declaration of an optimizer's names in other libraries: torch, and DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Values = Mapping[str, object]
"""Settings by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InTorch:
    """A class of ``torch.optim`` with the optimizer's settings and states.

    Others of our optimizers may have the same class, or ``other_classes``, with other values of ``fixed`` settings.
    ``counts_steps`` says whether the class counts the steps of each parameter.
    """

    class_name: str
    other_classes: tuple[str, ...] = ()
    fixed: Values = field(default_factory=dict)
    counts_steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSwitch:
    """A key of ``optimizer.params`` that no setting has, with its default in DeepSpeed.

    Where it ``is_refused``, it must have its default, for the reason given; otherwise the reason says what it does.
    """

    name: str
    default: bool
    reason: str
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InDeepSpeed:
    """The optimizer, or several of ours, as ``optimizer`` of DeepSpeed's configuration.

    ``types`` are the values of ``optimizer.type``, case-sensitive where DeepSpeed takes the optimizer from torch.
    ``optimizer.params`` has the keys of the settings in torch, and ``switches``; ``defaults`` are DeepSpeed's where
    they differ from ours, and ``reasons`` say what keys do in addition to their setting. ``optimizer`` is called with
    the type and the values of these keys, and returns one of our optimizers; ``settings`` is called with both and the
    settings under our names, and returns the effective ones.
    """

    types: tuple[str, ...]
    is_from_torch: bool
    defaults: Values = field(default_factory=dict)
    switches: tuple[DeepSpeedSwitch, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    optimizer: Callable[[str, Values], str] | None = None
    settings: Callable[[str, Values, Values], Values] = lambda _type, _keys, settings: settings
