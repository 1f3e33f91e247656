"""Operators in torch's dispatcher that need nothing of torch's compiler.

``torch.library.custom_op`` wraps each kernel to keep the compiler out of it, and the first call imports the compiler
for that: seconds in every process that trains, although nothing there is compiled. The same operators are made here
of the functions that ``custom_op`` is made of.
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

    ``mutates`` names the arguments that the function writes. What returns nothing has its fake kernel already; the
    rest get one by ``fake``.
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
    """Let the function say of what types the operator's results are: what tracing calls in its stead."""

    def register(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.register_fake(name, function)
        return function

    return register


def _nothing(*_: object) -> None:
    pass
