"""Stand-ins for foreign operators in the process that compiles segments.

That process imports no library and no model. To compile a call it needs the operator's schema and the types of the
results, and the program declares both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroir.errors import InternalError
from zeroir.ir.segments.operators import Operator
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.runtime.kernels.calls import operator as known
from zeroir.torch_ops.types import TORCH_DTYPE

_Plain = bool | int | float | str | None


@dataclass(slots=True)
class StandIns:
    """The foreign operators that this process has defined, and the types of the results of their calls."""

    _defined: set[str] = field(default_factory=set)
    _results: dict[Hashable, tuple[TensorType | None, ...]] = field(default_factory=dict)

    def define(self, operators: Iterable[Operator], segment: Segment) -> None:
        """Define the operators, unless they are already defined, and record the calls of a segment."""
        for operator in operators:
            if operator.name not in self._defined:
                self._defined.add(operator.name)
                namespace, packet, overload = operator.name.split(".")
                name = f"{namespace}::{packet}" + ("" if overload == "default" else f".{overload}")
                torch.library.define(name, operator.schema)
                function = partial(self._types_only, known(operator.name))
                torch.library.register_fake(name, function)
        types = segment.types()
        for node in segment.nodes:
            if node.op in self._defined:
                self._results[node_key(node, types)] = node.results

    def _types_only(
        self, op: torch._ops.OpOverload, *args: object, **kwargs: object
    ) -> Tensor | list[Tensor | None] | tuple[Tensor | None, ...] | None:
        from zeroir.runtime.kernels._inductor_sizes import symbols_of

        leaves = pytree.tree_leaves((args, kwargs))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        kinds = self._results.get(call_key(op, args, kwargs))
        if kinds is None:
            raise InternalError(f"{op} is called in another way than the segment declares")
        sizes = [n for leaf in leaves if isinstance(leaf, Tensor) for n in leaf.shape]
        symbols = symbols_of(n for n in (*sizes, *leaves) if isinstance(n, torch.SymInt))
        results = [
            None
            if kind is None
            else torch.empty_strided(
                kind.shape if symbols is None else symbols.of(kind.shape),
                kind.stride if symbols is None else symbols.of(kind.stride),
                dtype=TORCH_DTYPE[kind.dtype],
                device=device,
            )
            for kind in kinds
        ]
        returns = op._schema.returns
        if len(returns) != 1:
            return tuple(results)
        return results if str(returns[0].type) == "List[Tensor]" else results[0]


def node_key(node: Node, types: Sequence[TensorType | None]) -> Hashable:
    """Return the key of a node's call: types of its tensors, and its numbers, words and flags, by argument name."""

    def key(arg: NodeArg) -> Hashable:
        if isinstance(arg, Ref):
            kind = types[arg.index]
            return None if kind is None else (TORCH_DTYPE[kind.dtype], kind.shape)
        return tuple(map(key, arg)) if isinstance(arg, tuple) else _plain(arg)

    op = known(node.op)
    named = {name: key(arg) for name, arg in node.kwargs}
    return node.op, _by_name(op, [key(arg) for arg in node.args], named)


def call_key(
    op: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Hashable:
    """Return the same key for an actual call."""
    named = {name: _key(arg) for name, arg in kwargs.items()}
    return str(op), _by_name(op, [_key(arg) for arg in args], named)


def _key(arg: object) -> Hashable:
    if isinstance(arg, Tensor):
        return arg.dtype, tuple(map(_size, arg.shape))
    if isinstance(arg, torch.SymInt):
        return _plain(_size(arg))
    return tuple(map(_key, arg)) if isinstance(arg, list | tuple) else _plain(arg)


def _size(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    from zeroir.runtime.kernels._inductor_sizes import size_of

    return size_of(size)


def _by_name(
    op: torch._ops.OpOverload, keys: Sequence[Hashable], named: Mapping[str, Hashable]
) -> Hashable:
    """Return the key of each argument by its name; an omitted one has its default."""
    arguments = op._schema.arguments
    given = {**{a.name: key for a, key in zip(arguments, keys, strict=False)}, **named}
    return tuple((a.name, given.get(a.name, _key(a.default_value))) for a in arguments)


def _plain(arg: object) -> Hashable:
    """Return a number, word or flag, where 1 equals 1.0 but not True.

    None for what affects no shape, such as a dtype.
    """
    return (isinstance(arg, bool), arg) if isinstance(arg, _Plain) and arg is not None else None
