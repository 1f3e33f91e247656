"""The memory that running a segment takes beyond its inputs and destinations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.bindings import Binding, bindings, plain_bindings
from zeroir.ir.eager_plan import Call, Move, eager_plan
from zeroir.ir.filling import can_fill
from zeroir.ir.ops import Mode
from zeroir.ir.program import Program
from zeroir.ir.scratch import call_bytes, copy_bytes
from zeroir.ir.segment import Segment, TensorType
from zeroir.ir.views import is_view

EAGER: Final = "eager"
"""The name of the kernels that carry a segment out op by op."""


def eager_bytes(segment: Segment, outputs: Sequence[Binding | None] | None = None) -> int:
    """The most bytes that the eager kernels hold at once on a CPU, beside a call's arguments and destinations.

    ``outputs`` say how the segment's outputs meet their destinations; without them each is written to memory of its
    own. The figure is exact but for ops of which ``scratch.is_bound`` is true.
    """
    return _eager_bytes(segment, tuple(plain_bindings(segment) if outputs is None else outputs))


# Passes ask anew for what few of them change.
@lru_cache(maxsize=1024)
def _eager_bytes(segment: Segment, how: tuple[Binding | None, ...]) -> int:
    plan = eager_plan(segment, how, can_fill)
    types = segment.types()
    held = _Held(types=types, homes=[None] * plan.values)
    peak = 0
    for step in plan.steps:
        match step:
            case Call(node=node):
                is_filled = step.place is not None
                peak = max(peak, held.total + call_bytes(node, types, is_filled=is_filled))
                if is_view(node.op):
                    (source, *_) = node.refs()
                    home = held.homes[source.index]
                    held.take(range(step.first, step.first + len(node.results)), home)
                elif not is_filled:
                    for value in range(step.first, step.first + len(node.results)):
                        held.take([value], value)
            case Move(value=value):
                binding, kind = how[step.place.output], types[value]
                assert binding is not None
                assert kind is not None
                if step.mode is Mode.WRITE and not step.is_home:
                    peak = max(peak, held.total + copy_bytes(kind, binding.stride))
                if step.is_home:
                    held.drop(value)
            case _:
                assert_never(step)
        for value in step.drops:
            held.drop(value)
    return peak


@dataclass(slots=True, kw_only=True)
class _Held:
    """The memory of a call's own values.

    ``homes`` are, for every value, the one whose memory it is part of: itself or what it is a view of, and None where
    that belongs to an argument or a destination, or is no more.
    """

    types: Sequence[TensorType | None]
    homes: list[int | None]
    total: int = 0
    _users: dict[int, int] = field(default_factory=dict)

    def take(self, values: Sequence[int], home: int | None) -> None:
        """Let values be part of the memory of ``home``, which begins with its first."""
        for value in values:
            if home is None or self.types[value] is None:
                continue
            if not self._users.get(home):
                self.total += self._bytes(home)
            self.homes[value] = home
            self._users[home] = self._users.get(home, 0) + 1

    def drop(self, value: int) -> None:
        """End a value; the memory that nothing is part of any more is freed."""
        home, self.homes[value] = self.homes[value], None
        if home is None:
            return
        self._users[home] -= 1
        if not self._users[home]:
            self.total -= self._bytes(home)

    def _bytes(self, home: int) -> int:
        kind = self.types[home]
        return 0 if kind is None else kind.size_bytes


def declared(program: Program) -> Program:
    """The program, whose segments declare the most memory that any of their calls takes."""
    names = {op.segment for op in program.ops() if isinstance(op, ops.Compute)}
    return _declared(program, names)


def corrected(program: Program) -> Program:
    """The program after its calls were changed: what segments declare of their memory, if anything, is true again."""
    names = {
        s.name for s in program.segments if any(kind == EAGER for kind, _ in s.workspace_bytes)
    }
    return _declared(program, names)


def _declared(program: Program, names: Collection[str]) -> Program:
    """The program with the memory of these segments declared anew, as far as they are called."""
    calls: dict[str, dict[tuple[Binding | None, ...], None]] = {}
    for op in program.ops():
        if isinstance(op, ops.Compute) and op.segment in names:
            calls.setdefault(op.segment, {})[tuple(bindings(op))] = None
    segments = tuple(
        replace(
            segment,
            workspace_bytes=(
                (EAGER, max(eager_bytes(segment, outputs) for outputs in calls[segment.name])),
                *(pair for pair in segment.workspace_bytes if pair[0] != EAGER),
            ),
        )
        if segment.name in calls
        else segment
        for segment in program.segments
    )
    return replace(program, segments=segments)
