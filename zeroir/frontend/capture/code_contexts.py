"""Contexts that a model's code opens and a program replaces: activation checkpoints, and autocast for accelerators.

A program recomputes whole units, so a checkpoint becomes ``--recompute`` of its units.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from zeroir.frontend.lowering.units import UnitModules
from zeroir.frontend.source.imports import NOT_THE_USERS, is_in_a_library


@dataclass(slots=True)
class Checkpoint:
    """A call of ``torch.utils.checkpoint``.

    ``around`` are the modules that were being called when it was opened, outermost first; ``modules`` are those that it
    calls itself; ``source`` is its ``file:line``.
    """

    around: tuple[str, ...]
    source: str
    modules: list[str] = field(default_factory=list)

    def units(self, units: UnitModules) -> list[str]:
        """Return the units that are completely inside it; none if it is inside a unit."""
        if any(name in units.labels for name in self.around):
            return []
        return [
            unit
            for unit in units.labels
            if any(unit == name or not name or unit.startswith(f"{name}.") for name in self.modules)
        ]


def recomputed_units(checkpoints: Sequence[Checkpoint], units: UnitModules) -> tuple[str, ...]:
    """Return the units in checkpoints, in the model's order."""
    inside = {unit for checkpoint in checkpoints for unit in checkpoint.units(units)}
    return tuple(unit for unit in units.labels if unit in inside)


def note_on_small_checkpoints(checkpoints: Sequence[Checkpoint], units: UnitModules) -> str | None:
    """Return a sentence on the checkpoints that contain no whole unit; None if there are none."""
    sources = dict.fromkeys(c.source for c in checkpoints if not c.units(units))
    if not sources:
        return None
    return (
        f"{_joined(sources)} checkpoints less than a unit, which changes nothing in the program: it computes whole "
        "units again, those that --recompute names."
    )


@contextmanager
def noting_autocasts(devices: dict[str, str], line: Callable[[], str]) -> Iterator[None]:
    """Record each autocast for an accelerator: ``devices[line()]`` becomes its device, unless ``line()`` is empty."""
    original = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled and device_type != "cpu" and (source := line()):
            devices.setdefault(source, device_type)
        original(self, device_type, dtype, enabled, cache_enabled)

    with mock.patch.object(torch.autocast, "__init__", init):
        yield


def note_on_autocasts(devices: dict[str, str]) -> str | None:
    """Return a sentence on autocasts by ``file:line``; None if there are none."""
    if not devices:
        return None
    device = next(iter(devices.values()))
    return (
        f"{_joined(devices)} asks for torch.autocast('{device}'), which changes nothing in a program, because that is "
        "made for any device: compile with --precision bf16 or fp16, or give autocast the device type of a tensor."
    )


def line_of_caller(folder: Path, *, in_libraries: bool = True) -> str:
    """Return ``file:line`` of the innermost frame outside torch and zeroir, with the file's path in ``folder``.

    Return an empty text if there is no such frame, or if it is in a library and ``in_libraries`` is False.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(NOT_THE_USERS):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if not in_libraries and is_in_a_library(path):
        return ""
    shown = path.relative_to(folder) if path.is_relative_to(folder) else path
    return f"{shown.as_posix()}:{frame.f_lineno}"


def _joined(lines: Iterable[str]) -> str:
    first, *rest = lines
    return f"{first} (and {len(rest)} more)" if rest else first
