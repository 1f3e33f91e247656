"""Update each flat on the host before the decision about all gradients, which then confirms or undoes the update.

Clipping and loss scaling depend on the gradients of all flats, so without this pass the host's update begins after the
backward (``offload-optimizer``). Here it begins in the last micro-step, as soon as the gradient of a flat is reduced
and in host memory. ``guess`` writes the divisor and the step count of a decision that neither clips nor skips. A
``speculative_step`` uses them, and keeps the old master weights and states. The guess is exact: where ``decide``
neither clips nor skips, its divisor has the same bits. ``decide`` compares the two, and ``commit_step`` in the section
``update`` does nothing if they are equal. Otherwise it restores the kept elements, and unless the step is skipped,
it repeats the step. So each element is the same as without speculation, whatever the guess.

The speculative step also rounds new master weights to 16 bits, where these are copied up from a separate buffer.
Everything else that follows an update, such as copies up, gathers and averages, stays after ``commit_step``. The
gradient of a flat stays in host memory until then. Kept and rounded elements and such gradients are in temporary
buffers that are live across the boundary.

A flat whose states are on disk or have 8 bits is updated after the decision, like one whose optimizer works on whole
parameters. A program without such a decision is unchanged: ``overlap-update`` has moved its updates already.

What ``speculate-update`` changes::

    + buffer %guessed_divisor : f32[1] device scalar = value guessed_divisor
    + buffer %b.param.kept : f32[256] host param
      section last_micro_step {
    + guess step=%step next_step=%guessed_step gradient_divisor=%guessed_divisor divisor=2  stream=update
    + speculative_step momentum param=%b.param.host grad=%b.grad states=(%b.momentum_buffer) kept=(%b.param.kept, …
    + exit %b.param.host = param b @dp version=1 guessed
      section update {
    - decide step=%step gradient_divisor=%divisor divisor=2 norm=%norm max_norm=1.0  stream=compute
    + decide step=%step gradient_divisor=%divisor divisor=2 norm=%norm max_norm=1.0 guess=%guessed_divisor redo=…
    - !5 = optimizer_step momentum param=%a.param.host grad=%a.grad states=(%a.momentum_buffer) …
    + !5 = commit_step momentum param=%a.param.host grad=%a.grad states=(%a.momentum_buffer) kept=(%a.param.kept, …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import PARAM, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Holding, Program, Section, State
from zeroir.ir.reports import Quantity, with_report
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched
from zeroir.passes.common.host_steps import HostStep, host_steps
from zeroir.passes.common.update_streams import BESIDE, with_update_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateUpdate(Pass):
    """Start the host's update before the decision that it depends on, and undo it where the decision differs."""

    name: ClassVar[str] = "speculate-update"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED, Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    def __call__(self, program: Program) -> Program:
        """Return the program with these updates in the last micro-step; unchanged if none is possible."""
        last = program.section_by_name.get(LAST_MICRO_STEP)
        update = program.section_by_name.get(UPDATE)
        if last is None or update is None:
            return program
        decisions = [op for op in update.body if isinstance(op, ops.Decide)]
        steps = tuple(host_steps(program, last, update))
        if len(decisions) != 1 or not _can_be_guessed(decisions[0]) or not steps:
            return program
        return _Speculation(program, decisions[0], steps).run()


def _can_be_guessed(decision: ops.Decide) -> bool:
    """Return whether a guess can predict the decision, to clip or to skip the step, with one count of steps."""
    rests_on_gradients = decision.norm is not None or decision.overflow is not None
    return rests_on_gradients and not decision.counts


@dataclass(slots=True, kw_only=True)
class _Kept:
    """The ops and contents of one speculative step."""

    op: ops.SpeculativeStep
    buffers: list[Buffer]
    holdings: list[Holding] = field(default_factory=list)


class _Speculation:
    """One run of the pass. ``added`` are its new buffers; a scalar is copied to the host's buffer of the decision's."""

    def __init__(self, program: Program, decision: ops.Decide, steps: Sequence[HostStep]) -> None:
        self.program = program
        self.steps = steps
        self.added: list[Buffer] = []
        self._taken = set(program.buffer_by_name)
        self.next_step = self._scalar("guessed_step")
        self.divisor = self._scalar("guessed_divisor")
        self.redo = self._scalar("redo")
        self.redo_on_host = self._added(
            Buffer(name="redo.host", dtype=DType.F32, numel=1, space=Space.HOST, role=Role.STAGING)
        )
        self.decision = replace(decision, guess=whole(self.divisor), redo=whole(self.redo))
        self.weight = None if decision.weight is None else self._guessed_weight(decision.weight)
        self.kept = [self._speculative(step) for step in steps]

    def run(self) -> Program:
        changed = {LAST_MICRO_STEP: self._last, UPDATE: self._update}
        program = rewrite.map_sections(
            self.program,
            lambda section: changed[section.name](section) if section.name in changed else section,
        )
        # They are live from one section to the next, so bounds on staging must not count them.
        roles = {step.gradient.buffer: Role.GRAD for step in self.steps if step.down is not None}
        roles |= dict.fromkeys(self._rounded(), Role.PARAM)
        widened = {step.widened for step in self.steps}
        buffers = [
            buffer
            if buffer.is_persistent
            else replace(buffer, role=roles.get(buffer.name, buffer.role))
            for buffer in program.buffers
            if buffer.name not in widened
        ]
        return replace(
            program,
            buffers=(*buffers, *self.added),
            reports=with_report(program.reports, Quantity.REDO, self.redo.name),
            streams=(
                *with_update_streams(program.streams),
                *(() if BESIDE in program.streams else (BESIDE,)),
            ),
        )

    def _rounded(self) -> list[str]:
        """Return the buffers of rounded master weights."""
        casts = (step.rounding for step in self.steps)
        return [cast.destination.buffer for cast in casts if cast is not None]

    # ------------------------------------------------------------------------------------------------------- buffers

    def _added(self, buffer: Buffer) -> Buffer:
        self.added.append(replace(buffer, name=rewrite.claimed_name(buffer.name, self._taken)))
        return self.added[-1]

    def _scalar(self, name: str) -> Buffer:
        """Return a scalar on the device with its own value."""
        buffer = Buffer(name=name, dtype=DType.F32, numel=1, space=Space.DEVICE, role=Role.SCALAR)
        buffer = self._added(buffer)
        self.added[-1] = replace(buffer, holds=NamedContent(name=buffer.name))
        return self.added[-1]

    def _guessed_weight(self, weight: Region) -> Buffer:
        buffer = self.program.buffer_by_name[weight.buffer]
        return self._added(replace(buffer, name="guessed_weight"))

    def _kept_buffer(self, region: Region) -> Buffer:
        """Return a temporary buffer for the old elements of a region."""
        buffer = self.program.buffer_by_name[region.buffer]
        numel = region.local_numel(self.program.mesh)
        name = f"{buffer.name.removesuffix('.host')}.kept"
        return self._added(replace(buffer, name=name, numel=numel, holds=None))

    # ----------------------------------------------------------------------------------------------------------- ops

    def _speculative(self, step: HostStep) -> _Kept:
        """Return the step with the guessed scalars, at the place of the decision's."""
        op = step.op
        changed = (op.param, *op.states)
        kept = [self._kept_buffer(region) for region in changed]
        speculative = ops.SpeculativeStep(
            algorithm=op.algorithm,
            param=op.param,
            grad=step.gradient,
            states=op.states,
            kept=tuple(map(whole, kept)),
            rounded=None if step.rounding is None else step.rounding.destination,
            step=op.step,
            lr=op.lr,
            hyper=op.hyper,
            gradient_divisor=op.gradient_divisor,
            stream=op.stream,
            group=op.group,
            others=op.others,
        )
        result = _Kept(op=speculative, buffers=kept)
        for region, buffer in zip(changed, kept, strict=True):
            content = rewrite.content_of(region, self.program)
            guessed = replace(content, version=1, guessed=True)
            result.holdings.append(Holding(region=region, content=guessed))
            result.holdings.append(Holding(region=whole(buffer), content=content))
        if step.rounding is not None:
            content = rewrite.content_of(op.param, self.program)
            guessed = replace(content, quantity=PARAM, version=1, guessed=True)
            result.holdings.append(Holding(region=step.rounding.destination, content=guessed))
        if step.content is not None:
            result.holdings.append(Holding(region=step.gradient, content=step.content))
        return result

    def _between(self, state: State) -> State:
        """Return the state between the last micro-step and the update, with guessed and kept elements."""
        held = [holding for kept in self.kept for holding in kept.holdings]
        live = [buffer.name for kept in self.kept for buffer in kept.buffers]
        live += [step.gradient.buffer for step in self.steps if step.down is not None]
        live += self._rounded()
        return replace(state, live=(*state.live, *live), holdings=(*state.holdings, *held))

    def _last(self, last: Section) -> Section:
        """Return the last micro-step with each speculative step after the last op that it must follow."""
        touched = Touched(self.program_with_added)
        for index, op in enumerate(last.body):
            touched.add(op, index)
        after: dict[int, list[Op]] = {}
        for together in self._placed():
            at = max(touched.against(together), default=-1)
            for op in together:
                touched.add(op, at)
            after.setdefault(at, []).extend(together)
        body = (*after.get(-1, ()), *rewrite.insert(last.body, after=after))
        ends = (ops.Release(buffer=name, stream=OPTIMIZER) for name in self._scalars_on_host())
        return replace(last, body=(*body, *ends), exit=self._between(last.exit))

    @property
    def program_with_added(self) -> Program:
        return replace(self.program, buffers=(*self.program.buffers, *self.added))

    def _placed(self) -> Iterator[tuple[Op, ...]]:
        """Yield the ops to place in the last micro-step; those of one tuple stay together."""
        for op in self._weight_ops():
            yield (op,)
        decision = self.decision
        yield (
            ops.Guess(
                step=decision.step,
                next_step=whole(self.next_step),
                gradient_divisor=whole(self.divisor),
                divisor=decision.divisor,
                loss_scale=decision.loss_scale,
                weight=None if self.weight is None else whole(self.weight),
                stream=BESIDE.name,
            ),
        )
        sources = {
            decision.step.buffer: whole(self.next_step),
            decision.gradient_divisor.buffer: whole(self.divisor),
        }
        for name, down in self._scalars_on_host().items():
            source = sources.get(down.source.buffer, down.source)
            yield (
                ops.Alloc(buffer=name, stream=BESIDE.name),
                replace(down, source=source, stream=BESIDE.name, event=None),
            )
        for step, kept in zip(self.steps, self.kept, strict=True):
            if step.down is not None:
                alloc = ops.Alloc(buffer=step.gradient.buffer, stream=step.down.stream)
                yield (alloc, step.down)
            begun = [buffer.name for buffer in kept.buffers]
            begun += [] if step.rounding is None else [step.rounding.destination.buffer]
            allocs = (ops.Alloc(buffer=name, stream=kept.op.stream) for name in begun)
            yield (*allocs, kept.op)

    def _weight_ops(self) -> Iterator[Op]:
        """Yield the ops that compute the weight of the decision once more, for the guess."""
        weight = self.decision.weight
        if weight is None or self.weight is None:
            return

        guessed = whole(self.weight)
        # In a step of one micro-batch the backward itself has written the weight that is reduced here.
        own = weight

        for op in self.program.section_by_name[UPDATE].body:
            if isinstance(op, ops.Decide):
                return
            match op:
                case ops.AllReduce():
                    pairs = [pair for pair in op.pairs if pair.destination == weight]
                    if pairs:
                        pair = replace(pairs[0], source=own, destination=guessed)
                        yield replace(op, pairs=(pair,), event=None)
                        own = guessed
                case ops.Cast() if op.destination == weight:
                    yield replace(op, destination=guessed, stream=BESIDE.name, event=None)
                    own = guessed
                case _:
                    pass

    def _scalars_on_host(self) -> dict[str, ops.ToHost]:
        """Return the temporary buffers of scalars that speculative steps read, each with the copy that fills it."""
        read = {
            region.buffer
            for kept in self.kept
            for region in (
                kept.op.step,
                kept.op.gradient_divisor,
                *(settings.lr for settings in kept.op.settings),
            )
        }
        return {
            op.destination.buffer: op
            for op in self.program.section_by_name[UPDATE].body
            if isinstance(op, ops.ToHost) and op.destination.buffer in read
        }

    # -------------------------------------------------------------------------------------------------- the decision

    def _update(self, update: Section) -> Section:
        """Return the update, in which the decision says whether the guess was right, and steps are committed."""
        speculative = {
            step.op: (step, kept) for step, kept in zip(self.steps, self.kept, strict=True)
        }
        widened = {step.widened for step in self.steps if step.widened is not None}
        came_down = {step.gradient.buffer for step in self.steps if step.down is not None}
        rounded = set(self._rounded())
        last_step = max(
            index
            for index, op in enumerate(update.body)
            if isinstance(op, ops.OptimizerStep) and op in speculative
        )
        body: list[Op] = []
        for index, op in enumerate(update.body):
            match op:
                case ops.Decide():
                    body += self._decided()
                case ops.OptimizerStep() if op in speculative:
                    body += self._commit(*speculative[op])
                case ops.Memory() if op.buffer in widened | came_down:
                    pass
                case ops.ToHost() if op.destination.buffer in came_down:
                    pass
                case ops.Cast() if op.destination.buffer in widened | rounded:
                    pass
                case ops.Alloc() if op.buffer in rounded:
                    pass
                case _:
                    body.append(op)
            if index == last_step:
                body.append(ops.Release(buffer=self.redo_on_host.name, stream=OPTIMIZER))
        return replace(update, entry=self._between(update.entry), body=tuple(body))

    def _decided(self) -> Iterator[Op]:
        yield self.decision
        stream = self.decision.stream
        host = self.redo_on_host
        yield ops.Alloc(buffer=host.name, stream=stream)
        yield ops.ToHost(source=whole(self.redo), destination=whole(host), stream=stream)

    def _commit(self, step: HostStep, kept: _Kept) -> Iterator[Op]:
        """Yield ops that make the step final; its gradient and its old elements end with it."""
        op = step.op
        yield ops.CommitStep(
            algorithm=op.algorithm,
            param=op.param,
            grad=step.gradient,
            states=op.states,
            kept=kept.op.kept,
            rounded=kept.op.rounded,
            redo=whole(self.redo_on_host),
            step=op.step,
            lr=op.lr,
            hyper=op.hyper,
            gradient_divisor=op.gradient_divisor,
            skip=op.skip,
            stream=op.stream,
            group=op.group,
            others=op.others,
        )
        ended = [buffer.name for buffer in kept.buffers]
        ended += [step.gradient.buffer] if step.down is not None else []
        for name in ended:
            yield ops.Release(buffer=name, stream=op.stream)
