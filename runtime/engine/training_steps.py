"""The part of an engine that runs steps, micro-steps, updates and evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroir.runtime.engine.accumulation import Accumulation, MicroStepResult
from zeroir.runtime.engine.anomaly_detection import AnomalyDetection
from zeroir.runtime.engine.eager_failures import EagerFailures
from zeroir.runtime.engine.patterns import matching
from zeroir.runtime.engine.present_programs import FitBatches, PresentPrograms
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.engine.results import Evaluation, RankResult, StepResult
from zeroir.runtime.engine.watched_code import CompiledAgain
from zeroir.runtime.execution.batch import inputs_of
from zeroir.runtime.state.gradients import gradient_norms, gradients
from zeroir.torch_ops.batches import Batch


class TrainingSteps:
    """Runs batches, each with the program that it needs; ``Engine`` documents the methods.

    ``fit`` is called before batches are checked, if it is set. ``last_result`` is the result of the last step.
    """

    def __init__(self, rank_program: RankProgram, programs: PresentPrograms) -> None:
        self._rank_program = rank_program
        self._programs = programs
        self.accumulation = Accumulation(
            lambda batch: inputs_of(rank_program.program, batch),
            self._begin_micro_steps,
            self._micro_steps,
            lambda: rank_program.program.interleaved,
        )
        self.anomalies = AnomalyDetection(rank_program)
        self.failures = EagerFailures(rank_program, lambda: self.accumulation.go_on(0))
        self.fit: FitBatches | None = None
        self.last_result: StepResult | None = None

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Run one training step on batches over which the gradient accumulates; none has begun."""
        programs = self._programs
        programs.look_outside()
        chosen = programs.fitting(batches, self._fit_batches, accumulates=len(batches) > 1)
        if len(batches) > 1:
            for each, program in zip(batches, chosen, strict=True):
                inputs_of(program.program, each)  # before the first of them is added to the sums
            signatures = programs.signatures
            several = {each: signatures.for_several(each) for each in dict.fromkeys(chosen)}
            chosen = [several[each] for each in chosen]
        return self._ended(self._run(batches, chosen))

    def _run(
        self, batches: Sequence[Batch], chosen: Sequence[CompiledAgain]
    ) -> Sequence[RankResult]:
        """Run one training step, with a program for each of its batches."""
        rank_program = self._rank_program
        rank_program.allocate_once()
        programs = dict.fromkeys(chosen)
        if len(programs) <= 1:
            for program in programs:
                self._programs.run(program)
            if not self.failures.are_expected:
                return rank_program.executor.step([batches])
        group = rank_program.program.interleaved
        for start in range(0, len(batches), group):
            self._programs.run(chosen[start])
            stop = start + group
            own = batches[start:stop]
            rank_program.executor.micro_steps([own], is_last=stop >= len(batches))
            self.failures.require_none()
        return rank_program.executor.update()

    def _ended(self, results: Sequence[RankResult]) -> StepResult:
        (result,) = results
        self.anomalies.require_none()
        self.last_result = StepResult(rank=result)
        return self.last_result

    def micro_step(self, batch: Batch, is_last: bool | None) -> MicroStepResult:
        """Add the gradient of one batch to those of the step."""
        accumulation, programs = self.accumulation, self._programs
        if self.fit is not None or programs.signatures.are_several:
            accumulation.require_open()
            accumulation.go_on_within_step()
            programs.look_outside()
            # One program runs a whole group.
            *_, chosen = programs.fitting(
                [*accumulation.waiting, batch], self._fit_batches, accumulates=True
            )
            programs.run(chosen)
        return accumulation.micro_step(batch, is_last)

    def _begin_micro_steps(self) -> None:
        self._programs.look_outside()
        self._programs.read_outside()

    def _micro_steps(self, batches: Sequence[Batch], is_last: bool) -> Sequence[Tensor]:
        if not is_last and self._programs.signatures.running.accumulating is not None:
            self._programs.accumulate()
        self._rank_program.allocate_once()
        (losses,) = self._rank_program.executor.micro_steps([batches], is_last=is_last)
        self.failures.require_none()
        return losses.unbind()

    def update(self) -> StepResult:
        """Update the parameters with the gradients of the micro-steps since the last update."""
        self.accumulation.finish()
        self._programs.follow_optimizers()
        return self._ended(self._rank_program.executor.update())

    def evaluate(self, batch: Batch) -> Evaluation:
        """Evaluate one batch of this rank."""
        self.accumulation.require_none("evaluate")
        self._programs.look_outside(is_step=False)
        (chosen,) = self._programs.fitting([batch], self._fit_batches, is_evaluation=True)
        self._programs.run(chosen)
        self._rank_program.allocate_once()
        (evaluation,) = self._rank_program.executor.evaluate([batch])
        return Evaluation(rank=evaluation)

    def _fit_batches(self, batches: Sequence[Batch], is_evaluation: bool) -> None:
        if self.fit is not None:
            self.fit(batches, is_evaluation)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without loss scaling."""
        (scale,) = self._rank_program.executor.loss_scale()
        return scale

    def gradients(self, patterns: Sequence[str]) -> dict[str, Tensor]:
        """Return the gradients of the step for the parameters of these names, unsharded."""
        names, divisor = self._of_gradients("gradients", patterns)
        own = self._rank_program
        with own.between_sections():
            values = gradients(own.program, own.memory, own.job, names, divisor)
            return {slot.name: gradient for slot, gradient in values}

    def gradient_norms(self, patterns: Sequence[str]) -> dict[str, float]:
        """Return the L2 norms of the gradients of the step for the parameters of these names."""
        names, divisor = self._of_gradients("gradient_norms", patterns)
        own = self._rank_program
        with own.between_sections():
            return gradient_norms(own.program, own.memory, own.job, names, divisor)

    def _of_gradients(self, what: str, patterns: Sequence[str]) -> tuple[frozenset[str], float]:
        """Run the last micro-step; return the names of parameters, and what their gradients are to be divided by."""
        own = self._rank_program
        trained = [
            slot.name for flat in own.program.flats if flat.is_trainable for slot in flat.slots
        ]
        chosen = matching(trained, patterns, "trained parameter") if patterns else trained
        self.accumulation.run_last(what)
        (weight,) = own.executor.weight_sums()
        total = sum(row[0] for row in own.job.exchange([weight]))
        return frozenset(chosen), total * self.loss_scale
