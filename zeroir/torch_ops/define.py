"""Define operators in torch's dispatcher without importing torch's compiler.

``torch.library.custom_op`` wraps each kernel so that the compiler does not trace into it, and the first call imports
the compiler: that takes seconds in every process that trains, although it compiles nothing. This module defines the
same operators by the functions that ``custom_op`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


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
    """Register a function as an operator's fake kernel: tracing calls it for the types of the results."""

    def register(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.register_fake(name, function)
        return function

    return register


def _nothing(*_: object) -> None:
    pass
