"""Settings of torch that code may read while it is traced, and functions of torch that a script may replace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from zeroir.frontend.watch.quick_comparison import MISSING

Read = Callable[[], object]


def settings_read(names: Collection[str]) -> Iterator[tuple[str, Read]]:
    """Yield the settings that count for code that mentions these names: the expression of each, and what reads it.

    Every trace depends on the default dtype and device.
    """
    yield from _ALWAYS.items()
    for expression, read in _WHERE_MENTIONED.items():
        if expression.rpartition(".")[2].removesuffix("()") in names:
            yield expression, _or_none(read)


def replaceable(
    names: Collection[str], modules: Collection[ModuleType]
) -> Iterator[tuple[str, Mapping[str, object], str, object]]:
    """Yield the functions of ``modules`` of torch, and methods of tensors, that code mentions by these names.

    Each is given by the expression for it, its namespace, its name there, and the value, or MISSING.
    """
    spaces = {module.__name__: vars(module) for module in modules}
    for expression, space in spaces.items():
        for name in sorted(names & space.keys()):
            if callable(space[name]):
                yield f"{expression}.{name}", space, name, space[name]
    for name in sorted(names):
        if hasattr(Tensor, name):
            yield f"torch.Tensor.{name}", vars(Tensor), name, vars(Tensor).get(name, MISSING)


_ALWAYS: Final[Mapping[str, Read]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": torch.get_default_device,
}

_WHERE_MENTIONED: Final[Mapping[str, Read]] = {
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_deterministic_debug_mode()": torch.get_deterministic_debug_mode,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cudnn.allow_tf32": lambda: getattr(torch.backends.cudnn, "allow_tf32"),  # noqa: B009
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (
        torch.backends.cuda.mem_efficient_sdp_enabled
    ),
}


def _or_none(read: Read) -> Read:
    """Return a function that reads a setting, or returns None where torch refuses to read it now."""

    def present() -> object:
        try:
            return read()
        except RuntimeError:
            return None

    return present
