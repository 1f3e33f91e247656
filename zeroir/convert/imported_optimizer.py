"""The optimizer of another library: its states by parameter name, and the settings of its groups.

This is the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, nested or flattened, and of
the ``state_dict`` of a torch optimizer that knows the names of its parameters::

    {"state": {name: {"step": …, "exp_avg": …}, …}, "param_groups": [{"params": [name, …], "lr": …}, …]}
    {"state.<name>.exp_avg": …, "param_groups.<name>.lr": …}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from zeroir.checkpoint.manifest import MASTER, Setting, StoredGroup, StoredScalar
from zeroir.config.groups import DEFAULT_GROUP
from zeroir.convert.imported import ImportedModel, ImportedParameter, ImportedTensor
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import Algorithm

Tree = Mapping[object, object]
"""Nested dictionaries with ``ImportedTensor``, numbers, strings, tuples and None."""

MODEL_KEYS: Final = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""The usual keys of a model's state dictionary in a larger one."""

OPTIMIZER_KEYS: Final = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")
STEP: Final = "step"

_NUMBERED: Final = (
    "The states of the optimizer were left out: they have numbers instead of the names of parameters. Save those of "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict."
)

_SETTINGS: Final = frozenset(
    {"lr", "initial_lr"}
    | {
        key
        for algorithm in Algorithm
        for setting in algorithm.declaration.settings
        for key, _ in setting.torch_places
    }
)
"""The settings that affect results; those that choose an implementation are ignored."""

_NUMBERS: Final = {
    "f64": "<f8",
    "f32": "<f4",
    "f16": "<f2",
    "i64": "<i8",
    "i32": "<i4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedGroup:
    """A group of an optimizer: the names of its parameters, and all its settings unchanged."""

    parameters: tuple[str, ...]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimizer: the states of each parameter, and its groups. ``notes`` say what is left out."""

    states: Mapping[str, Mapping[str, object]]
    groups: Sequence[ImportedGroup]
    notes: tuple[str, ...] = ()


def optimizer_in(tree: Tree, names: Iterable[str]) -> OptimizerState | None:
    """Find the optimizer in a checkpoint of a model with these names; None if there is none."""
    for key in OPTIMIZER_KEYS:
        part = tree.get(key)
        if isinstance(part, Mapping):
            if isinstance(part.get("state"), Mapping):
                return _nested(part)
            if any(isinstance(key, str) and key.startswith("state.") for key in part):
                return _flattened(part, names)
    return None


def with_optimizer(model: ImportedModel, optimizer: OptimizerState, source: str) -> ImportedModel:
    """Add the states of an optimizer to a model; ``source`` is named in errors.

    Raises:
        UserError: if a state has another shape than its parameter, or parameters took different numbers of steps.
    """
    trained = {name for group in optimizer.groups for name in group.parameters}
    steps: set[float] = set()
    parameters = []
    left_out: set[str] = set()
    for parameter in model.parameters:
        names = (parameter.name, *parameter.aliases)
        found = next((optimizer.states[name] for name in names if name in optimizer.states), {})
        states = {}
        for name, value in found.items():
            number = number_in(value)
            if name == STEP and number is not None:
                steps.add(number)
            elif (
                isinstance(value, ImportedTensor)
                and value.numel == parameter.values.numel
                and (name.isascii() and name.isidentifier())
                and name != MASTER
            ):
                states[name] = value
            elif value is not None:
                left_out.add(name)
        is_trainable = bool(states) or not trained or not trained.isdisjoint(names)
        parameters.append(replace(parameter, states=states, is_trainable=is_trainable))
    if len(steps) > 1:
        raise UserError(
            f"The parameters of '{source}' took from {min(steps):g} to {max(steps):g} steps, and zeroir counts once "
            "for all: import the weights alone (--weights-only)."
        )
    notes = list(optimizer.notes)
    if left_out:
        notes.append(
            "States without the shape of their parameter, or a plain name, were left out: "
            f"{', '.join(sorted(left_out))}."
        )
    groups = tuple(_stored_groups(parameters, optimizer.groups))
    if len(groups) < len(optimizer.groups):
        notes.append(
            "The settings of the optimizer were left out, since its kind is not known: give them when you compile."
        )
        groups = ()
    return replace(
        model,
        parameters=tuple(parameters),
        scalars=(*model.scalars, *(step_scalar(step) for step in steps)),
        step=model.step or int(max(steps, default=0)),
        groups=groups,
        notes=(*model.notes, *notes),
    )


def step_scalar(step: float) -> StoredScalar:
    """Return the scalar that counts the updates of the optimizer."""
    return StoredScalar(name=STEP, dtype="f32", values=(step,))


def number_in(value: object) -> float | None:
    """Return a finite number, or the only element of a tensor; None for anything else."""
    if isinstance(value, ImportedTensor) and value.numel == 1 and value.dtype in _NUMBERS:
        bits = np.frombuffer(b"".join(value.blocks("a number")), _NUMBERS[value.dtype])
        value = bits.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _nested(part: Tree) -> OptimizerState:
    groups = part.get("param_groups")
    lists = [group for group in _values(groups) if isinstance(group, Mapping)]
    states = part["state"] if isinstance(part["state"], Mapping) else {}
    names = _names_of_numbers(lists)
    if any(isinstance(key, int) and key not in names for key in states):
        return OptimizerState(
            states={},
            groups=(),
            notes=(_NUMBERED,),
        )
    return OptimizerState(
        states={
            names.get(key, str(key)): {str(name): value for name, value in of_parameter.items()}
            for key, of_parameter in states.items()
            if isinstance(of_parameter, Mapping)
        },
        groups=[
            ImportedGroup(
                parameters=tuple(names.get(key, str(key)) for key in _values(group.get("params"))),
                settings={str(name): value for name, value in group.items()},
            )
            for group in lists
        ],
    )


def _names_of_numbers(groups: Sequence[Tree]) -> dict[object, str]:
    """Map the indices of parameters to their names, for an optimizer made with ``named_parameters()``."""
    return {
        number: name
        for group in groups
        for number, name in zip(
            _values(group.get("params")), _values(group.get("param_names")), strict=False
        )
        if isinstance(number, int) and isinstance(name, str)
    }


def _values(items: object) -> list[object]:
    """Return the items of a list, or of a dictionary with indices as keys."""
    if isinstance(items, Mapping):
        return list(items.values())
    return list(items) if isinstance(items, list | tuple) else []


def _flattened(part: Tree, names: Iterable[str]) -> OptimizerState:
    """Parse entries ``state.<name>.<state>`` and ``param_groups.<name>.<setting>``.

    Names contain dots, settings none.
    """
    known = set(names)
    states: dict[str, dict[str, object]] = {}
    settings: dict[str, dict[str, object]] = {}
    for key, value in part.items():
        kind, _, rest = str(key).partition(".")
        name, _, last = rest.rpartition(".")
        if name in known and kind in ("state", "param_groups"):
            (states if kind == "state" else settings).setdefault(name, {})[last] = value
    groups: dict[str, tuple[list[str], Mapping[str, object]]] = {}
    for name, own in settings.items():
        plain = {
            key: number_in(value) if isinstance(value, ImportedTensor) else value
            for key, value in own.items()
        }
        groups.setdefault(repr(sorted(plain.items())), ([], plain))[0].append(name)
    return OptimizerState(
        states=states,
        groups=[
            ImportedGroup(parameters=tuple(members), settings=own)
            for members, own in groups.values()
        ],
    )


def _stored_groups(
    parameters: Sequence[ImportedParameter], groups: Sequence[ImportedGroup]
) -> Iterator[StoredGroup]:
    """Yield the groups whose algorithm is known. Unnamed ones get the default names that programs use."""
    own_names = {
        alias: parameter
        for parameter in parameters
        for alias in (parameter.name, *parameter.aliases)
    }
    for number, group in enumerate(groups):
        members = [own_names[name] for name in group.parameters if name in own_names]
        states = {name for parameter in members for name in parameter.states}
        algorithm = _algorithm(states, group.settings)
        if algorithm is None:
            continue
        name = group.settings.get("name")
        first = DEFAULT_GROUP if number == 0 else f"group{number}"
        yield StoredGroup(
            name=name if isinstance(name, str) else first,
            algorithm=algorithm,
            settings={
                key: setting
                for key in group.settings
                if key in _SETTINGS and (setting := _setting(group.settings[key])) is not None
            },
            parameters=tuple(dict.fromkeys(parameter.name for parameter in members)),
        )


def _setting(value: object) -> Setting:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(number_in(item) for item in value)
    number = number_in(value)
    return int(number) if isinstance(value, int) and number is not None else number


def _algorithm(states: set[str], settings: Mapping[str, object]) -> Algorithm | None:
    """Find the optimizer with such states and settings, and the most specific one if there are several.

    Parameters need not have all states if settings identify the optimizer.
    """

    def is_meant(algorithm: Algorithm) -> bool:
        declaration = algorithm.declaration
        names = set(algorithm.state_names)
        fixed = algorithm.fixed
        return (
            declaration.marks is not None
            and settings.keys() >= {*declaration.marks, *fixed}
            and all(settings[key] == value for key, value in fixed.items())
            and (states <= names if fixed else states == names)
        )

    return max(filter(is_meant, Algorithm), key=_marks, default=None)


def _marks(algorithm: Algorithm) -> int:
    return len(algorithm.declaration.marks or ())
