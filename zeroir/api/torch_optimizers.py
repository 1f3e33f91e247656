"""Optimizers of ``torch.optim`` as options of a compilation: a class, or an instance over the parameters of a module.

A class gives the algorithm and its own defaults. An instance gives its groups, too: the first group's settings are the
options, and each further group is one of ``CompileOptions.group``, which names its parameters. A parameter in no group
is not trained, as torch would not train it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend.source import ModelSource
from zeroir.groups import GROUP_KEYS, GroupError, group_text, parse_groups
from zeroir.ir.ops import Algorithm

if TYPE_CHECKING:
    from torch.optim import Optimizer

_IMPLEMENTATIONS: Final = frozenset({"foreach", "fused", "capturable"})
"""Settings that choose among implementations of one update rule; a program always uses torch's fused kernels."""

_NOT_SETTINGS: Final = frozenset({"params", "param_names", "name", "decoupled_weight_decay"})

_OF_MOMENTUM: Final = ("momentum", "dampening", "nesterov")

_PATTERN_CHARACTERS: Final = re.compile(r"[*?\[\]|;:,]")
"""Characters of a name that mean something else in a group; a question mark matches each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedOptimizer:
    """The options that an optimizer of torch stands for, and the parameters that it leaves as they are."""

    options: Mapping[str, object]
    untrained: frozenset[str] = frozenset()

    def source(self, source: ModelSource) -> ModelSource:
        """The source with the parameters frozen that the optimizer does not train."""
        if not self.untrained:
            return source
        return replace(source, build=lambda: _frozen(source.build(), self.untrained))


def translated(
    optimizer: object, model: object, options: Mapping[str, object]
) -> TranslatedOptimizer:
    """The options with a class or an instance of ``torch.optim`` as their ``optimizer`` translated.

    ``model`` is the module whose parameters an instance holds.

    Raises:
        UserError: where the optimizer, one of its settings, or its present state is not supported.
    """
    given = {name: value for name, value in options.items() if name != "optimizer"}
    if isinstance(optimizer, type):
        algorithm = _algorithm(optimizer)
        return TranslatedOptimizer(options=_of_class(optimizer, algorithm, given))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer is {optimizer!r}, but should be a name ({', '.join(Algorithm)}), or a class or an instance of "
            "torch.optim."
        )
    if not isinstance(model, nn.Module):
        raise UserError(
            f"An instance of {type(optimizer).__name__} has the parameters of a module: compile that module, or pass "
            "the class as optimizer= and groups as group=."
        )
    for name in (*GROUP_KEYS, "group", "no_decay"):
        if name in given:
            raise UserError(
                f"{name}= has no effect beside an instance of {type(optimizer).__name__}: set it in the instance."
            )
    return _of_instance(optimizer, model, given)


# --------------------------------------------------------------------------------------------------------- a class


def _algorithm(kind: type) -> Algorithm:
    """The algorithm of a class of torch's optimizers, which no subclass of it may change."""
    name = kind.__name__.lower()
    if name in set(Algorithm) and getattr(torch.optim, kind.__name__, None) is kind:
        return Algorithm(name)
    supported = [
        each.__name__
        for each in vars(torch.optim).values()
        if isinstance(each, type) and each.__name__.lower() in set(Algorithm)
    ]
    raise UserError(
        f"zeroir has no optimizer {kind.__module__}.{kind.__qualname__}; of torch.optim it has {', '.join(supported)}."
    )


def _of_class(kind: type, algorithm: Algorithm, given: Mapping[str, object]) -> dict[str, object]:
    """The options, with the defaults of the class where nothing is given."""
    if algorithm is Algorithm.SGD and given.get("momentum"):
        algorithm = Algorithm.MOMENTUM
    values = dict(given)
    if algorithm is Algorithm.SGD and not values.get("momentum", 1):
        del values["momentum"]
    names = {"lr", *algorithm.hyper_names} - set(_OF_MOMENTUM)
    for name, value in _defaults(kind).items():
        if name in names & set(GROUP_KEYS):
            values.setdefault(name, value)
    return {**values, "optimizer": algorithm}


def _defaults(kind: type) -> dict[str, object]:
    """The defaults of a class's settings, under the names of options."""
    parameters = inspect.signature(kind).parameters.values()
    return _split_betas({p.name: p.default for p in parameters if p.default is not p.empty})


def _split_betas(settings: Mapping[str, object]) -> dict[str, object]:
    values = dict(settings)
    betas = values.pop("betas", None)
    if isinstance(betas, Sequence):
        values["beta1"], values["beta2"] = betas
    return values


# ------------------------------------------------------------------------------------------------------ an instance


def _of_instance(
    optimizer: Optimizer, module: nn.Module, given: Mapping[str, object]
) -> TranslatedOptimizer:
    kind = type(optimizer)
    algorithm = _algorithm(kind)
    groups = optimizer.param_groups
    if optimizer.state:
        raise UserError(
            f"The {kind.__name__} has the states of {len(optimizer.state)} parameters already, which a new program "
            "does not take over: pass an instance that has taken no step, and load states from a checkpoint."
        )
    if algorithm is Algorithm.SGD and any(group["momentum"] for group in groups):
        algorithm = Algorithm.MOMENTUM
    if algorithm is Algorithm.ADAM and any(g.get("decoupled_weight_decay") for g in groups):
        algorithm = Algorithm.ADAMW
        if not all(group["decoupled_weight_decay"] for group in groups):
            raise UserError(
                "Only some groups of the Adam have decoupled_weight_decay: give these to an AdamW in a program of "
                "their own, or set it everywhere."
            )
    module = _uncompiled(module)
    members = _members(optimizer, module)
    settings = [_settings(kind, algorithm, number, group) for number, group in enumerate(groups)]
    trained = {name for names in members for name in names}
    untrained = {
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    } - trained
    options = {**given, **settings[0], "optimizer": algorithm}
    if len(groups) > 1:
        options["group"] = _group_texts(groups, members, settings, _aliases(module))
    return TranslatedOptimizer(options=options, untrained=frozenset(untrained))


def _members(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """The names of the trained parameters of each group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    members: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        own: list[str] = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UserError(
                    f"Group {number} of the {type(optimizer).__name__} has a parameter of shape "
                    f"{list(parameter.shape)} that is not one of the module {type(module).__name__}: make the "
                    "optimizer from the parameters of the module that is compiled."
                )
            if parameter.requires_grad:
                own.append(name)
        if not own:
            raise UserError(
                f"Group {number} of the {type(optimizer).__name__} has no parameter that requires a gradient: leave "
                "it out."
            )
        members.append(own)
    return members


def _aliases(module: nn.Module) -> Mapping[str, Sequence[str]]:
    """All names of each parameter, by the first of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {every_name[0]: every_name for every_name in names.values()}


def _settings(
    kind: type, algorithm: Algorithm, number: int, group: Mapping[str, object]
) -> dict[str, object]:
    """The options of one group.

    Raises:
        UserError: where a setting is not supported.
    """
    defaults = _defaults(kind)
    names = {"lr", *algorithm.hyper_names}
    if algorithm is Algorithm.SGD:
        names -= set(_OF_MOMENTUM)
    if "initial_lr" in group:
        raise UserError(
            f"A scheduler drives the {kind.__name__}, and would go on to drive it instead of the program: make the "
            "scheduler from engine.optimizer."
        )
    values: dict[str, object] = {}
    for name, value in _split_betas(group).items():
        if name in names and name in GROUP_KEYS:
            values[name] = value.item() if isinstance(value, Tensor) else value
        elif name in _IMPLEMENTATIONS | _NOT_SETTINGS | set(_OF_MOMENTUM) or name not in defaults:
            continue
        elif value:
            raise UserError(
                f"Group {number} of the {kind.__name__} has {name}={value}, which zeroir does not support."
            )
    return values


def _group_texts(
    groups: Sequence[Mapping[str, object]],
    members: Sequence[Sequence[str]],
    settings: Sequence[Mapping[str, object]],
    aliases: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    """All groups but the first, as texts."""
    texts: list[str] = []
    for number, (group, names, values) in enumerate(zip(groups, members, settings, strict=True)):
        if number == 0:
            continue
        others = [alias for own in members if own is not names for n in own for alias in aliases[n]]
        patterns = _patterns(names, others)
        given = group.get("name")
        name = given if isinstance(given, str) and re.fullmatch(r"\w+", given, re.ASCII) else None
        try:
            own_name = {"name": name or f"group{number}"}
            texts.append(group_text("|".join(patterns), {**values, **own_name}))
        except GroupError as error:
            raise UserError(f"Group {number} of the optimizer cannot be read: {error}.") from None
    return tuple(texts)


def _patterns(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """Patterns that match these names and none of the others; one for the same parameter of all blocks if possible."""
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
    """The module that torch.compile wrapped, whose names of parameters count."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _frozen(module: nn.Module, names: frozenset[str]) -> nn.Module:
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    return module
