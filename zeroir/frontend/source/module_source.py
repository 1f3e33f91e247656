"""Sources without a model file: a module, or a function that creates one.

The compiler traces a copy of a given module whose tensors are on the meta device, so that the user's module does not
change and no memory is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

from torch import Tensor, nn

from zeroir.errors import UserError, ZeroirError
from zeroir.frontend._torch_hooks import HOOKS_OF_MODULES, gradient_hooks
from zeroir.frontend.source.imports import is_in_a_library, is_known_package
from zeroir.frontend.source.meta_copy import meta_copy
from zeroir.frontend.source.source import (
    LossFunction,
    ModelSource,
    SourceNames,
    WeightFunction,
    explain,
    takes_positional,
)
from zeroir.frontend.source.source_lines import (
    line_of_definition,
    line_of_error,
    line_of_user,
    refusals_at,
)
from zeroir.frontend.source.unsupported import require_supported
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.devices import one_device
from zeroir.torch_ops.frozen_modules import WithFrozenModules, frozen_modules


def source_of(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    loss: LossFunction | None,
    weight: WeightFunction | None,
    frozen: FrozenModules | None = None,
) -> ModelSource:
    """Return the source of a module, or of a function that creates one, with an example micro-batch.

    ``frozen`` are modules that the code uses and that are to be frozen parts of the program.

    Raises:
        UserError: if one of these is wrong.
    """
    line = line_of_user()
    with refusals_at(line):
        _require_functions(loss, weight)
    if isinstance(model, nn.Module):
        module = _uncompiled(model)
        name = f"the module {type(module).__name__}"
        if frozen is not None:
            with refusals_at(line):
                module = _with_frozen(module, frozen)
        names = SourceNames(
            model=name,
            maker=name,
            batch=_BATCH,
            loss=_loss_name(loss),
            maker_line=line,
            batch_line=line,
        )
        code = _user_modules([loss, *map(type, module.modules()), *_hooks(module)])
        return _source(
            names,
            lambda: _meta_copy(require_supported(module, names)),
            lambda: module,
            code,
            batch,
            loss,
            weight,
            is_in_hand=True,
        )
    if frozen is not None:
        with refusals_at(line):
            raise UserError(
                "frozen= is for a module in memory, and the model is a function that makes one: pass the module itself."
            )
    factory = model
    name = f"{_function_name(factory)}()"
    code = _user_modules([factory, loss])

    def make() -> nn.Module:
        try:
            with one_device():
                return factory()
        except (ZeroirError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code
            raise UserError(explain(error, line_of_error(error), f"{name} failed")) from None

    return _source(
        SourceNames(
            model=f"the model of {name}",
            maker=name,
            batch=_BATCH,
            loss=_loss_name(loss),
            maker_line=line_of_definition(factory) or line,
            batch_line=line,
        ),
        make,
        make,
        code,
        batch,
        loss,
        weight,
        is_in_hand=False,
    )


FrozenModules = nn.Module | Mapping[str, nn.Module]
"""A module, or modules by their names, which the code of the loss uses and which the program shards and freezes."""

NAME_OF_ONE: Final = "frozen"
"""The name of a frozen module that is given none."""


def _with_frozen(module: nn.Module, frozen: FrozenModules) -> nn.Module:
    """Return the module together with frozen ones.

    Raises:
        UserError: if one has a name that cannot be its own, is no module, or shares a tensor with the model.
    """
    if not isinstance(frozen, nn.Module | Mapping):
        raise UserError(
            f"frozen= is {frozen!r:.60}, but should be a module, or a dict of modules by name, such as "
            '{"teacher": teacher}.'
        )
    named = {NAME_OF_ONE: frozen} if isinstance(frozen, nn.Module) else dict(frozen)
    own = {id(tensor): name for name, tensor in _named_tensors(module)}
    for name, each in named.items():
        what = f"frozen= has '{name}'"
        if not str(name).isidentifier() or hasattr(module, name):
            raise UserError(
                f"{what}, which is no free name of a submodule of the model: name it otherwise, as in "
                'frozen={"teacher": teacher}.'
            )
        if not isinstance(each, nn.Module):
            raise UserError(f"{what}, which is no module but of type {type(each).__name__}.")
        shared = next((own[id(x)] for _, x in _named_tensors(each) if id(x) in own), None)
        if shared is not None:
            raise UserError(
                f"{what}, which has the model's own {shared}: copy the module (copy.deepcopy), or freeze that part of "
                "the model with requires_grad_(False) and leave it out of frozen=."
            )
    return WithFrozenModules(module, {name: _uncompiled(each) for name, each in named.items()})


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _meta_copy(module: nn.Module) -> nn.Module:
    copied = meta_copy(module)
    for each in frozen_modules(copied).values():
        each.requires_grad_(False)
    return copied


def with_module_in_hand(source: ModelSource, module: nn.Module) -> ModelSource:
    """Return the source of a model file with its module, which has no values, as one that is in hand.

    What the file's functions change in the module then counts.

    Raises:
        UserError: if the module is not supported.
    """
    require_supported(module, source.names)
    return replace(source, build=lambda: meta_copy(module), model=lambda: module, is_in_hand=True)


def _require_functions(loss: LossFunction | None, weight: WeightFunction | None) -> None:
    """Raise a UserError if the loss is one of torch, which takes no model and batch, or has other parameters."""
    if loss is not None:
        package = str(getattr(loss, "__module__", "")).partition(".")[0]
        if package == "torch" or not takes_positional(loss, (2,)):
            raise UserError(
                f"loss={_function_name(loss)} is not a function of the module and a batch: define `def loss(module, "
                "batch): ...`, which calls the module and returns the loss."
            )
    if weight is not None and not takes_positional(weight, (1,)):
        raise UserError(
            f"weight={_function_name(weight)} is not a function of a batch: define `def weight(batch): ...`."
        )


_BATCH = "the example batch"


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wrapped; a program is compiled from its own code."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _source(
    names: SourceNames,
    build: Callable[[], nn.Module],
    model: Callable[[], nn.Module],
    code: tuple[str, ...],
    batch: Batch,
    loss: LossFunction | None,
    weight: WeightFunction | None,
    *,
    is_in_hand: bool,
) -> ModelSource:
    return ModelSource(
        names=names,
        folder=next((file.parent for name in code if (file := _file_of(name))), Path.cwd()),
        build=build,
        model=model,
        batch=lambda: batch,
        loss=loss,
        weight=weight,
        modules=code,
        is_in_hand=is_in_hand,
    )


def _loss_name(loss: LossFunction | None) -> str:
    return "the model's forward" if loss is None else f"{_function_name(loss)}()"


def _function_name(function: object) -> str:
    name = getattr(function, "__qualname__", None)
    return str(name) if name is not None else type(function).__name__


def _hooks(module: nn.Module) -> Iterator[object]:
    """Yield the functions that are hooks of a module, its submodules and its parameters.

    Of other hooks their classes.
    """
    registered: list[object] = []
    for child in module.modules():
        for kind in HOOKS_OF_MODULES:
            registered += vars(child).get(kind, {}).values()
    for parameter in module.parameters():
        registered += gradient_hooks(parameter)
    for hook in registered:
        function = hook
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        yield function if isinstance(function, FunctionType) else type(function)


def _user_modules(objects: Iterable[object]) -> tuple[str, ...]:
    """Return the user's Python modules that define these classes and functions, and those whose objects they import."""
    names = dict.fromkeys(name for item in objects if (name := _users_module_of(item)) is not None)
    waiting = list(names)
    while waiting:
        for value in list(vars(sys.modules[waiting.pop()]).values()):
            name = _users_module_of(value)
            if name is not None and name not in names:
                names[name] = None
                waiting.append(name)
    return tuple(names)


def _users_module_of(value: object) -> str | None:
    """Return the name of the Python module that an object is or that defines it; None if that is not the user's."""
    if not isinstance(value, ModuleType | FunctionType | type):
        return None
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    module = sys.modules.get(name)
    if module is None or is_known_package(name):
        return None
    file = _file_of(name)
    # A notebook has no file.
    is_users = name == "__main__" if file is None else not is_in_a_library(file)
    return name if is_users else None


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules[module], "__file__", None)
    return None if file is None else Path(file)
