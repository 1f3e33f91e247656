"""Update each flat as soon as its gradient is reduced, during the backward of other units.

Clipping and loss scaling need all gradients before the update. Without them, the only decision of the update advances
the step count and sets the divisor; it needs no gradient, so it moves to the beginning of the last micro-step. The
update of each flat (widening the gradient, the optimizer step, narrowing the master weights, clearing a sum over
micro-steps, and in stages 1 and 2 gathering the new parameters) directly follows the reduction of the flat's gradient
and the last op that reads the old parameters. It runs on its own stream, so it delays neither the compute stream nor
the next reduction. Only the reduction of the loss remains in the update section. The weights of the micro-batches, by
which the decision divides, are known at the beginning of the last micro-step, so their sum over ranks moves there.

At the boundary, the states of parameters, master weights and optimizer states declare a version one above the version
at rest, and the gradients are used. A program whose decision reads a norm, an overflow flag or a loss scale is
unchanged.

Memory: the widened gradient of one flat at a time (16-bit, one micro-step) is now live during the backward. With one
micro-step, no op reads a reduced gradient after the update of its flat, but its buffer stays persistent.

What ``overlap-update`` changes::

      section last_micro_step {
    + decide step=%step gradient_divisor=%divisor divisor=2  stream=update
    - reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + !8 = reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + wait !8  on=update
    + optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
    - exit %a.grad = grad a @dp reduced=(dp) micro=all
    + exit %a.param = param a @dp version=1
      section update {
    - entry %a.grad = grad a @dp reduced=(dp) micro=all
    + entry %a.param = param a @dp version=1
    - decide step=%step gradient_divisor=%divisor divisor=2  stream=compute
    - optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Role
from zeroir.ir.contents import Content, FlatContent, NamedContent, Zeros
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Holding, Program, Section, State
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched
from zeroir.passes.common.update_streams import BESIDE

_Movable = (
    ops.Decide
    | ops.Direction
    | ops.OptimizerStep
    | ops.Average
    | ops.Alloc
    | ops.Release
    | ops.Cast
    | ops.Fill
    | ops.AllGather
    | ops.AllReduce
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapUpdate(Pass):
    """Update each flat as soon as its gradient is reduced."""

    name: ClassVar[str] = "overlap-update"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED, Fact.UPDATE_APART})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATE_APART})

    def __call__(self, program: Program) -> Program:
        """Return the program with its update in the last micro-step.

        Unchanged if a decision depends on all gradients.
        """
        last = program.section_by_name.get(LAST_MICRO_STEP)
        update = program.section_by_name.get(UPDATE)
        if last is None or update is None or not _is_free(update):
            return program
        moved, left = _divided(update, program)
        if not all(_is_on_scalars(op, program) for op in left):
            return program
        between = _state_after(last.exit, moved, program)
        changed = {
            LAST_MICRO_STEP: replace(last, body=_placed(last, moved, program), exit=between),
            UPDATE: replace(update, entry=between, body=left),
        }
        program = rewrite.map_sections(program, lambda section: changed.get(section.name, section))
        return replace(program, streams=(*program.streams, BESIDE))


def _is_free(update: Section) -> bool:
    """Return whether the only decision needs no gradient, and no buffer or event crosses the update's boundary."""
    decisions = [op for op in update.body if isinstance(op, ops.Decide)]
    return (
        len(decisions) == 1
        and all(not _is_global(decision) for decision in decisions)
        and not (update.entry.live or update.entry.pending or update.exit.pending)
    )


def _is_global(decision: ops.Decide) -> bool:
    """Return whether the decision depends on results of the micro-steps, other than the weights that they count."""
    rests_on = (decision.overflow, decision.norm, decision.loss_scale)
    return any(region is not None for region in rests_on)


def _divided(update: Section, program: Program) -> tuple[tuple[_Movable, ...], tuple[Op, ...]]:
    """Return the ops of the update that may run in the last micro-step, and those that stay."""
    moved: list[_Movable] = []
    left: list[Op] = []
    staying = Touched(program)
    weights = [op.weight for op in update.body if isinstance(op, ops.Decide)]
    for index, op in enumerate(_apart(update.body, weights)):
        if (
            isinstance(op, _Movable)
            and (_is_of_a_flat(op, program) or _is_alone(effects(op).writes, weights))
            and not staying.is_against(op)
        ):
            moved.append(op)
        else:
            left.append(op)
            staying.add(op, index)
    return tuple(moved), tuple(left)


def _apart(body: Iterable[Op], weights: Sequence[Region | None]) -> Iterator[Op]:
    """Yield the ops, with launches that sum one of these weights and other scalars split in two."""
    for op in body:
        if not isinstance(op, ops.AllReduce):
            yield op
            continue
        of_weights = tuple(pair for pair in op.pairs if pair.destination in weights)
        others = tuple(pair for pair in op.pairs if pair.destination not in weights)
        for pairs in filter(None, (of_weights, others)):
            yield replace(op, pairs=pairs)


def _is_alone(written: tuple[Region, ...], weights: Sequence[Region | None]) -> bool:
    """Return whether an op writes only one of these weights."""
    return len(written) == 1 and written[0] in weights


def _is_of_a_flat(op: _Movable, program: Program) -> bool:
    """Return whether the op is the decision or part of a flat's update; the loss stays for the engine to read."""
    if isinstance(op, ops.Decide | ops.Direction | ops.OptimizerStep):
        return True
    return all(program.buffer_by_name[name].role is not Role.SCALAR for name in _names(op))


def _is_on_scalars(op: Op, program: Program) -> bool:
    """Return whether the op only uses scalars, such as the loss."""
    is_update = isinstance(op, ops.Decide | ops.Direction | ops.OptimizerStep)
    return not is_update and all(
        program.buffer_by_name[name].role is Role.SCALAR for name in _names(op)
    )


def _names(op: Op) -> frozenset[str]:
    """Return the buffers that an op uses, allocates or releases."""
    effect = effects(op)
    return rewrite.used_buffers(op).union(effect.allocs, effect.frees)


def _placed(last: Section, moved: Iterable[_Movable], program: Program) -> tuple[Op, ...]:
    """Return the ops of the last micro-step, with each moved op directly after the last op that it must follow."""
    touched = Touched(program)
    for index, op in enumerate(last.body):
        touched.add(op, index)
    after: dict[int, list[Op]] = {}
    begun: dict[str, ops.Alloc] = {}
    for op in moved:
        if isinstance(op, ops.Alloc):
            begun[op.buffer] = op  # It goes where its buffer is first used.
            continue
        allocs = [begun.pop(name) for name in sorted(_names(op) & begun.keys())]
        together: tuple[_Movable, ...] = (*allocs, op)
        at = max(touched.against(together), default=-1)
        for placed in together:
            touched.add(placed, at)
            stream = BESIDE.name if placed.stream == COMPUTE else placed.stream
            after.setdefault(at, []).append(replace(placed, stream=stream))
    return (*after.get(-1, ()), *rewrite.insert(last.body, after=after))


# ------------------------------------------------------------------------------------------------- what is then held


def _state_after(state: State, moved: Iterable[Op], program: Program) -> State:
    """Return the state at the boundary after the moved ops: gradients and the weight are consumed, versions advance."""
    held: dict[str, list[Holding]] = {}
    used = [op.weight for op in moved if isinstance(op, ops.Decide)]
    for holding in state.holdings:
        if rewrite.complete_gradient(holding) is None and holding.region not in used:
            held.setdefault(holding.region.buffer, []).append(holding)
    for op in moved:
        for region, content in _results(op, program):
            old = held.get(region.buffer, ())
            unchanged = [h for h in old if not h.region.overlaps(region)]
            held[region.buffer] = [*unchanged, Holding(region=region, content=content)]
    return replace(state, holdings=tuple(chain.from_iterable(held.values())))


def _results(op: Op, program: Program) -> Iterator[tuple[Region, Content]]:
    """Yield the contents of persistent buffers after an op of the update."""
    match op:
        case ops.Decide():
            for region in (op.step, *op.counts):
                yield from _advanced(region, program)
        case ops.Direction():
            for region in op.states:
                yield from _advanced(region, program)
        case ops.OptimizerStep():
            factors = () if op.factors is None else (op.factors,)
            for region in (op.param, *op.states, *op.scales, *factors):
                yield from _advanced(region, program)
        case ops.Average():
            yield from _advanced(op.average, program)
        case ops.Cast():
            yield from _advanced(op.destination, program)
        case ops.AllGather():
            for pair in op.pairs:
                yield from _advanced(pair.destination, program)
        case ops.Fill():
            if program.buffer_by_name[op.destination.buffer].is_persistent:
                yield op.destination, Zeros()
        case _:
            pass


def _advanced(region: Region, program: Program) -> Iterator[tuple[Region, Content]]:
    """Yield the next version of a persistent buffer's resting content."""
    match program.buffer_by_name[region.buffer].holds:
        case FlatContent():
            content = rewrite.content_of(region, program)
            yield region, replace(content, version=content.version + 1)
        case NamedContent() as holds:
            yield region, replace(holds, version=holds.version + 1)
        case _:
            pass
