"""Optimizers of ``torch.optim`` as options of a compilation: a class, or an instance over the parameters of a module.

A class determines the algorithm and its defaults. An instance also determines the groups, and so does a list of
instances, such as an optimizer of matrices and one for the rest. The first group's settings become the options; each
further group, and a first one with a name, becomes one of ``CompileOptions.group``, which names its parameters. A
parameter in no group is not trained, as in torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from zeroir.config.groups import DEFAULT_GROUP, GroupError, group_text, parse_groups
from zeroir.config.optimizer import GROUP_KEYS
from zeroir.errors import UserError
from zeroir.frontend.source.source import ModelSource
from zeroir.ir.optimizers.catalogue import OPTIONS, Algorithm, with_settings

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _pairs() -> Mapping[str, tuple[str, ...]]:
    names: dict[str, dict[int, str]] = {}
    for algorithm in Algorithm:
        for setting in algorithm.declaration.settings:
            if setting.torch_pair is not None:
                key, index = setting.torch_pair
                names.setdefault(key, {})[index] = setting.name
    return {key: tuple(of_key[index] for index in sorted(of_key)) for key, of_key in names.items()}


def _of_classes() -> Mapping[str, tuple[Algorithm, ...]]:
    algorithms: dict[str, tuple[Algorithm, ...]] = {}
    for algorithm in Algorithm:
        of_torch = algorithm.declaration.torch
        names = () if of_torch is None else (of_torch.class_name, *of_torch.other_classes)
        for name in names:
            algorithms[name] = (*algorithms.get(name, ()), algorithm)
    return algorithms


_IMPLEMENTATIONS: Final = frozenset({"foreach", "fused", "capturable"})
"""Settings that choose among implementations of one update rule; a program always uses torch's fused kernels."""

_NOT_SETTINGS: Final = frozenset({"params", "param_names", "name", "decoupled_weight_decay"})

_OF_MOMENTUM: Final = ("momentum", "dampening", "nesterov")
_PAIRS: Final = _pairs()
"""Settings of torch that are pairs, and their options; most have a single ``eps``."""

_OF_CLASS: Final = _of_classes()
"""The classes of ``torch.optim``, and the algorithms that each can represent."""

_PATTERN_CHARACTERS: Final = re.compile(r"[*?\[\]|;:,]")
"""Characters of a name with another meaning in a group; a question mark matches each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedOptimizer:
    """The options for an optimizer of torch, and the parameters that it does not train.

    ``is_instance`` is whether it has parameters.
    """

    options: Mapping[str, object]
    untrained: frozenset[str] = frozenset()
    is_instance: bool = True

    def source(self, source: ModelSource) -> ModelSource:
        """Return the source with the parameters frozen that the optimizer does not train."""
        source = replace(source, has_optimizer=self.is_instance)
        if not self.untrained:
            return source
        return replace(source, build=lambda: _frozen(source.build(), self.untrained))


def translated(
    optimizer: object, model: object, options: Mapping[str, object]
) -> TranslatedOptimizer:
    """Translate a class or an instance of ``torch.optim`` to options, and return all options with it.

    ``model`` is the module whose parameters an instance has.

    Raises:
        UserError: if the optimizer, one of its settings, or its current state is not supported.
    """
    given = {name: value for name, value in options.items() if name != "optimizer"}
    if isinstance(optimizer, type):
        return TranslatedOptimizer(options=_of_class(optimizer, given), is_instance=False)
    instances = list(optimizer) if isinstance(optimizer, tuple | list) else [optimizer]
    optimizers = [each for each in instances if isinstance(each, torch.optim.Optimizer)]
    if not optimizers or len(optimizers) < len(instances):
        raise UserError(
            f"optimizer is {optimizer!r}, but should be a name ({', '.join(Algorithm)}), or a class or an instance of "
            "torch.optim, or a list of instances."
        )
    kind = type(optimizers[0]).__name__
    if not isinstance(model, nn.Module):
        raise UserError(
            f"An instance of {kind} has the parameters of a module: compile that module, or pass the class as "
            "optimizer= and groups as group=."
        )
    for name in ("lr", *OPTIONS, "group", "no_decay"):
        if name in given:
            raise UserError(
                f"{name}= has no effect beside an instance of {kind}: set it in the instance."
            )
    return _of_instances(optimizers, model, given)


def instances(optimizer: object) -> tuple[Optimizer, ...]:
    """Return the instances among what ``translated`` takes; a class is none."""
    items = optimizer if isinstance(optimizer, tuple | list) else (optimizer,)
    return tuple(item for item in items if isinstance(item, torch.optim.Optimizer))


# --------------------------------------------------------------------------------------------------------- a class


def _algorithms(kind: type) -> tuple[Algorithm, ...]:
    """Return the algorithms that a class of torch's optimizers can represent; subclasses are refused."""
    name = kind.__name__
    if getattr(torch.optim, name, None) is kind and name in _OF_CLASS:
        return _OF_CLASS[name]
    what = f"zeroir has no optimizer {kind.__module__}.{kind.__qualname__}"
    if name in _OF_CLASS:
        raise UserError(
            f"{what}, which is not torch.optim.{name}: to train with the latter, pass torch.optim.{name} or an "
            "instance of it as the optimizer."
        )
    raise UserError(f"{what}; of torch.optim it has {', '.join(_OF_CLASS)}.")


def _of_class(kind: type, given: Mapping[str, object]) -> dict[str, object]:
    """Return the options, with the defaults of the class where none is given."""
    candidates = _algorithms(kind)
    defaults = _as_options(_defaults(kind))
    algorithm = with_settings(candidates, {**defaults, **given})
    own = _option_names(algorithm)
    values = {n: value for n, value in given.items() if n in own or n not in algorithm.fixed}
    for name, value in defaults.items():
        if name in own - set(_OF_MOMENTUM):
            values.setdefault(name, value)
    return {**values, "optimizer": algorithm}


def _option_names(algorithm: Algorithm) -> frozenset[str]:
    """Return the options that have an effect with an algorithm."""
    return frozenset(
        ("lr", *(name for name, option in OPTIONS.items() if algorithm in option.settings))
    )


def _defaults(kind: type) -> dict[str, object]:
    """Return the defaults of a class's settings."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _as_options(settings: Mapping[str, object]) -> dict[str, object]:
    """Rename settings of torch's optimizers to options; None, torch's choice, is left out."""
    values = dict(settings)
    for key, names in _PAIRS.items():
        pair = values.get(key)
        if isinstance(pair, tuple | list):
            del values[key]
            values.update(zip(names, pair, strict=True))
    return {name: value for name, value in values.items() if value is not None}


# ------------------------------------------------------------------------------------------------------ an instance


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchGroup:
    """A group of an instance: the names of its parameters, and its options."""

    label: str
    name: str | None
    algorithm: Algorithm
    members: tuple[str, ...]
    options: Mapping[str, object]


def _of_instances(
    optimizers: Sequence[Optimizer], module: nn.Module, given: Mapping[str, object]
) -> TranslatedOptimizer:
    module = _uncompiled(module)
    groups = [group for optimizer in optimizers for group in _groups(optimizer, module)]
    trained: set[str] = set()
    for group in groups:
        twice = trained & set(group.members)
        if twice:
            raise UserError(f"{group.label} has {min(twice)}, which another optimizer has, too.")
        trained |= set(group.members)
    untrained = {name for name, _ in module.named_parameters()} - trained
    first = groups[0]
    options = {**given, **first.options, "optimizer": first.algorithm}
    if len(groups) > 1 or first.name is not None:
        options["group"] = _group_texts(groups, _aliases(module))
    return TranslatedOptimizer(options=options, untrained=frozenset(untrained))


def _groups(optimizer: Optimizer, module: nn.Module) -> list[_TorchGroup]:
    """Return the groups of one instance."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    candidates = _algorithms(kind)
    if optimizer.state:
        raise UserError(
            f"The {kind.__name__} has the states of {len(optimizer.state)} parameters already, which a new program "
            "does not take over: pass an instance that has taken no step, and load states from a checkpoint."
        )
    algorithm = _common(kind, candidates, groups)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: list[_TorchGroup] = []
    for number, group in enumerate(groups):
        label = f"Group {number} of the {kind.__name__}"
        given = group.get("name")
        is_name = isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9_]+", given) is not None
        found.append(
            _TorchGroup(
                label=label,
                name=given if is_name else None,
                algorithm=algorithm,
                members=_members(label, group["params"], names),
                options=_settings(kind, algorithm, label, group),
            )
        )
    return found


def _common(
    kind: type, candidates: Sequence[Algorithm], groups: Sequence[Mapping[str, object]]
) -> Algorithm:
    """Return the algorithm of all groups; one without fixed settings covers groups with any values of these."""
    found = {with_settings(candidates, group): None for group in groups}
    for algorithm in found:
        if len(found) == 1 or not algorithm.fixed:
            return algorithm
    names = " and ".join(found)
    raise UserError(
        f"The groups of the {kind.__name__} are {names} by their settings: pass an instance for each of these."
    )


def _members(label: str, parameters: Sequence[Tensor], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the parameters of a group, which may be frozen for now."""
    own: list[str] = []
    for parameter in parameters:
        name = names.get(id(parameter))
        if name is None:
            raise UserError(
                f"{label} has a parameter of shape {list(parameter.shape)} that is not one of the module: make the "
                "optimizer from the parameters of the module that is compiled."
            )
        own.append(name)
    if not own:
        raise UserError(f"{label} has no parameter: leave it out.")
    return tuple(own)


def _aliases(module: nn.Module) -> Mapping[str, Sequence[str]]:
    """Return all names of each parameter, by the first of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {every_name[0]: every_name for every_name in names.values()}


def _settings(
    kind: type, algorithm: Algorithm, label: str, group: Mapping[str, object]
) -> dict[str, object]:
    """Return the options of one group.

    Raises:
        UserError: if a setting is not supported.
    """
    names = _option_names(algorithm)
    values: dict[str, object] = {}
    for name, value in _as_options(group).items():
        if name in names:
            values[name] = value.item() if isinstance(value, Tensor) else value
    defaults = _defaults(kind)
    ignored = names | _IMPLEMENTATIONS | _NOT_SETTINGS | {*_OF_MOMENTUM, *_PAIRS}
    for name in sorted(defaults.keys() & group.keys() - ignored):
        if group[name] and group[name] != defaults[name]:
            raise UserError(f"{label} has {name}={group[name]}, which zeroir does not support.")
    return values


def _group_texts(
    groups: Sequence[_TorchGroup], aliases: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the groups as strings, except the first, which needs none unless it has a name."""
    first = groups[0]
    texts: list[str] = []
    for number, group in enumerate(groups):
        if number == 0 and group.name in (None, DEFAULT_GROUP):
            continue
        others = [
            alias for g in groups if g is not group for name in g.members for alias in aliases[name]
        ]
        settings = dict(group.options)
        is_alike = group.algorithm is first.algorithm
        for name in settings.keys() - set(GROUP_KEYS):
            default = OPTIONS[name].settings[group.algorithm].default
            if settings.pop(name) != (first.options[name] if is_alike else default):
                raise UserError(f"{group.label} has other {name} than the first group.")
        if group.algorithm is not first.algorithm:
            settings = {"optimizer": str(group.algorithm), **settings}
        settings["name"] = group.name or f"group{number}"
        try:
            texts.append(group_text("|".join(_patterns(group.members, others)), settings))
        except GroupError as error:
            raise UserError(f"{group.label} cannot be read: {error}.") from None
    return tuple(texts)


def _patterns(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """Return patterns that match exactly these names; one for the same parameter of all blocks if possible."""
    patterns: dict[str, None] = {}
    are_apart: dict[str, bool] = {}
    for name in names:
        escaped = _PATTERN_CHARACTERS.sub("?", name)
        pattern = ".".join("*" if part.isdecimal() else part for part in escaped.split("."))
        if pattern not in are_apart:
            (spec,) = parse_groups([f"{pattern}:"])
            are_apart[pattern] = not any(spec.matches([other]) for other in others)
        patterns[pattern if are_apart[pattern] else escaped] = None
    return list(patterns)


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wrapped, whose parameter names are used."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _frozen(module: nn.Module, names: frozenset[str]) -> nn.Module:
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    return module
