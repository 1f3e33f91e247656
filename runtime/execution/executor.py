"""The steps, evaluations and saves of a program: the sections that each of them runs, and the values that it writes.

It decides nothing: only what is in the program happens. ``SectionRunner`` issues the ops of a section; streams
determine when an op runs, handlers what it does, a comm how ranks exchange elements, and kernels how a segment is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, repeat
from typing import Protocol

import torch
from torch import Tensor

from zeroir.config import why_not_evaluate
from zeroir.errors import UserError
from zeroir.ir.analysis.micro_batches import slice_numel, slice_region
from zeroir.ir.buffers import Role
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    UPDATE,
    why_not_save,
)
from zeroir.ir.reports import Storing
from zeroir.runtime.distributed.rank_position import RankPosition
from zeroir.runtime.distributed.section_comparison import SectionsOfRanks
from zeroir.runtime.engine.results import RankEvaluation, RankResult, RankResults
from zeroir.runtime.execution.batch import Shape, shape_of, write_inputs
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.section_runner import RunSection, SectionRunner, ShapesOfRanks
from zeroir.runtime.execution.seeds import site_seed
from zeroir.runtime.execution.streams import Streams
from zeroir.runtime.execution.trace import Watch
from zeroir.runtime.state.host_snapshot import SavedState, saved_states, snapshot_events
from zeroir.runtime.training.micro_batch_weights import (
    RankWeights,
    WeightFunction,
    weighing,
    weight_of,
)
from zeroir.torch_ops.batches import Batch


class StepSettings(Protocol):
    """Writes settings that the host may change between steps, such as learning rates."""

    def before_micro_step(self, step: int, *, micro_steps: int, is_last: bool) -> None:
        """Write the settings of a step, counted from 1, while no op uses them. The update follows if ``is_last``.

        ``micro_steps`` counts those of all steps so far, including this one.
        """

    def after_update(self) -> None:
        """Note that the parameters were updated."""


Keep = Callable[[Storing, Mapping[str, Tensor]], None]
"""Takes the tensors that the user's code would store in a micro-step or an evaluation of a rank, by their names."""


class StepExecutor:
    """Runs the sections of a program for the local ranks, both in the engine and in lockstep."""

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
        """Micro-steps done of the current step."""
        self.earlier_micro_steps = 0
        """Micro-steps of the steps before it, since the engine was created or ``restart`` was called."""
        self.seed = seed
        self._weight = weight or weighing(local_ranks.program)
        self._weights = [
            RankWeights(memory, local_ranks.program) for memory in local_ranks.memories
        ]
        self._program = local_ranks.program
        self._streams = streams
        self._runner = SectionRunner(local_ranks, streams, run_section)
        self._results = RankResults(program=self._program)
        self._rng_buffers = [b.name for b in self._program.buffers if b.role is Role.RNG]
        self.settings: StepSettings | None = None
        self.keep: Keep | None = None
        self._stored = frozenset(output.stored for output in self._program.outputs)
        self._to_watch: tuple[int, Watch] | None = None
        self._saved: list[SavedState] = []

    def step(self, batches: Sequence[Sequence[Batch]]) -> list[RankResult]:
        """Run one training step on ``batches[rank][micro_step]`` of the local ranks.

        Return one result per local rank.
        """
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
        """Run one micro-step, or as many as a section runs, on ``groups[rank][micro_step]`` of the local ranks.

        Returns:
            The losses of each rank's batches, f32[micro_steps], unweighted. ``is_last`` refers to the last of them.
        """
        group = self._program.interleaved
        done = self.micro_steps_done + len(groups[0])
        self.require_micro_steps(done if is_last else done + group)
        with self._streams.entered():
            self._micro_steps(groups, is_last=is_last)
            return [self._results.batch_losses(memory) for memory in self.local_ranks.memories]

    def update(self) -> list[RankResult]:
        """Run the update after the last micro-step; return one result per local rank."""
        self.require_micro_steps(self.micro_steps_done)
        with self._streams.entered():
            return self._update()

    def _micro_steps(self, groups: Sequence[Sequence[Batch]], *, is_last: bool) -> None:
        name = LAST_MICRO_STEP if is_last else MICRO_STEP
        # Ranks compare their settings before the first op.
        done = self.micro_steps_done + self._program.interleaved
        self._runner.approach(name, self.step_count + 1, done)
        if self.settings is not None:
            self.settings.before_micro_step(
                self.step_count + 1,
                micro_steps=self.earlier_micro_steps + done,
                is_last=is_last,
            )
        self._set_inputs(groups, self.micro_steps_done)
        for weights, own in zip(self._weights, groups, strict=True):
            for index, batch in enumerate(own):
                weights.add(batch, self._weight, index)
        shapes = self._shapes(groups)
        self._runner.run(name, self._in_step, self._watch(), shapes)
        self._keep_stored(Storing.STEP, shapes)
        self.micro_steps_done = done

    def _keep_stored(self, moment: Storing, shapes: ShapesOfRanks) -> None:
        """Hand on what the user's code would have stored for the last micro-batch of the section that has just run."""
        if self.keep is None or moment not in self._stored:
            return
        for rank, memory in enumerate(self.local_ranks.memories):
            dims = shapes[rank][-1] if shapes else ()
            self.keep(moment, self._results.outputs(memory, moment, dims))

    def _update(self) -> list[RankResult]:
        before = [
            self._results.before_update(memory, *weights.take())
            for memory, weights in zip(self.local_ranks.memories, self._weights, strict=True)
        ]
        self._runner.approach(UPDATE, self.step_count + 1, self.micro_steps_done)
        self._runner.run(UPDATE, self._in_step, self._watch())
        self.step_count += 1
        self.earlier_micro_steps += self.micro_steps_done
        self.micro_steps_done = 0
        results = [
            self._results.after_update(memory, values)
            for memory, values in zip(self.local_ranks.memories, before, strict=True)
        ]
        if self.settings is not None:
            self.settings.after_update()
        return results

    @property
    def _in_step(self) -> str:
        return f"of step {self.step_count + 1}"

    @property
    def _between_steps(self) -> str:
        return f"after step {self.step_count}"

    def _watch(self) -> Watch | None:
        """Return the observer of the current step, if there is one."""
        if self._to_watch is None or self._to_watch[0] != self.step_count + 1:
            return None
        return self._to_watch[1]

    def loss_scale(self) -> list[float]:
        """Return the loss scale of the next step on each local rank, 1 where the program has none.

        Wait for the device.
        """
        with self._streams.entered():
            scales = [self._results.loss_scale(memory) for memory in self.local_ranks.memories]
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
            shapes = self._shapes([[batch] for batch in batches])
            self._set_inputs([[batch] for batch in batches], 0)
            weights = [self._weight_in_evaluations(batch) for batch in batches]
            self._runner.approach(EVALUATE, self.step_count + 1, 0)
            self._runner.run(EVALUATE, self._between_steps, shapes=shapes)
            self._keep_stored(Storing.EVALUATION, shapes)
            own_shapes: Iterable[Shape] = chain.from_iterable(shapes) if shapes else repeat(())
            return [
                self._results.evaluation(memory, weight, shape)
                for memory, weight, shape in zip(
                    self.local_ranks.memories, weights, own_shapes, strict=False
                )
            ]

    def _weight_in_evaluations(self, batch: Batch) -> float | Tensor:
        if self._program.weight is None or self._weight is None:
            return 1.0
        return weight_of(self._weight, batch)

    def save_state(self) -> list[SavedState]:
        """Copy the training state to host memory by the program's section ``save``; return one result per local rank.

        Return while copies may still run: the following steps wait before they overwrite what is still to be copied.
        Wait until earlier results have been released. The first call allocates the host memory.

        Raises:
            UserError: where the program has no such section.
        """
        if SAVE not in self._program.section_by_name:
            raise UserError(why_not_save(self._program))
        for saved in self._saved:
            saved.wait_until_released()
        with self._streams.entered():
            self._runner.approach(SAVE, self.step_count + 1, self.micro_steps_done)
            self._runner.run(SAVE, self._between_steps)
            wait = self._streams.waiting_for(snapshot_events(self._program))
        self._saved = saved_states(self._program, self.local_ranks.memories, wait)
        return self._saved

    def compare_sections(self, sections: SectionsOfRanks) -> None:
        """Record in ``sections`` the sections with collectives."""
        self._runner.sections = sections

    def watch(self, step: int, watch: Watch) -> None:
        """Observe every op of that step alone, counted from 1. Ops remain bound to each ``watch`` that was given."""
        self._to_watch = step, watch

    def entered(self) -> AbstractContextManager[None]:
        """Return a context between steps, on the compute stream, as ``Streams.entered`` does."""
        return self._streams.entered()

    def finish(self) -> None:
        """Wait until all ops are done, on the device too, including the copies of ``save_state``.

        Call this before reading or changing buffers other than by an op of the program: for example, copies of new
        parameters to the device may still be running.
        """
        self._streams.finish()

    @property
    def has_failed(self) -> bool:
        """Whether a section or a change of values started and did not finish."""
        return self._runner.has_failed

    def require_intact(self) -> None:
        """Raise UserError where an earlier section started and did not finish."""
        self._runner.require_intact()

    def weight_sums(self) -> list[float]:
        """Return the sum of the weights of the current step's micro-batches, on each local rank."""
        return [weights.sum for weights in self._weights]

    def restart(self, step_count: int) -> None:
        """Discard the current step, and continue after ``step_count`` steps; the caller sets the values of the buffers.

        State that a step passes to the next one outside the persistent buffers is restored before the next section.
        """
        self.step_count = step_count
        self.micro_steps_done = 0
        self.earlier_micro_steps = 0
        self._runner.restart()
        for weights in self._weights:
            weights.take()
        for memory in self.local_ranks.memories:
            memory.settle(())

    def discard_step(self) -> None:
        """Discard the current step before its update; the next micro-step draws what its first one drew."""
        earlier = self.earlier_micro_steps
        self.restart(self.step_count)
        self.earlier_micro_steps = earlier

    def changing(self) -> AbstractContextManager[None]:
        """Return a context that changes the values of buffers; if it fails, no section may run afterwards."""
        return self._runner.changing()

    def establish(self, name: str) -> None:
        """Restore the entry state of the next section from the values of the persistent buffers."""
        self._runner.establish(name)

    def go_on_within(self, micro_steps: int, weight_sums: Sequence[float]) -> None:
        """Continue within a step after ``micro_steps`` micro-steps; ``weight_sums`` has one sum per local rank."""
        self.micro_steps_done = micro_steps
        for weights, total in zip(self._weights, weight_sums, strict=True):
            weights.go_on(total)

    def position(self) -> RankPosition:
        """Return the op that started last, or that the host is outside the program. Any thread may call it."""
        position, done = self._runner.position, (self.step_count, self.micro_steps_done)
        if position is None:
            return RankPosition(
                order=(*done, -1, -1),
                text=f"outside its program, in the data or in other code, after step {self.step_count}",
            )
        sections = list(self._program.section_by_name)
        return RankPosition(
            order=(*done, sections.index(position.section), position.index),
            text=f"in {self._runner.labels[position]} {self._in_step}",
        )

    def close(self) -> None:
        """Stop the streams."""
        self._streams.close()

    def _shapes(self, groups: Sequence[Sequence[Batch]]) -> ShapesOfRanks:
        if not self._program.dims:
            return ()
        return [[shape_of(self._program, batch) for batch in own] for own in groups]

    def _set_inputs(self, groups: Sequence[Sequence[Batch]], micro_step: int) -> None:
        """Write the batches of local ranks and their seeds; ``micro_step`` is the index of each rank's first batch."""
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
        """Raise UserError where the program cannot run a step of this many micro-steps."""
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
