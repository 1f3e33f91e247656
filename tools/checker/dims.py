"""Programs whose sizes depend on dims, at chosen values of the dims: there they have plain sizes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tools.checker.program import COLLECTIVES, Declarations, all_ops
from tools.checker.reading import FileRecord, NoProgramError

FIRST_SIZE: Final = -(2**62)
"""The number that stands for the size ``sizes[0]``."""

_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def instances(program: FileRecord) -> Iterator[FileRecord]:
    """Yield a program at the largest values of its dims, the smallest, and some between that differ from each other."""
    chosen: list[dict[str, int]] = [
        {d.name: d.maximum for d in program.dims},
        {d.name: d.minimum for d in program.dims},
        {
            d.name: d.minimum + (d.maximum - d.minimum) * (i + 1) // (len(program.dims) + 1)
            for i, d in enumerate(program.dims)
        },
    ]
    for dims in chosen[: None if program.dims else 1]:
        sizes = [_value(_tree(text), dims) for text in program.sizes]
        instance = _at(program, sizes)
        instance.__dict__.update(dims=(), sizes=())
        yield instance


def shared_sizes(names: Declarations) -> tuple[object, ...]:
    """Return what must not depend on dims, because all ranks share it, or it outlives a batch."""
    collectives = [
        [(names.numel(pair.source), names.numel(pair.destination)) for pair in op.pairs]
        for op in all_ops(names)
        if op.kind in COLLECTIVES
    ]
    held = [b for b in names.program.buffers if getattr(b.holds, "kind", "") == "FlatContent"]
    return tuple(names.flats.values()), collectives, held


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text.replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NoProgramError(f"has the size {text}, which is no polynomial") from error


def _value(tree: ast.expr, dims: Mapping[str, int]) -> int:
    match tree:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name) if name in dims:
            return dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, dims)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            one, other = _value(left, dims), _value(right, dims)
            if not (isinstance(operation, ast.Pow) and other > 64):
                return _OPERATIONS[type(operation)](one, other)
    raise NoProgramError(f"has the size {ast.unparse(tree)}, which is no polynomial of its dims")


def _at(value: Any, sizes: list[int]) -> Any:  # noqa: ANN401 - any value of a record
    """Return a value with the sizes in the places of the numbers that stand for them."""
    if isinstance(value, FileRecord):
        fields = {k: _at(v, sizes) for k, v in vars(value).items() if k != "kind"}
        return FileRecord(value.kind, fields)
    if isinstance(value, tuple):
        return tuple(_at(item, sizes) for item in value)
    if type(value) is int and FIRST_SIZE - len(sizes) < value <= FIRST_SIZE:
        return sizes[FIRST_SIZE - value]
    return value
