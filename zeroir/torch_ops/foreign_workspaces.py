"""The workspaces of foreign operators, as their authors declare them.

The memory model knows what torch's operators allocate in addition to their arguments and results. For an operator of a
library or the model, its author declares this where the operator is registered, as with fake kernels, autograd formulas
and ``torch.utils.flop_counter.register_flop_formula``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch._library.custom_ops import CustomOpDef

from zeroir.errors import UserError
from zeroir.ir.limits import MOST_BYTES
from zeroir.torch_ops.purity import foreign_operator

ForeignOperator = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket | CustomOpDef
"""An operator by its name ``namespace::name``, or ``namespace::name.overload``, or as torch returns it."""

Formula = Callable[..., int]
"""Maps the arguments of a call to bytes. Tensors are fake ones: they have a shape and a dtype, but no values."""

_FORMULAS: Final[dict[str, Formula]] = {}
"""The formulas by the operator names of nodes. Like torch's registries of operators, this one is global."""


def register_workspace(op: ForeignOperator, formula: Formula) -> None:
    """Declare the workspace of an operator that a library or the model registers.

    ``formula`` is called with the arguments of a call, including defaults, and returns the most bytes that the call
    allocates at once in addition to its arguments, less those of its results, on any device. A compilation calls it
    with fake tensors for each call of the model, and the program stores the results. Predicted memory is as exact as
    they are. Before training, the self-check refuses an operator that takes more. A second formula replaces the first.

    Raises:
        UserError: if the operator is not registered, or is one of torch or zeroir, or the formula is not a function.
    """
    overload = str(resolved(op))
    if not callable(formula):
        raise UserError(
            f"The formula of {overload} for register_workspace is {formula!r}, but should be a function from the "
            "arguments of a call to bytes."
        )
    _FORMULAS[overload] = formula


def resolved(op: ForeignOperator) -> torch._ops.OpOverload:
    """Return the overload of an operator.

    Raises:
        UserError: if the operator is not registered, or is one of torch or zeroir.
    """
    name = str(op._qualname) if isinstance(op, CustomOpDef) else op
    if isinstance(name, str):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        try:
            found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except (AttributeError, RuntimeError):
            raise UserError(
                f"Nothing has registered an operator {name} in this process: give its name as namespace::name, after "
                "the code that registers it."
            ) from None
    else:
        found = name
    overload_found = foreign_operator(found)
    if overload_found is None:
        raise UserError(
            f"{name} is no operator that a library or the model registers, and no other operator has a workspace to "
            "declare or to measure."
        )
    return overload_found


def declared_workspace_bytes(
    op: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> int | None:
    """Return the declared workspace of a call; None if there is none. ``args`` and ``kwargs`` have fake tensors.

    Raises:
        UserError: if the formula fails, or does not return a number of bytes. The sentence begins with the operator.
    """
    formula = _FORMULAS.get(str(op))
    if formula is None:
        return None
    arguments = op._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    names = [a.name for a in arguments if not a.kwarg_only]
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    by_name = {a.name: given[a.name] for a in arguments if a.kwarg_only}
    try:
        size: object = formula(*(given[name] for name in names), **by_name)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        raise UserError(
            f"the operator {op}, whose workspace cannot be computed: the formula of register_workspace raised "
            f"{type(error).__name__}: {reason}"
        ) from error
    if type(size) is not int or not 0 <= size <= MOST_BYTES:
        raise UserError(
            f"the operator {op}, whose formula of register_workspace returned {size!r:.60} instead of a number of bytes"
        )
    return size
