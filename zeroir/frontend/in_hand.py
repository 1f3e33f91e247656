"""Sources without a model file: a module in hand, and a function that makes one.

The compiler traces a copy of a module in hand whose tensors are on the meta device, so that the user's module stays as
it is and no memory is taken.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroir.errors import UserError, ZeroirError
from zeroir.frontend.imports import is_in_a_library
from zeroir.frontend.source import (
    LossFunction,
    ModelSource,
    SourceNames,
    WeightFunction,
    explain,
    line_in_users_code,
)
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.devices import one_device


def source_of(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    loss: LossFunction | None,
    weight: WeightFunction | None,
) -> ModelSource:
    """The source of a module in hand or of a function that makes one, with an example micro-batch."""
    if isinstance(model, nn.Module):
        module = _uncompiled(model)
        name = f"the module {type(module).__name__}"
        code = _files([loss, *map(type, module.modules())])
        return _source(
            SourceNames(model=name, maker=name, batch=_BATCH, loss=_loss_name(loss)),
            lambda: meta_copy(module),
            lambda: module,
            code,
            batch,
            loss,
            weight,
            is_in_hand=True,
        )
    factory = model
    name = f"{_function_name(factory)}()"
    code = _files([factory, loss])

    def make() -> nn.Module:
        try:
            with one_device():
                return factory()
        except (ZeroirError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code
            raise UserError(explain(error, line_in_users_code(error), f"{name} failed")) from None

    return _source(
        SourceNames(model=f"the model of {name}", maker=name, batch=_BATCH, loss=_loss_name(loss)),
        make,
        make,
        code,
        batch,
        loss,
        weight,
        is_in_hand=False,
    )


_BATCH = "the example batch"


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors are on the meta device; parameters that are tied stay tied.

    Raises:
        UserError: where an object in the module cannot be copied.
    """
    # Parameters are copied by a method of their own, which would copy their values.
    memo: dict[int, object] = {id(p): _meta_parameter(p) for p in module.parameters()}
    try:
        with _MetaCopies():
            return copy.deepcopy(module, memo)
    except Exception as error:  # noqa: BLE001 - any error of the objects in the module
        raise UserError(
            explain(
                error,
                None,
                f"The module {type(module).__name__} cannot be copied, which zeroir does to trace it; pass a function "
                "that makes the module instead. The copy failed",
            )
        ) from None


class _MetaCopies(TorchFunctionMode):
    """Makes deep copies of tensors on the meta device."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        assert isinstance(tensor, Tensor)
        assert isinstance(memo, dict)
        if id(tensor) not in memo:
            memo[id(tensor)] = _meta_tensor(tensor)
        return memo[id(tensor)]


def _meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )


def _meta_tensor(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta")
    if tensor.grad_fn is None:
        return twin.requires_grad_(tensor.requires_grad)
    # It was computed from parameters, which the tracer must see.
    return twin.requires_grad_().clone()


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped; a program is compiled from its own code."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _source(
    names: SourceNames,
    build: Callable[[], nn.Module],
    model: Callable[[], nn.Module],
    code: list[Path],
    batch: Batch,
    loss: LossFunction | None,
    weight: WeightFunction | None,
    *,
    is_in_hand: bool,
) -> ModelSource:
    return ModelSource(
        names=names,
        folder=code[0].parent if code else Path.cwd(),
        build=build,
        model=model,
        batch=lambda: batch,
        loss=loss,
        weight=weight,
        modules=_modules_of(code),
        is_in_hand=is_in_hand,
    )


def _loss_name(loss: LossFunction | None) -> str:
    return "the model's forward" if loss is None else f"{_function_name(loss)}()"


def _function_name(function: object) -> str:
    name = getattr(function, "__qualname__", None)
    return str(name) if name is not None else type(function).__name__


def _files(objects: Iterable[object]) -> list[Path]:
    """The user's files that define these classes and functions, in their order."""
    files: dict[Path, None] = {}
    for item in objects:
        if item is None:
            continue
        try:
            file = inspect.getsourcefile(inspect.unwrap(item))  # type: ignore[arg-type]
        except TypeError:
            continue
        if file is not None and not is_in_a_library(Path(file)):
            files[Path(file)] = None
    return list(files)


def _modules_of(files: Iterable[Path]) -> tuple[str, ...]:
    """The names of the Python modules that were loaded from these files."""
    wanted = {file.resolve() for file in files}
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and Path(file).resolve() in wanted
    )
