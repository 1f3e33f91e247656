"""The loop over the sections of a program: it issues every op, in order, on the op's stream.

It decides nothing: only what is in the program happens. Streams say when an op runs, handlers what it does, a comm how
ranks exchange elements, and kernels how a segment is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from zeroir.errors import (
    MEMORY_REMEDY,
    InternalError,
    UserError,
    ZeroirError,
    is_out_of_memory,
)
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.labels import labels
from zeroir.ir.micro_batches import slice_numel, slice_region
from zeroir.ir.output_paths import structured
from zeroir.ir.program import (
    BATCH_LOSS,
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    UPDATE,
    OpPosition,
    Section,
    why_not_evaluate,
    why_not_save,
)
from zeroir.runtime import state
from zeroir.runtime.batch import write_inputs
from zeroir.runtime.comm.job import (
    LostPeersError,
    is_lost_connection,
)
from zeroir.runtime.handlers import LocalRanks
from zeroir.runtime.rank_memory import RankMemory
from zeroir.runtime.saved_state import SavedState, saved_states, snapshot_events
from zeroir.runtime.seeds import site_seed
from zeroir.runtime.streams import Streams
from zeroir.runtime.trace import Task, Watch
from zeroir.runtime.weights import RankWeights, WeightFunction
from zeroir.runtime.whereabouts import Whereabouts
from zeroir.torch_ops.batches import Batch

RunSection = Callable[[Section, Callable[[], None]], None]
"""Carries out a section whose ops the function submits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The results of a step on one rank.

    ``loss`` is f32[]: the mean over the step's micro-batches of this rank, weighted where they have weights;
    ``mean_loss`` that over all ranks, or None where the program does not reduce it. ``weight`` is the sum of this
    rank's weights, f32[] or the number of micro-batches. ``is_skipped`` and ``grad_norm`` are f32[], or None where the
    program computes neither; the norm is of the averaged, unscaled gradient, before clipping. ``is_redone`` is f32[]:
    whether the host undid its speculative update, or None where the update waits. Reading a value waits for the device.
    """

    loss: Tensor
    weight: Tensor | float
    mean_loss: Tensor | None
    is_skipped: Tensor | None
    grad_norm: Tensor | None
    is_redone: Tensor | None = None


class StepSettings(Protocol):
    """Writes what the host may change between steps, such as learning rates."""

    def before_micro_step(self, step: int, *, is_last: bool) -> None:
        """Write it for a step, counted from 1. No op that uses it is under way. The update follows if ``is_last``."""

    def after_update(self) -> None:
        """Take notice of an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvaluation:
    """The results of an evaluation on one rank: the loss of its batch, f32[], and the declared outputs.

    The tensors of the outputs are copies, which later evaluations leave as they are.
    """

    loss: Tensor
    outputs: object


class StepExecutor:
    """Runs the sections of a program for the local ranks; the engine and lockstep share it."""

    def __init__(
        self,
        local_ranks: LocalRanks,
        streams: Streams,
        *,
        seed: int = 0,
        run_section: RunSection | None = None,
        weight: WeightFunction | None = None,
    ) -> None:
        self.local_ranks = local_ranks
        self.step_count = 0
        self.micro_steps_done = 0
        """Micro-steps of the step that has begun."""
        self.seed = seed
        self._weight = weight
        self._weights = [
            RankWeights(memory, local_ranks.program.weight) for memory in local_ranks.memories
        ]
        self._program = local_ranks.program
        self._streams = streams
        self._run_section = run_section
        self._rng_buffers = [b.name for b in self._program.buffers if b.role is Role.RNG]
        self.settings: StepSettings | None = None
        self._to_watch: tuple[int, Watch] | None = None
        self._is_begun = False
        self._has_failed = False
        self._present: OpPosition | None = None
        self._prepared: dict[str, list[Task]] = {}
        self._bound: dict[tuple[str, Watch | None], list[Task]] = {}
        self._saved: list[SavedState] = []
        self._pending = {
            section.name: (
                [pending.event for pending in section.entry.pending],
                [pending.event for pending in section.exit.pending],
            )
            for section in self._program.sections
        }

    def step(self, batches: Sequence[Sequence[Batch]]) -> list[RankResult]:
        """One training step: ``batches[rank][micro_step]`` for the local ranks; one result per local rank."""
        counts = {len(micro_batches) for micro_batches in batches}
        (micro_steps,) = counts
        self.require_micro_steps(micro_steps)
        if self.micro_steps_done:
            raise UserError(
                "An earlier step failed after its first micro-step, and its gradients are in the sums: make a new "
                "engine."
            )
        group = self._program.interleaved
        with self._streams.entered():
            for start in range(0, micro_steps, group):
                groups = [own[start : start + group] for own in batches]
                self._micro_steps(groups, is_last=start + group == micro_steps)
            return self._update()

    def micro_steps(self, groups: Sequence[Sequence[Batch]], *, is_last: bool) -> list[Tensor]:
        """One micro-step, or as many as a section runs: ``groups[rank][micro_step]`` for the local ranks.

        Returns the losses of each rank's batches, f32[micro_steps], unweighted. ``is_last`` is about the last of them.
        """
        group = self._program.interleaved
        done = self.micro_steps_done + len(groups[0])
        self.require_micro_steps(done if is_last else done + group)
        with self._streams.entered():
            self._micro_steps(groups, is_last=is_last)
            name = BATCH_LOSS if BATCH_LOSS in self._program.buffer_by_name else self._loss_name
            return [memory.buffer(name)[:group].clone() for memory in self.local_ranks.memories]

    def update(self) -> list[RankResult]:
        """The update after the last micro-step; one result per local rank."""
        self.require_micro_steps(self.micro_steps_done)
        with self._streams.entered():
            return self._update()

    def _micro_steps(self, groups: Sequence[Sequence[Batch]], *, is_last: bool) -> None:
        name = LAST_MICRO_STEP if is_last else MICRO_STEP
        # Ranks compare their settings before the first op.
        self._present = self._first_position(name)
        if self.settings is not None:
            self.settings.before_micro_step(self.step_count + 1, is_last=is_last)
        self._set_inputs(groups, self.micro_steps_done)
        for weights, own in zip(self._weights, groups, strict=True):
            for index, batch in enumerate(own):
                weights.add(batch, self._weight, index)
        self._run(name, self._watch())
        self.micro_steps_done += self._program.interleaved

    def _update(self) -> list[RankResult]:
        weights = [weights.take() for weights in self._weights]
        # The update may reduce the loss over ranks, or clear it for the next step.
        losses = self._losses(weights)
        scales = [self._loss_scale(memory) for memory in self.local_ranks.memories]
        self._run(UPDATE, self._watch())
        self.step_count += 1
        self.micro_steps_done = 0
        results = [
            self._result(memory, loss, weight, scale)
            for memory, loss, weight, scale in zip(
                self.local_ranks.memories, losses, weights, scales, strict=True
            )
        ]
        if self.settings is not None:
            self.settings.after_update()
        return results

    def _watch(self) -> Watch | None:
        """The observer of the present step, if there is one."""
        if self._to_watch is None or self._to_watch[0] != self.step_count + 1:
            return None
        return self._to_watch[1]

    def loss_scale(self) -> list[float]:
        """The loss scale of the next step on each local rank, 1 where the program has none; waits for the device."""
        with self._streams.entered():
            scales = [self._loss_scale(memory) for memory in self.local_ranks.memories]
            return [1.0 if scale is None else float(scale) for scale in scales]

    def evaluate(self, batches: Sequence[Batch]) -> list[RankEvaluation]:
        """Evaluate one batch per local rank by the program's ``evaluate`` section, which changes no state.

        Raises:
            UserError: where the program has no such section, or a batch does not fit.
        """
        if EVALUATE not in self._program.section_by_name or self._program.eval_loss is None:
            raise UserError(why_not_evaluate(self._program))
        if self.micro_steps_done:
            raise UserError("A step has begun with micro_step(): call update() before evaluate().")
        with self._streams.entered():
            self._set_inputs([[batch] for batch in batches], 0)
            self._run(EVALUATE)
            return [self._evaluation(memory) for memory in self.local_ranks.memories]

    def save_state(self) -> list[SavedState]:
        """Copy the state of the training to host memory by the program's section ``save``; one result per local rank.

        Returns while the copies may be under way: the steps that follow wait where they would overwrite what is still
        to be copied. Returns only after earlier results have been released. The first call allocates the host memory.

        Raises:
            UserError: where the program has no such section.
        """
        if SAVE not in self._program.section_by_name:
            raise UserError(why_not_save(self._program))
        for saved in self._saved:
            saved.wait_until_released()
        with self._streams.entered():
            self._run(SAVE)
            wait = self._streams.waiting_for(snapshot_events(self._program))
        self._saved = saved_states(self._program, self.local_ranks.memories, wait)
        return self._saved

    def _evaluation(self, memory: RankMemory) -> RankEvaluation:
        program = self._program
        assert program.eval_loss is not None
        values = [
            (output.path, memory.buffer(output.buffer).clone().view(output.shape))
            for output in program.outputs
        ]
        return RankEvaluation(
            loss=memory.buffer(program.eval_loss)[0].clone(), outputs=structured(values)
        )

    def watch(self, step: int, watch: Watch) -> None:
        """Observe every op of that step alone, counting from 1. Ops stay bound to each ``watch`` that was given."""
        self._to_watch = step, watch

    def entered(self) -> AbstractContextManager[None]:
        """A body between steps, on the compute stream; see ``Streams.entered``."""
        return self._streams.entered()

    def finish(self) -> None:
        """Return when all ops are done, on the device too, also the copies of ``save_state``.

        Whoever reads or changes buffers without an op of the program calls this first: copies of new parameters to the
        device, among others, may still be under way.
        """
        self._streams.finish()

    @property
    def has_failed(self) -> bool:
        """Whether a section or a change of values began and did not end."""
        return self._has_failed

    def weight_sums(self) -> list[float]:
        """The sum of the weights of the micro-batches of the step that has begun, on each local rank."""
        return [weights.sum for weights in self._weights]

    def restart(self, step_count: int) -> None:
        """Forget the step that has begun, and go on after so many steps; the buffers get their values from elsewhere.

        What a step hands to the next one beside the buffers at rest is established before the next section.
        """
        self.step_count = step_count
        self.micro_steps_done = 0
        self._is_begun = False
        for weights in self._weights:
            weights.take()
        for memory in self.local_ranks.memories:
            memory.settle(())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A body that changes the values of buffers; if it fails, no section may run."""
        self._has_failed = True
        yield
        self._has_failed = False

    def establish(self, name: str) -> None:
        """Establish the entry state of a section, which is to run next, by the values of the buffers at rest."""
        with torch.no_grad():
            self._begin(self._program.section_by_name[name])

    def go_on_within(self, micro_steps: int, weight_sums: Sequence[float]) -> None:
        """Go on within a step after so many micro-steps; the local ranks have these sums of weights."""
        self.micro_steps_done = micro_steps
        for weights, total in zip(self._weights, weight_sums, strict=True):
            weights.go_on(total)

    def whereabouts(self) -> Whereabouts:
        """The op that began last, or that the host is outside the program. Any thread may ask."""
        position, done = self._present, (self.step_count, self.micro_steps_done)
        if position is None:
            return Whereabouts(
                order=(*done, -1, -1),
                text=f"outside its program, in the data or in other code, after step {self.step_count}",
            )
        sections = list(self._program.section_by_name)
        return Whereabouts(
            order=(*done, sections.index(position.section), position.index),
            text=f"in {self._labels[position]} of step {self.step_count + 1}",
        )

    def _first_position(self, name: str) -> OpPosition | None:
        section = self._program.section_by_name.get(name)
        ops_in_order = () if section is None else section.positioned_ops()
        return next((position for position, _ in ops_in_order), None)

    def close(self) -> None:
        """Stop the streams."""
        self._streams.close()

    def _run(self, name: str, watch: Watch | None = None) -> None:
        section = self._program.section_by_name.get(name)
        if section is None:
            raise UserError(
                f"The program has no {name} section; compile it for this many micro-steps."
            )
        if self._has_failed:
            raise UserError(
                "An earlier step failed in its middle, and left a part of the values changed: make a new engine."
            )
        self._has_failed = True  # until the section has run to its end
        with torch.no_grad():
            if not self._is_begun:
                self._begin(section)
            entering, leaving = self._pending[name]
            self._streams.join(entering)
            # Only ops that are issued one by one can be observed.
            if self._run_section is None or watch is not None:
                self._issue(section, watch)
            else:
                self._present = self._first_position(name)
                self._run_section(section, partial(self._issue, section, None))
            self._streams.join(leaving)
        self._has_failed = False
        self._present = None

    def _issue(self, section: Section, watch: Watch | None) -> None:
        if watch is None and torch.autograd.profiler._is_profiler_enabled:
            watch = self._named
        # Bound ops are kept, observed ones too: otherwise a recorded step would run ops for the first time.
        tasks = self._bound.get((section.name, watch))
        if tasks is None:
            tasks = self._bound[section.name, watch] = self._bind(section, watch)
        for task in tasks:
            task()

    def _bind(self, section: Section, watch: Watch | None) -> list[Task]:
        runs = self._prepared.get(section.name)
        if runs is None:
            runs = [self._task(position, op) for position, op in section.positioned_ops()]
            self._prepared[section.name] = runs
        return [
            self._streams.bind(op, run, None if watch is None else partial(watch, position, op))
            for (position, op), run in zip(section.positioned_ops(), runs, strict=True)
        ]

    def _begin(self, section: Section) -> None:
        """Establish the entry state of the first section; later sections find theirs as their predecessors leave it."""
        self._is_begun = True
        state.establish(
            self._program, self.local_ranks.memories, self.local_ranks.comm, section.entry
        )
        for pending in section.entry.pending:
            self._streams.signal(pending.event)

    def _task(self, position: OpPosition, op: ops.Op) -> Task:
        """The function that carries an op out, the same whether it is observed or not."""
        step = self.local_ranks.prepare(op)

        def run() -> None:
            self._present = position
            try:
                step()
            except UserError:
                raise
            except Exception as error:
                raise self._explained(position, error) from error

        return run

    def _named(self, position: OpPosition, _: ops.Op, run: Task) -> Task:
        label = self._labels[position]

        def named() -> None:
            with record_function(label):
                run()

        return named

    def _explained(self, position: OpPosition, error: Exception) -> ZeroirError:
        """The error to raise for a failure in an op: it names the failure, the op and a remedy."""
        when = f"of step {self.step_count + 1}"
        if position.section in (EVALUATE, SAVE):
            when = f"after step {self.step_count}"
        place = f"{self._labels[position]} {when}"
        if isinstance(error, RuntimeError) and is_lost_connection(error):
            return LostPeersError(
                f"Rank {self.local_ranks.memories[0].rank} lost its peers in {place}: another rank stopped or is "
                "stuck; look at the first rank that failed."
            )
        if is_out_of_memory(error):
            return UserError(f"Memory ran out in {place}: {MEMORY_REMEDY}.")
        if isinstance(error, IndexError):
            problem = str(error).rstrip(".")
            return UserError(f"The batch does not suit the model: {problem}, in {place}.")
        return InternalError(f"{place}: {error}")

    @cached_property
    def _labels(self) -> Mapping[OpPosition, str]:
        """A label for each op, for profiles and errors."""
        return labels(self._program)

    def _set_inputs(self, groups: Sequence[Sequence[Batch]], micro_step: int) -> None:
        """Write the batches of local ranks and their seeds; ``micro_step`` is the number of each rank's first batch."""
        for memory, own in zip(self.local_ranks.memories, groups, strict=True):
            for index, batch in enumerate(own):
                write_inputs(self._program, memory, batch, index)
                for name in self._rng_buffers:
                    numel = slice_numel(self._program, name)
                    sites = memory.region(slice_region(self._program, name, index, numel))
                    seeds = [
                        site_seed(self.seed, self.step_count, micro_step + index, memory.rank, site)
                        for site in range(numel)
                    ]
                    sites.copy_(torch.tensor(seeds, dtype=sites.dtype))

    def require_micro_steps(self, micro_steps: int) -> None:
        """Raise UserError where the program cannot make a step of this many micro-steps."""
        group = self._program.interleaved
        if micro_steps < 1:
            raise UserError("A step needs at least one batch.")
        if MICRO_STEP not in self._program.section_by_name:
            if micro_steps != group > 1:
                raise UserError(
                    f"The program runs all {group} micro-batches of a step unit by unit, but got {micro_steps}: give a "
                    f"step {group}, or compile it with --order layer=G, for multiples of G."
                )
            if micro_steps > 1 and group == 1:
                raise UserError(
                    "Compile with --micro-steps 2 (micro_steps=2) for steps of any number of batches: this program is "
                    f"for steps of one batch, but got {micro_steps}."
                )
            return
        if micro_steps % group:
            raise UserError(
                f"The program runs its micro-batches in groups of {group}; give a step a multiple of {group}, and not "
                f"{micro_steps}."
            )
        if self._decision is not None and self._decision.weight is not None:
            return
        # Programs of earlier versions contain the number of micro-steps.
        compiled = int(self._program.option.get("micro_steps", micro_steps))
        if micro_steps != compiled:
            raise UserError(
                f"A step of this program takes {compiled} micro-batches, but got {micro_steps}; "
                "pass a list of as many batches, or compile it again, for any number of them."
            )

    @property
    def _loss_name(self) -> str:
        if self._program.loss is None:
            raise UserError("The program names no loss; compile it again.")
        return self._program.loss

    def _losses(self, weights: Sequence[Tensor | float]) -> list[Tensor]:
        """Each local rank's loss, f32[]: the sum in the loss buffer divided by the sum of the weights."""
        name = self._loss_name
        return [
            memory.buffer(name)[0].clone() / weight
            for memory, weight in zip(self.local_ranks.memories, weights, strict=True)
        ]

    def _loss_scale(self, memory: RankMemory) -> Tensor | None:
        """A copy of this step's loss scale, because the update may change it."""
        decide = self._decision
        if decide is None or decide.loss_scale is None:
            return None
        return memory.region(decide.loss_scale)[0].clone()

    def _result(
        self, memory: RankMemory, loss: Tensor, weight: Tensor | float, scale: Tensor | None
    ) -> RankResult:
        decide = self._decision
        total: Tensor | int = self._program.mesh.world_size
        if decide is not None and decide.weight is not None:
            total = decide.divisor * memory.region(decide.weight)[0]
        mean_loss = None
        if self._is_loss_reduced and self._program.loss is not None:
            mean_loss = memory.buffer(self._program.loss)[0] / total
        elif self._program.mesh.world_size == 1:
            mean_loss = loss
        if decide is None:
            return RankResult(
                loss=loss, weight=weight, mean_loss=mean_loss, is_skipped=None, grad_norm=None
            )
        skip, norm = decide.skip, None
        if decide.norm is not None:
            divisor = total if decide.weight is not None else decide.divisor
            norm = memory.region(decide.norm)[0].sqrt() / (
                divisor if scale is None else divisor * scale
            )
        return RankResult(
            loss=loss,
            weight=weight,
            mean_loss=mean_loss,
            is_skipped=None if skip is None else memory.region(skip)[0].clone(),
            grad_norm=norm,
            is_redone=None if decide.redo is None else memory.region(decide.redo)[0].clone(),
        )

    @cached_property
    def _is_loss_reduced(self) -> bool:
        """Whether the update leaves the sum over all ranks, along every axis of the mesh, in the loss buffer."""
        section = self._program.section_by_name.get(UPDATE)
        summed: set[str] = set()
        for op in () if section is None else section.body:
            match op:
                case ops.AllReduce():
                    if any(p.destination.buffer == self._program.loss for p in op.pairs):
                        summed.add(self._program.comm_by_name[op.comm].axis)
                case ops.Fill() if op.destination.buffer == self._program.loss:
                    summed.clear()
                case _:
                    pass
        axes = {axis.name for axis in self._program.mesh.axes if axis.size > 1}
        return bool(summed) and axes <= summed

    @cached_property
    def _decision(self) -> ops.Decide | None:
        return next((op for op in self._program.ops() if isinstance(op, ops.Decide)), None)
