"""Checks of operators that a library or the model registers: they must exist and match the program's declarations.

A program only names them. A program never causes an import, because a program is a file and importing runs code; the
process that runs it imports the modules that register them, as the model file does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.ir.segments.allowlist import OPAQUE_OPS, is_allowed
from zeroir.ir.segments.operators import Operator
from zeroir.ir.segments.segment import Node, Segment
from zeroir.runtime.kernels.calls import operator
from zeroir.runtime.memory.operator_workspaces import device_of, is_profiled, measured
from zeroir.torch_ops.purity import breach, schema_text
from zeroir.torch_ops.types import TORCH_DTYPE


def require_registered(program: Program) -> None:
    """Check that each foreign operator of a program is registered here, as the program declares it, and is pure.

    Raises:
        UserError: where one is not; it names the module to import.
    """
    for declared in program.operators:
        op = _registered(declared)
        schema = schema_text(op)
        if schema != declared.schema:
            raise UserError(
                f"The program calls the operator {declared.name} as {declared.schema}, but here it is registered as "
                f"{schema}: compile the program again with this version of the library."
            )
        broken = breach(op)
        if broken is not None:
            raise UserError(f"The program calls the operator {declared.name}, which {broken}.")


def _registered(declared: Operator) -> torch._ops.OpOverload:
    namespace, packet, overload = declared.name.split(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        op = None
    if not isinstance(op, torch._ops.OpOverload):
        remedy = (
            f"import {declared.module}, which registered it when the program was compiled, before the program is opened"
            if declared.module
            else "run the code that registers it, such as the model file, before the program is opened"
        )
        raise UserError(
            f"The program calls the operator {declared.name}, which nothing has registered in this process: {remedy}."
        )
    return op


_READ_ON_HOST: Final = frozenset(
    {
        "transformers.grouped_mm_fallback.default",
        "transformers.grouped_mm_fallback_backward.default",
        "zeroir.grouped_mm.default",
        *OPAQUE_OPS,
    }
)
"""Grouped products in other dtypes than BF16: the host reads the ends of the groups and calls a product for each. And
code that runs as it is, which may read anything."""


def op_outside_graphs(segment: Segment) -> str | None:
    """Return an operator of a segment that cannot be in a CUDA graph: it reads values on the host, or declares so."""
    for node in segment.nodes:
        if node.op in _READ_ON_HOST:
            return node.op
        if not is_allowed(node.op) and torch.Tag.cudagraph_unsafe in operator(node.op).tags:
            return node.op
    return None


def watched_call(
    node: Node,
    function: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    is_close: Callable[[Tensor, Tensor], bool],
) -> object:
    """Call a foreign operator twice, and require that it does what its schema and its fake kernel declare.

    ``is_close`` returns whether the results of two equal calls are equal enough.

    Raises:
        UserError: where it changes an argument, returns memory of one, returns results of other types than declared, or
            other results when it is called again, or needs more memory than its declared workspace.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    before = [operand.clone() for operand in operands]
    returned = function(*args, **kwargs)
    problem = _types_problem(node, _tensors(returned))
    if problem is None and not all(map(_is_identical, operands, before)):
        problem = "changes an argument, although its schema says that it does not"
    if problem is None and _shares_memory([*operands, *_tensors(returned)], len(operands)):
        problem = "returns memory that an argument or another result has, although its schema says that it does not"
    if problem is None:
        again, problem = _second_call(node, lambda: function(*args, **kwargs), operands)
        if problem is None and not all(map(is_close, _tensors(returned), again)):
            problem = (
                "makes other results when it is called again with equal arguments: it draws random numbers, reads "
                "something besides its arguments, or leaves a part of its results unwritten"
            )
    if problem is not None:
        line = f" ({node.source})" if node.source else ""
        raise UserError(
            f"The operator {node.op}{line} {problem}. Nothing was trained. Mend the operator; --no-self-check trains "
            "in spite of it."
        )
    return returned


def _second_call(
    node: Node, call: Callable[[], object], operands: Sequence[Tensor]
) -> tuple[Sequence[Tensor], str | None]:
    """Return the results of a second call, and the problem where it needs more memory than the program declares."""
    if node.workspace_bytes is None or is_profiled():
        return _tensors(call()), None
    returned, taken_bytes = measured(call, device_of(operands, {}))
    if taken_bytes <= node.workspace_bytes:
        return _tensors(returned), None
    return _tensors(returned), (
        f"holds {taken_bytes:,} bytes at once beside its arguments and results, although its workspace was declared to "
        f"zeroir.register_workspace as {node.workspace_bytes:,}"
    )


def _tensors(returned: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]


def _types_problem(node: Node, results: Sequence[Tensor]) -> str | None:
    declared = [kind for kind in node.results if kind is not None]
    if len(results) != len(declared):
        return f"makes {len(results)} tensors where its fake kernel makes {len(declared)}"
    for result, kind in zip(results, declared, strict=True):
        if result.dtype != TORCH_DTYPE[kind.dtype] or tuple(result.shape) != kind.shape:
            return (
                f"makes {result.dtype}{list(result.shape)} where its fake kernel makes "
                f"{TORCH_DTYPE[kind.dtype]}{list(kind.shape)}"
            )
    return None


def _is_identical(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether two tensors of one type are equal, with NaN equal to NaN."""
    return bool(((tensor == copy) | ((tensor != tensor) & (copy != copy))).all())


def _shares_memory(tensors: Sequence[Tensor], first: int) -> bool:
    """Return whether one of the tensors from ``first`` on shares storage with another tensor."""
    storages = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
    made = [x.untyped_storage().data_ptr() for x in tensors[first:] if x.numel()]
    return any(storages.count(address) > 1 for address in made)
