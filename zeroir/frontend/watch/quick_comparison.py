"""A comparison of what code could read with what was there, by identities and shallow equality, without any names.

It runs before each step. Where it finds a difference, the slow one (``code_state``) finds out what that is, if any.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType
from typing import Final, cast

from torch import Tensor

from zeroir.frontend._torch_hooks import version_of
from zeroir.torch_ops.absent_tensors import MovedTensor

MISSING: Final = object()

_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")


@dataclass(slots=True)
class QuickComparison:
    """What is to be as it was; ``is_doubtful`` is whether it differs from what a program was compiled from."""

    is_doubtful: bool = False
    _flag_changes: int = field(default_factory=lambda: MovedTensor.flag_changes)
    _containers: list[object] = field(default_factory=list)
    _contents: list[object] = field(default_factory=list)
    _contents_of: dict[int, list[object]] = field(default_factory=dict)
    _globals: list[tuple[Mapping[str, object], str, object]] = field(default_factory=list)
    _cells: list[tuple[CellType, object]] = field(default_factory=list)
    _attributes: list[tuple[object, str, object]] = field(default_factory=list)
    _instances: list[object] = field(default_factory=list)
    _classes: list[type] = field(default_factory=list)
    _tensors: list[Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _parameters: list[Tensor] = field(default_factory=list)
    _trained: list[bool] = field(default_factory=list)
    _computed: list[tuple[Callable[[], object], object]] = field(default_factory=list)

    def add_container(self, container: object, contents: object) -> None:
        """Compare a container with a copy of its contents."""
        self._containers.append(container)
        self._contents.append(contents)
        self._contents_of.setdefault(id(container), []).append(contents)

    def add_global(self, space: Mapping[str, object], name: str, value: object) -> None:
        """Compare a global by its identity."""
        self._globals.append((space, name, value))

    def add_cell(self, cell: CellType, value: object) -> None:
        """Compare a variable of a closure by its identity."""
        self._cells.append((cell, value))

    def add_attribute(self, owner: object, name: str, value: object) -> None:
        """Compare an attribute by its identity."""
        self._attributes.append((owner, name, value))

    def add_instance(self, value: object) -> None:
        """Compare the class of an object."""
        self._instances.append(value)
        self._classes.append(type(value))

    def add_tensor(self, tensor: Tensor, version: int) -> None:
        """Compare the version of a tensor."""
        self._tensors.append(tensor)
        self._versions.append(version)

    def add_parameter(self, parameter: Tensor) -> None:
        """Compare whether a parameter requires a gradient; those without values count their changes."""
        if not isinstance(parameter, MovedTensor):
            self._parameters.append(parameter)
            self._trained.append(parameter.requires_grad)

    def add_computed(self, compute: Callable[[], object]) -> None:
        """Compare what a function returns."""
        self._computed.append((compute, compute()))

    def expect(self, container: object, key: object, value: object) -> None:
        """Expect this value in a container, if that is compared."""
        for contents in self._contents_of.get(id(container), ()):
            cast("dict[object, object]", contents)[key] = value

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        if self.is_doubtful:
            return False
        try:
            return (
                MovedTensor.flag_changes == self._flag_changes
                and list(map(_REQUIRES_GRAD, self._parameters)) == self._trained
                and all(map(operator.eq, self._containers, self._contents))
                and all(space.get(name, MISSING) is value for space, name, value in self._globals)
                and all(cell.cell_contents is value for cell, value in self._cells)
                and list(map(type, self._instances)) == self._classes
                and all(getattr(owner, name) is value for owner, name, value in self._attributes)
                and list(map(version_of, self._tensors)) == self._versions
                and all(compute() == value for compute, value in self._computed)
            )
        except Exception:  # noqa: BLE001 - values of the user's may not be comparable, and a cell may be empty
            return False
