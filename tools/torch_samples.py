"""Torch's databases of samples: the one place that imports ``torch.testing._internal``, which torch need not keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch


def operators() -> Sequence[Any]:
    """An entry for every operator and variant that torch's own tests call.

    Those that draw do not seed torch's generator, as torch's tests let them do: a program refuses that.
    """
    with _flags_left():
        from torch.testing._internal import common_methods_invocations
    vars(common_methods_invocations)["wrapper_set_seed"] = _called
    return common_methods_invocations.op_db


def modules() -> Sequence[Any]:
    """An entry for every module that torch's own tests call."""
    with _flags_left():
        from torch.testing._internal.common_modules import module_db
    return module_db


def _called(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return function(*args, **kwargs)


def _flags_left() -> mock._patch[Any]:
    """A body in which no import freezes the switches of torch's backends for the whole process."""
    return mock.patch.object(torch.backends, "disable_global_flags")
