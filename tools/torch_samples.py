"""Torch's databases of samples: the one place that imports ``torch.testing._internal``, which torch need not keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch


def operators() -> Sequence[Any]:
    """An entry for every operator and variant that torch's own tests call."""
    with _flags_left():
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def modules() -> Sequence[Any]:
    """An entry for every module that torch's own tests call."""
    with _flags_left():
        from torch.testing._internal.common_modules import module_db
    return module_db


def _flags_left() -> mock._patch[Any]:
    """A body in which no import freezes the switches of torch's backends for the whole process."""
    return mock.patch.object(torch.backends, "disable_global_flags")
