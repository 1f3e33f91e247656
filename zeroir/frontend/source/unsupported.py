"""Rejects features of a module that a program would ignore: each in one sentence that names it."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend._torch_hooks import global_hooks
from zeroir.frontend._torch_private import has_accumulation_hooks, has_partial_backward_hooks
from zeroir.frontend.source.source import SourceNames, capitalised
from zeroir.frontend.source.source_lines import line_of_definition, line_of_module, refusals_at
from zeroir.torch_ops.absent_tensors import MovedTensor
from zeroir.torch_ops.batches import undense_kind

_SHARDING_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "FSDPModule": None,
}
"""Classes that train a module in their own way, and the attribute with the plain module."""

MAKE_PART_OF_MODEL: Final = (
    "make each module and parameter that it uses an attribute of a module (self.head = head), also where a function in "
    "a closure calls it, lists and dicts of modules nn.ModuleList and nn.ModuleDict, and other tensors buffers with "
    "register_buffer"
)
"""The remedy where a model uses a tensor that is not its own."""


def require_supported(model: object, names: SourceNames) -> nn.Module:
    """Return the model, if it is a module that can be traced and trained.

    Raises:
        UserError: if it is not, or has a feature that a program would ignore.
    """
    if not isinstance(model, nn.Module):
        with refusals_at(names.maker_line):
            raise UserError(
                f"{capitalised(names.maker)} returned {type(model).__name__}; it must return a torch.nn.Module."
            )
    if hooks := global_hooks():
        with refusals_at(line_of_definition(hooks[0]) or names.maker_line):
            raise UserError(
                f"The hook {_name(hooks[0])} is registered for all modules of this process, so a program cannot tell "
                "which modules are meant: register it on the modules themselves."
            )
    for name, module in model.named_modules():
        with refusals_at(partial(_line, model, name, names)):
            _require_supported_module(name, module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with refusals_at(partial(_line, model, name, names)):
            _require_supported_tensor(f"parameter {name}", parameter)
            _require_no_accumulation_hooks(name, parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        with refusals_at(partial(_line, model, name, names)):
            _require_supported_tensor(f"buffer {name}", buffer)
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        with refusals_at(_line(model, "", names)):
            raise UserError(
                f"{capitalised(names.model)} has no trainable parameter: none of its parameters requires a gradient."
            )
    return model


def _line(model: nn.Module, name: str, names: SourceNames) -> str:
    """Return ``file:line`` of the constructor around the part of this name, or of the model's creation."""
    return line_of_module(model, name) or names.maker_line


def _require_no_accumulation_hooks(name: str, parameter: nn.Parameter) -> None:
    if has_accumulation_hooks(parameter):
        raise UserError(
            f"The parameter {name} of the model has a hook of register_post_accumulate_grad_hook, which a program "
            "cannot call, because it shards gradients as soon as they are complete; remove it, or use "
            "register_hook."
        )


def _require_supported_module(name: str, module: nn.Module) -> None:
    what = f"module {name} of the model" if name else "model"
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(
            f"The {what} is TorchScript, which cannot be traced; use the Python module that was compiled to it."
        )
    for kind in type(module).__mro__:
        if kind.__name__ in _SHARDING_WRAPPERS:
            attribute = _SHARDING_WRAPPERS[kind.__name__]
            remedy = (
                f"pass the module in it, .{attribute}"
                if attribute
                else "pass the module before fully_shard"
            )
            raise UserError(
                f"The {what} is a {kind.__name__}, which distributes the training in its own way: {remedy}."
            )
    if isinstance(module, nn.SyncBatchNorm):
        raise UserError(
            f"The {what} is a SyncBatchNorm, whose statistics are those of all ranks, while a program computes each "
            "rank's own: use BatchNorm, or a norm without statistics of the batch."
        )
    if has_partial_backward_hooks(module):
        raise UserError(
            f"The {what} has a hook of register_backward_hook, which sees other gradients in a trace: use "
            "register_full_backward_hook."
        )


def _require_supported_tensor(what: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise UserError(
            f"The {what} of the model has no shape yet; use a module with given sizes instead of a lazy one."
        )
    kind = type(tensor)
    if kind.__name__ == "DTensor" or hasattr(tensor, "ds_id"):
        raise UserError(
            f"The {what} of the model is sharded already ({kind.__name__}); pass the module as it was before, since a "
            "program shards it itself."
        )
    if _computes_in_its_own_way(kind) and kind is not MovedTensor:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        small = (
            "; zeroir.quantize_frozen(model) stores frozen weights in 4 or 8 bits"
            if is_frozen
            else ""
        )
        raise UserError(
            f"The {what} of the model is a {kind.__name__}, whose elements a program cannot store in a flat buffer: "
            f"use a plain tensor{small}."
        )
    layout = None if tensor.is_meta else undense_kind(tensor)
    if layout is not None:
        raise UserError(
            f"The {what} of the model is {layout}; a program stores dense tensors only."
        )


def _computes_in_its_own_way(kind: type[Tensor]) -> bool:
    """Return whether a subclass of Tensor changes how operators work on its tensors.

    A subclass of Parameter rarely does.
    """
    usual = {_function(Tensor.__torch_function__), _function(nn.Parameter.__torch_function__)}
    has_usual_functions = _function(kind.__torch_function__) in usual
    return not has_usual_functions or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _function(method: object) -> object:
    """Return the function of a class method, which is another object for each class."""
    return getattr(method, "__func__", method)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
