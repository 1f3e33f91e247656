"""The memory of a segment in addition to its inputs and destinations: the peak of its calls, and its declaration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.ops import Mode
from zeroir.ir.program import Program
from zeroir.ir.segments.allowlist import listed_ops
from zeroir.ir.segments.bindings import Binding, bindings, plain_bindings
from zeroir.ir.segments.segment import Node, Segment
from zeroir.ir.segments.views import shares_storage
from zeroir.workspace.eager_plan import FillTarget, RunNode, eager_plan
from zeroir.workspace.scratch import call_bytes, copy_bytes, made_bytes
from zeroir.workspace.scratch.allowance import allowance_bytes

EAGER: Final = "eager"
"""The name of the kernels that run a segment op by op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The bytes that eager kernels need at once on a CPU, in addition to the arguments and destinations of a call.

    ``counted_bytes`` is exact: all tensors of the kernels, without the scratch memory of libraries. ``most_bytes`` adds
    the allowance for libraries, so it is at least what any machine needs.
    """

    counted_bytes: int
    most_bytes: int


def eager_workspace(segment: Segment, outputs: Sequence[Binding | None] | None = None) -> Workspace:
    """Return the workspace of a call of the segment.

    ``outputs`` are the bindings of the segment's outputs; without them each is written to its own memory.
    """
    return _eager_workspace(segment, tuple(plain_bindings(segment) if outputs is None else outputs))


def can_fill(node: Node) -> bool:
    """Return whether torch can compute the node's one result on a CPU in a given tensor with the result's strides.

    The list of these ops is generated from torch's own schemas by ``tools/list_aten_ops.py``.
    """
    if len(node.results) != 1:
        return False
    if node.op == "aten.embedding_dense_backward.default":
        return node.args[4] is False
    return node.op in listed_ops("filling_ops.txt")


# Every pass calls this, and few segments change between passes.
@lru_cache(maxsize=1024)
def _eager_workspace(segment: Segment, outputs: tuple[Binding | None, ...]) -> Workspace:
    plan = eager_plan(segment, outputs, can_fill)
    types = segment.types()
    held = _HeldValues(homes=[None] * plan.values)
    counted = most = 0
    for step in plan.steps:
        match step:
            case RunNode(node=node):
                is_filled = step.target is not None
                taken = held.total + call_bytes(node, types, is_filled=is_filled)
                counted, most = max(counted, taken), max(most, taken + allowance_bytes(node, types))
                if shares_storage(node.op):
                    (source, *_) = node.refs()
                    home = held.homes[source.index]
                    for value in range(step.first, step.first + len(node.results)):
                        held.share(value, home)
                elif not is_filled:
                    for value, size in enumerate(made_bytes(node, types), step.first):
                        held.make(value, size)
            case FillTarget(value=value):
                binding, kind = outputs[step.target.output], types[value]
                assert binding is not None
                assert kind is not None
                if step.mode is Mode.WRITE and not step.is_read_there:
                    counted = max(counted, held.total + copy_bytes(kind, binding.stride))
                if step.is_read_there:
                    held.drop(value)
            case _:
                assert_never(step)
        for value in step.drops:
            held.drop(value)
    return Workspace(counted_bytes=counted, most_bytes=max(counted, most))


@dataclass(slots=True, kw_only=True)
class _HeldValues:
    """The memory of a call's own values.

    ``homes`` has for every value the value whose memory it is part of: itself, or the value that it is a view of. None
    means memory of an argument or a destination, or a value that has ended.
    """

    homes: list[int | None]
    total: int = 0
    _users: dict[int, int] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def make(self, value: int, size_bytes: int) -> None:
        """Begin a value in its own memory."""
        self.total += size_bytes
        self._sizes[value] = size_bytes
        self.share(value, value)

    def share(self, value: int, home: int | None) -> None:
        """Begin a value in the memory of ``home``, or in none of the call's own."""
        self.homes[value] = home
        if home is not None:
            self._users[home] = self._users.get(home, 0) + 1

    def drop(self, value: int) -> None:
        """End a value; memory that no other value shares is freed."""
        home, self.homes[value] = self.homes[value], None
        if home is None:
            return
        self._users[home] -= 1
        if not self._users[home]:
            self.total -= self._sizes[home]


def declared(program: Program) -> Program:
    """Return the program with segments that declare the most memory that any of their calls needs."""
    names = {op.segment for op in program.ops() if isinstance(op, ops.Compute)}
    return _declared(program, names)


def corrected(program: Program) -> Program:
    """Return the program with every declaration of a segment's memory recomputed, for use after calls were changed."""
    names = {
        s.name for s in program.segments if any(kind == EAGER for kind, _ in s.workspace_bytes)
    }
    return _declared(program, names)


def _declared(program: Program, names: Collection[str]) -> Program:
    """Return the program with the memory of these segments declared again; segments without a call are not changed."""
    calls: dict[str, dict[tuple[Binding | None, ...], None]] = {}
    for op in program.ops():
        if isinstance(op, ops.Compute) and op.segment in names:
            calls.setdefault(op.segment, {})[tuple(bindings(op))] = None
    segments = tuple(
        replace(
            segment,
            workspace_bytes=(
                (EAGER, max(_most_bytes(segment, outputs) for outputs in calls[segment.name])),
                *(pair for pair in segment.workspace_bytes if pair[0] != EAGER),
            ),
        )
        if segment.name in calls
        else segment
        for segment in program.segments
    )
    return replace(program, segments=segments)


def _most_bytes(segment: Segment, outputs: Sequence[Binding | None]) -> int:
    # Not a polynomial of dims: at each batch it is at most this.
    return int(eager_workspace(segment, outputs).most_bytes)
