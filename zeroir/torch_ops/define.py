"""Define operators in torch's dispatcher without importing torch's compiler.

``torch.library.custom_op`` wraps each kernel so that the compiler does not trace into it, and the first call imports
the compiler. That takes seconds in every training process, although it compiles nothing. This module defines the same
operators with the functions that ``custom_op`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

Saved = tuple[Sequence[Tensor | None], tuple[object, ...]]
"""The arguments of an operator's backward after the gradient: tensors, then others."""


class _Context(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[Tensor | None, ...]
    options: tuple[object, ...]
    argument_count: int


def define(
    name: str, function: Callable[..., object], mutates: Sequence[str] = ()
) -> torch._ops.OpOverload:
    """Define ``namespace::name`` with the function as its kernel on every device; its annotations are the schema.

    ``mutates`` names the arguments that the function writes. An operator that returns nothing gets a fake kernel here;
    ``fake`` registers the others'.
    """
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", function)
    if schema.endswith("-> ()"):
        torch.library.register_fake(name, _nothing)
    namespace, _, local = name.partition("::")
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), local).default
    return overload


def fake(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as an operator's fake kernel, which tracing calls for the types of the results."""

    def register(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.register_fake(name, function)
        return function

    return register


def differentiate(
    name: str,
    backward: Callable[..., tuple[Tensor | None, ...]],
    saved: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Saved],
) -> None:
    """Register the backward of an operator of which only the first result has a gradient.

    ``saved`` selects from the arguments and the results what is passed to ``backward`` after the gradient of the first
    result. ``backward`` returns the gradients of the first arguments; the others have none.
    """

    def set_up(
        ctx: _Context, inputs: tuple[object, ...], output: Tensor | tuple[Tensor, ...]
    ) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        tensors, ctx.options = saved(inputs, results)
        ctx.save_for_backward(*cast("tuple[Tensor, ...]", tuple(tensors)))
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.argument_count = len(inputs)

    def differentiated(
        ctx: _Context, grad: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * ctx.argument_count
        gradients = backward(grad, *ctx.saved_tensors, *ctx.options)
        return (*gradients, *(None,) * (ctx.argument_count - len(gradients)))

    torch.library.register_autograd(name, differentiated, setup_context=set_up)


def _nothing(*_: object) -> None:
    pass
