"""A segment: a pure SSA graph of ATen ops, as plain data.

Values are numbered: the inputs first, then the results of each node in order. A segment reads its inputs and returns
its outputs; the ``compute`` op that calls it says *where* results go. It is device-neutral: a ``device`` argument is
the symbol ``device``, which the runtime replaces by the device it runs on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.fields import Declares, NameKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """dtype, shape and strides (in elements) of a value."""

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense tensor of this type."""
        return self.numel * self.dtype.itemsize_bytes

    @property
    def is_dense(self) -> bool:
        """Whether each element of the storage is one element of the tensor, in any order of dimensions."""
        if not self.numel:
            return True
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 1:
                continue
            if step != expected:
                return False
            expected *= size
        return True

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are row-major for the shape; strides of dimensions of one element do not matter."""
        return all(
            size <= 1 or step == contiguous_step
            for size, step, contiguous_step in zip(
                self.shape, self.stride, contiguous_stride(self.shape), strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value with this number."""

    index: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named constant of torch that is not a number, such as ``device`` or ``contiguous_format``."""

    name: str


NodeArg = Ref | Symbol | DType | None | bool | int | float | str | tuple["NodeArg", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an op: ``aten.mm.default`` with its arguments and the types of its results.

    A result that the op does not produce (an undefined tensor) has the type None. ``source`` is the line of the model
    that the node came from, ``file:line``; it is not part of the segment's digest.

    ``workspace_bytes`` is declared by an operator of a library or the model: the most bytes that a call holds at once
    in addition to its arguments and results. It is None if nothing is declared, and for all other operators.
    """

    op: Annotated[str, Declares(NameKind.OPERATOR)]
    args: tuple[NodeArg, ...]
    kwargs: tuple[tuple[str, NodeArg], ...] = ()
    results: tuple[TensorType | None, ...]
    flops: int = 0
    workspace_bytes: int | None = None
    source: str = ""

    def refs(self) -> Iterator[Ref]:
        """Yield every value that the node uses, in argument order."""
        for arg in self.args:
            yield from _refs(arg)
        for _, arg in self.kwargs:
            yield from _refs(arg)


def _refs(arg: NodeArg) -> Iterator[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)


class _WithDigest:
    """Keeps the digest of a segment, once it has been computed."""

    __slots__ = ("known_digest",)

    known_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(_WithDigest):
    """A pure function: inputs, nodes in execution order, and the numbers of the values that it returns.

    ``workspace_bytes`` maps a kernel backend (``eager``, ``inductor``) to the device memory that running the segment
    needs in addition to its inputs and destinations: the maximum over all calls in the program, for any bindings of the
    outputs. For ``eager`` it is that of a CPU with one thread (``zeroir.workspace``).
    """

    name: Annotated[str, Declares(NameKind.SEGMENT)]
    inputs: tuple[TensorType, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    workspace_bytes: tuple[tuple[str, int], ...] = ()

    def types(self) -> tuple[TensorType | None, ...]:
        """Return the type of every value, by number."""
        return self.inputs + tuple(result for node in self.nodes for result in node.results)

    def output_types(self) -> tuple[TensorType, ...]:
        """Return the type of every output; ValueError if an output is an undefined tensor."""
        types = self.types()
        outputs: list[TensorType] = []
        for index in self.outputs:
            kind = types[index]
            if kind is None:
                raise ValueError(f"segment @{self.name} yields value {index}, which is undefined")
            outputs.append(kind)
        return tuple(outputs)

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        return sum(node.flops for node in self.nodes)

    def digest(self) -> str:
        """Return the SHA-256 of the structure: equal for segments that differ only in name and sources."""
        try:
            return self.known_digest
        except AttributeError:
            # Not by the segment itself: -0.0 equals 0.0, and True equals 1.
            digest = _digest(self)
            object.__setattr__(self, "known_digest", digest)
            return digest


def _digest(segment: Segment) -> str:
    nodes = tuple((n.op, n.args, n.kwargs, n.results) for n in segment.nodes)
    text = repr((segment.inputs, nodes, segment.outputs))
    return hashlib.sha256(text.encode()).hexdigest()
