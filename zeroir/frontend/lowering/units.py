"""The submodules that are units: the parameters of a unit share flat buffers and are gathered together.

By default the units are the repeated blocks: modules in a ``ModuleList`` or ``Sequential`` whose class occurs there at
least twice with the same parameters. ``blocks.*`` selects units by pattern, ``class:Block`` by class, and ``min:1e6``
selects the smallest modules of at least that many parameter elements; commas separate several of these. Of nested
candidates the outermost is the unit. A frozen module beside the model without units in it is a unit. Parameters outside
all units belong to the root.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from zeroir.errors import UserError
from zeroir.frontend.capture.captured_graph import ModuleCall
from zeroir.torch_ops.frozen_modules import frozen_modules

ROOT = "root"
ROOT_PRE = "root.pre"
ROOT_MID = "root.mid"
ROOT_POST = "root.post"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitModules:
    """The modules that are units, by fully-qualified name, with the label used in the names of their segments."""

    labels: dict[str, str]

    def call(self, calls: Iterable[ModuleCall]) -> ModuleCall | None:
        """Return the call of a unit among nested module calls, outermost first; None for the root."""
        return next((call for call in calls if call.module in self.labels), None)

    def unit_of(self, parameter: str) -> str | None:
        """Return the unit whose module contains a parameter; None for the root."""
        parts = parameter.split(".")
        names = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((name for name in names if name in self.labels), None)


def find_units(
    module: nn.Module, spec: str | None, opaque: Collection[str] = frozenset()
) -> UnitModules:
    """Return the units that ``spec`` names, or the repeated blocks.

    The modules ``opaque`` are one operator each: one in which there are units is a unit instead of them.

    Raises:
        UserError: if the specification is invalid or matches no module.
    """
    if "" in opaque:
        return UnitModules(labels={})
    names = (
        _repeated(module)
        if spec is None
        else set().union(*(_named(module, part.strip()) for part in spec.split(",")))
    )
    names |= {
        name
        for name, frozen in frozen_modules(module).items()
        if _has_parameters(frozen) and not any(_is_inside(unit, (name,)) for unit in names)
    }
    around = {path for path in opaque if any(_is_inside(name, (path,)) for name in names)}
    names = names - {name for name in names if _is_inside(name, around)} | around
    return UnitModules(
        labels={
            name: _snake_case(type(module.get_submodule(name)).__name__)
            for name, _ in module.named_modules()
            if name in names and not _is_inside(name, names)
        }
    )


def _named(module: nn.Module, spec: str) -> set[str]:
    """Return the modules that one pattern of names, class or size selects."""
    if spec.startswith("class:"):
        names = _by_class(module, spec.removeprefix("class:"))
    elif spec.startswith("min:"):
        names = _by_size(module, _numel(spec))
    else:
        names = {name for name, child in module.named_modules() if name and fnmatchcase(name, spec)}
        names = {name for name in names if _has_parameters(module.get_submodule(name))}
        if not names:
            examples = [name for name, _ in module.named_modules() if name]
            raise UserError(
                f"--units {spec} matches no module with parameters; names look like "
                f"{', '.join(examples[:3]) or 'none, for this model has no submodules'}."
            )
        # A list is never called, so the pattern means its members, unless it matches only lists.
        names = {name for name in names if not _is_list(module.get_submodule(name))} or names
    return names


def _repeated(module: nn.Module) -> set[str]:
    """Return children of lists and sequences whose class occurs twice in one, with parameters of equal shapes."""
    children = [
        (f"{name}.{key}" if name else key, child)
        for name, container in module.named_modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
        for key, child in container.named_children()
        if _has_parameters(child)
    ]
    seen: set[object] = set()
    classes: set[type[nn.Module]] = set()
    for name, child in children:
        shape = (
            name.rpartition(".")[0],
            type(child),
            tuple((key, tuple(p.shape)) for key, p in child.named_parameters()),
        )
        if shape in seen:
            classes.add(type(child))
        seen.add(shape)
    outermost: set[str] = set()
    # Containers come before their contents, so a block is in names before the lists inside it.
    for name, child in children:
        if type(child) in classes and not _is_inside(name, outermost):
            outermost.add(name)
    return outermost


def _by_class(module: nn.Module, class_name: str) -> set[str]:
    classes = {name: type(child) for name, child in module.named_modules() if name}
    names = {name for name, kind in classes.items() if kind.__name__ == class_name}
    names = {name for name in names if _has_parameters(module.get_submodule(name))}
    if not names:
        class_names = sorted({kind.__name__ for kind in classes.values()})
        raise UserError(
            f"--units class:{class_name} matches no module with parameters; the model has "
            f"{', '.join(class_names[:8]) or 'no submodules'}."
        )
    return names


def _by_size(module: nn.Module, minimum: float) -> set[str]:
    def smallest(name: str, child: nn.Module) -> set[str]:
        below = [
            smallest(f"{name}.{key}" if name else key, grandchild)
            for key, grandchild in child.named_children()
        ]
        names = set().union(*below)
        if names or not name or sum(p.numel() for p in child.parameters()) < minimum:
            return names
        return {name}

    return smallest("", module)


def _numel(spec: str) -> float:
    try:
        minimum = float(spec.removeprefix("min:"))
    except ValueError:
        minimum = -1.0
    if minimum <= 0:
        raise UserError(
            f"--units {spec} needs a positive number of parameters, for instance min:1e6."
        )
    return minimum


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def inside_of(path: str) -> str:
    """Return what the names of all that is inside a module begin with; the model itself has no name."""
    return f"{path}." if path else ""


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(inside_of(top)) for top in outer)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
