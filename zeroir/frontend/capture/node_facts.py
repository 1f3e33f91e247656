"""Properties of an operator node of torch's graph as plain data, and checks that a program can represent the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zeroir.errors import InternalError, Remainders, ShapesError, UserError
from zeroir.frontend._torch_private import is_backward, is_gradient_sum
from zeroir.frontend._torch_sizes import NoPolynomialError, assume_not_1, size_of, stride_of
from zeroir.frontend.capture.storage_views import bounds_error
from zeroir.ir.segments.allowlist import OPAQUE_OPS, refusal
from zeroir.ir.segments.segment import TensorType
from zeroir.ir.size_bounds import grows
from zeroir.ir.sizes import Size, common_divisor
from zeroir.torch_ops.foreign_workspaces import declared_workspace_bytes
from zeroir.torch_ops.opaque import planned_bytes
from zeroir.torch_ops.purity import breach, is_foreign
from zeroir.torch_ops.types import IR_DTYPE
from zeroir.workspace.scratch.allowance import GROUPED_PRODUCTS

aten = torch.ops.aten

_FORMULAE = cast("Mapping[object, Callable[..., int]]", flop_registry)
_FORWARD = cast("Callable[..., int]", sdpa_flop_count)
_BACKWARD = cast("Callable[..., int]", sdpa_backward_flop_count)


class NotInProgramsError(UserError):
    """The model uses an operator or an element type that programs do not have."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The properties of an operator node that do not depend on its position in the graph.

    ``types`` are those of the results. ``offsets`` are in elements, relative to the first element of the viewed tensor.
    """

    op: torch._ops.OpOverload
    types: tuple[TensorType | None, ...]
    offsets: tuple[int, ...]
    is_view: bool
    is_backward: bool
    is_gradient_sum: bool
    flops: int
    workspace_bytes: int | None


def facts_of(node: fx.Node, source: str) -> NodeFacts:
    """Return the properties of a node; ``source`` is its ``file:line``.

    Raises:
        UserError: if the operator or an element type does not exist in programs, a view exceeds its tensor, or the
            formula of a declared workspace fails.
    """
    op: object = node.target
    if isinstance(op, torch._ops.HigherOrderOperator) and node.args:
        # The tracer wraps an operator that changes its arguments.
        op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        raise NotInProgramsError(
            f"{source} uses {op}, which zeroir cannot trace; call the function in it directly."
        )
    _check(op, source, node.meta["val"])
    excess = bounds_error(node)
    if excess is not None:
        raise UserError(f"{source} takes a strided view that {excess}.")
    _assume_kept_dimensions(node, source)
    tensors = _tensors(node.meta["val"])
    is_view = op is not aten.view.dtype and op.is_view
    args, kwargs = _fake_arguments(node)
    try:
        if str(op) in OPAQUE_OPS:
            workspace_bytes = planned_bytes(str(op), str(args[-1]))
        else:
            workspace_bytes = declared_workspace_bytes(op, args, kwargs)
    except UserError as error:
        raise UserError(f"{source} uses {error}.") from error
    return NodeFacts(
        op=op,
        types=tuple(None if x is None else tensor_type(x, source) for x in tensors),
        offsets=_offsets(node, tensors, source) if is_view else (0,) * len(tensors),
        is_view=is_view,
        is_backward=is_backward(node),
        is_gradient_sum=is_gradient_sum(node) and op is aten.add.Tensor,
        flops=size_in(_flops(op, args, kwargs, node.meta["val"]), source),
        workspace_bytes=workspace_bytes,
    )


def tensor_type(tensor: Tensor, source: str) -> TensorType:
    """Return the type of a tensor.

    Raises:
        UserError: for an element type that programs do not have.
    """
    require_dtype(tensor.dtype, source)
    return TensorType(
        dtype=IR_DTYPE[tensor.dtype],
        shape=tuple(_planned(size_in(size, source), source) for size in tensor.shape),
        stride=tuple(_stride_in(step, source) for step in tensor.stride()),
    )


def _planned(size: int, source: str) -> int:
    """Return a size of a tensor, for which memory is planned at the bounds; ShapesError where it may shrink."""
    if isinstance(size, Size) and not grows(size):
        divisor = common_divisor(size)
        raise ShapesError(
            f"{source} makes a tensor of size {size}, which is negative or shrinks for some sizes of the batch: narrow "
            "the dims.",
            names := tuple(dim.name for dim in size.dims),
            None if divisor is None else Remainders(names, divisor, source),
        )
    return size


def _assume_kept_dimensions(node: fx.Node, source: str) -> None:
    """Assume that a dim is not 1 where an operator removes dimensions of size 1."""
    if node.target not in _SQUEEZES:
        return
    shape = cast("fx.Node", node.args[0]).meta["val"].shape
    axes = cast("int | Sequence[int]", node.args[1] if len(node.args) > 1 else range(len(shape)))
    for axis in ((axes,) if isinstance(axes, int) else axes) if shape else ():
        assume_not_1(shape[axis], source)


_SQUEEZES: Final = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def size_in(size: int | torch.SymInt, source: str) -> int:
    """Return a size that torch computed at the line ``source``; ShapesError where it is no polynomial of dims."""
    try:
        return size_of(size)
    except NoPolynomialError as error:
        raise _no_polynomial(error, source) from None


def _stride_in(step: int | torch.SymInt, source: str) -> int:
    """Return a stride that torch computed at the line ``source``; ShapesError where it is no polynomial of dims."""
    try:
        return stride_of(step)
    except NoPolynomialError as error:
        raise _no_polynomial(error, source) from None


def _no_polynomial(error: NoPolynomialError, source: str) -> ShapesError:
    return ShapesError(
        f"{source} makes a size that is no polynomial of dims, {error}: give that dimension one size, or let the data "
        "have it.",
        error.dims,
        None if error.modulus is None else Remainders(error.dims, error.modulus, source),
    )


def require_dtype(dtype: torch.dtype, source: str) -> None:
    """Raise NotInProgramsError for an element type that programs do not have."""
    if dtype not in IR_DTYPE:
        raise NotInProgramsError(
            f"{source} makes a tensor of {dtype}, an element type that programs do not have."
        )


def _check(op: torch._ops.OpOverload, source: str, value: object) -> None:
    if op._schema.is_mutable and not is_foreign(op):
        raise InternalError(f"the joint graph changes a tensor in place with {op} ({source})")
    broken = breach(op)
    reason = None if broken is None else str(broken)
    if reason is None and not is_foreign(op):
        reason = refusal(str(op))
    if reason is not None:
        if isinstance(value, Tensor):
            require_dtype(value.dtype, source)  # Its message explains the error better.
        raise NotInProgramsError(f"{source} uses the operator {op}, which {reason}.")


def _tensors(value: object) -> list[Tensor | None]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item if isinstance(item, Tensor) else None for item in value]
    raise InternalError(f"a node of the joint graph yields {type(value).__name__}")


def _offsets(node: fx.Node, tensors: Sequence[Tensor | None], source: str) -> tuple[int, ...]:
    """Return the number of elements from the first of the viewed tensor to the first of each result."""
    (viewed, *_) = node.args
    start = cast("fx.Node", viewed).meta["val"].storage_offset()
    # A result without elements may start anywhere; with its tensor it starts within a buffer.
    return tuple(
        0 if x is None or not x.numel() else size_in(x.storage_offset() - start, source)
        for x in tensors
    )


def _fake_arguments(node: fx.Node) -> tuple[tuple[object, ...], dict[str, object]]:
    args = tuple(_fake(arg) for arg in node.args)
    return args, {name: _fake(arg) for name, arg in node.kwargs.items()}


def _fake(arg: object) -> object:
    """Return an argument with the tracer's fake tensors instead of nodes."""
    if isinstance(arg, fx.Node):
        return arg.meta.get("val")
    if isinstance(arg, list | tuple):
        return [_fake(item) for item in arg]
    return arg


def _flops(
    op: object, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
) -> int:
    """Return the FLOPs of one call, by torch's formulae, also for zeroir's attention and grouped products; otherwise 0.

    A multiplication and an addition are two. ``args`` contain fake tensors.
    """
    if op is torch.ops.zeroir.attention.default:
        q, k, v = (cast("Tensor", x) for x in args[:3])
        return _FORWARD(q.shape, _grouped(q, k), _grouped(q, v))
    if op is torch.ops.zeroir.attention_backward.default:
        grad, q, k, v = (cast("Tensor", x) for x in args[:4])
        return _BACKWARD(grad.shape, q.shape, _grouped(q, k), _grouped(q, v))
    if str(op) in GROUPED_PRODUCTS:
        first, second = (cast("Tensor", x) for x in args[:2])
        groups = first.shape[0] if (first.dim(), second.dim()) == (3, 2) else 1
        products = 2 if str(op).endswith("_backward.default") else 1
        return products * 2 * first.numel() * second.shape[-1] // groups
    formula = _FORMULAE.get(getattr(op, "overloadpacket", None))
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def _grouped(q: Tensor, x: Tensor) -> tuple[int, ...]:
    """Return the shape of k or v with a head for every head of q."""
    return (x.shape[0], q.shape[1], *x.shape[2:])
