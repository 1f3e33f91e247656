"""The optimizer steps on the host whose operands exist when the last micro-step ends, except those of the decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Space, whole
from zeroir.ir.contents import FlatContent
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import Program, Section, State
from zeroir.passes.common import rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """An optimizer step on the host, and its gradient there.

    ``widened`` is the temporary buffer in which the update widens the gradient. Where the gradient is at rest on the
    device, ``down`` is the copy of it to a temporary buffer, and ``content`` the content of that buffer. ``rounding``
    is the cast of new master weights to a temporary buffer, from which they are copied to the device.
    """

    op: ops.OptimizerStep
    gradient: Region
    rounding: ops.Cast | None = None
    widened: str | None = None
    down: ops.ToHost | None = None
    content: FlatContent | None = None


def host_steps(program: Program, last: Section, update: Section) -> Iterator[HostStep]:
    """Yield the optimizer steps of section ``update`` that could run at the end of ``last``, the last micro-step."""
    writers = _Writers(update.body)
    casts: dict[Region, list[ops.Cast]] = {}
    for op in update.body:
        if isinstance(op, ops.Cast):
            casts.setdefault(op.source, []).append(op)
    for index, op in enumerate(update.body):
        if isinstance(op, ops.OptimizerStep) and _is_on_host(op, program):
            step = _host_step(program, op, last.exit, writers, index)
            if step is not None:
                yield replace(step, rounding=_rounding(program, casts.get(op.param, ()), writers))


class _Writers:
    """The ops of a section that change each buffer, with their indices."""

    def __init__(self, body: Sequence[Op]) -> None:
        self._by_buffer: dict[str, list[tuple[int, Op]]] = {}
        for index, op in enumerate(body):
            effect = effects(op)
            for name in {r.buffer for r in (*effect.writes, *effect.accumulates)}:
                self._by_buffer.setdefault(name, []).append((index, op))

    def of(self, name: str, stop: int | None = None) -> list[Op]:
        """Return the ops that change a buffer, above the op at the index ``stop`` if there is one."""
        writers = self._by_buffer.get(name, ())
        return [op for index, op in writers if stop is None or index < stop]


def _host_step(
    program: Program, op: ops.OptimizerStep, state: State, writers: _Writers, index: int
) -> HostStep | None:
    """Return the step at an index, whose gradient is at rest on the host, or is copied down and maybe widened there.

    ``state`` is the entry state of the update. Return None if another op changes the gradient.
    """
    gradient, widened = op.grad, None
    changes = writers.of(gradient.buffer, index)
    if len(changes) == 1 and isinstance(changes[0], ops.Cast) and changes[0].mode is Mode.WRITE:
        gradient, widened = changes[0].source, gradient.buffer
        changes = writers.of(gradient.buffer, index)
    step = HostStep(op=op, gradient=gradient, widened=widened)
    if program.buffer_by_name[gradient.buffer].is_persistent:
        return None if changes else step
    if len(changes) != 1 or not isinstance(down := changes[0], ops.ToHost):
        return None
    content = _complete(state, down.source)
    is_changed = bool(writers.of(down.source.buffer, index))
    if content is None or down.destination != gradient or is_changed:
        return None
    return replace(step, down=down, content=content)


def _rounding(program: Program, casts: Sequence[ops.Cast], writers: _Writers) -> ops.Cast | None:
    """Return the first of the casts of new master weights whose result is in its own buffer."""
    for cast in casts:
        buffer = program.buffer_by_name[cast.destination.buffer]
        is_own = not buffer.is_persistent and cast.destination == whole(buffer)
        if is_own and writers.of(buffer.name) == [cast]:
            return cast
    return None


def _is_on_host(op: ops.OptimizerStep, program: Program) -> bool:
    """Return whether the host updates elements at rest in its memory, element by element, with states of 32 bits."""
    buffers = [program.buffer_by_name[region.buffer] for region in (op.param, *op.states)]
    is_by_element = op.algorithm.direction_dtype is None and not op.scales
    return is_by_element and all(
        buffer.space is Space.HOST and isinstance(buffer.holds, FlatContent) for buffer in buffers
    )


def _complete(state: State, region: Region) -> FlatContent | None:
    """Return the content of a region that a state describes as a complete gradient."""
    for holding in state.holdings:
        if holding.region == region and holding.after is None:
            return rewrite.complete_gradient(holding)
    return None
