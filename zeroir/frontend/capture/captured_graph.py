"""The joint graph of one training step, or the graph of an evaluation, as plain data.

Capture creates it, and segments are cut from it.

Values are numbered: first the inputs, then the results of the nodes in execution order, the forward's before the
backward's. The result of a view op aliases a *root*: the value that owns the storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from zeroir.ir.reports import Storing
from zeroir.ir.segments.segment import NodeArg, Ref, TensorType


class InputKind(StrEnum):
    """The kind of an input of the joint graph."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    CONSTANT = "constant"
    RNG = "rng"
    TANGENT = "tangent"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """An input: a parameter or buffer by its fully-qualified name, a batch tensor by its path.

    ``data`` are the bytes of a constant, and ``outside`` is the tensor of the user's code that has its present values.
    """

    kind: InputKind
    name: str
    value: int
    data: bytes | None = None
    outside: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """A call of a module: its fully-qualified name and its call index, from 0."""

    module: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One op. ``calls`` are the module calls that contain it, outermost first; None if they are unknown.

    ``origin`` is the number of the torch function's call, in the order of the model's calls; all nodes of one call
    share it. A backward node has the calls and the origin of the forward node that it differentiates. The sum of two
    gradients of one value has neither. ``source`` is ``file:line``.
    """

    op: str
    args: tuple[NodeArg, ...]
    kwargs: tuple[tuple[str, NodeArg], ...]
    results: tuple[int, ...]
    is_backward: bool
    is_view: bool
    is_gradient_sum: bool
    calls: tuple[ModuleCall, ...] | None
    origin: int | None
    source: str
    flops: int
    workspace_bytes: int | None

    def refs(self) -> Iterator[int]:
        """Yield the numbers of the values that it uses, in argument order."""
        for arg in (*self.args, *(value for _, value in self.kwargs)):
            yield from _refs(arg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A value as a strided view of its root's storage, from element ``offset`` on."""

    root: int
    offset: int


class OutputName(NamedTuple):
    """The path of an output, as in ``OutputBinding``, and when the user's code stores it; None if it is returned."""

    path: str
    stored: Storing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """The joint graph. ``types`` and ``aliases`` are by value number; a root aliases itself at offset 0.

    ``gradients`` pairs parameter names (a tied parameter under each of its names) with values; ``mutations`` pairs
    module buffers with their new values. An evaluation has neither. ``outputs`` pair names with values. ``place``
    replaces the line in errors for a node without one.
    """

    place: str
    inputs: tuple[GraphInput, ...]
    nodes: tuple[GraphNode, ...]
    types: tuple[TensorType | None, ...]
    aliases: tuple[Alias, ...]
    loss: int
    gradients: tuple[tuple[str, int], ...]
    mutations: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[OutputName, int], ...] = ()


def _refs(arg: NodeArg) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.index
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)
