"""Micro-steps one by one: each runs once it is known whether it is the last of its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zeroir.errors import UserError
from zeroir.torch_ops.batches import Batch

RunMicroSteps = Callable[[Sequence[Batch], bool], Sequence[Tensor]]
"""A function that runs a group of micro-steps and returns the loss of each, f32[]; the flag says that it ends the step.
"""


class MicroStepResult:
    """The result of ``Engine.micro_step``."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    @property
    def is_known(self) -> bool:
        """Whether the micro-step has run, so that ``loss`` can be read."""
        return self._loss is not None

    @property
    def loss(self) -> float:
        """The loss of the batch on this rank, without its weight. Reading it synchronizes with the device.

        Raises:
            UserError: where the micro-step has not run yet.
        """
        if self._loss is None:
            raise UserError(
                "This micro-step runs with a later call of micro_step or update, which says whether it is the last of "
                "its step: read its loss afterwards, or call micro_step with is_last."
            )
        return float(self._loss)

    def set(self, loss: Tensor) -> None:
        """Set the loss, f32[]."""
        self._loss = loss


class Accumulation:
    """The micro-steps of the current step.

    They run in groups of ``group`` micro-steps. A group waits until it is complete and the next call shows whether it
    is the last, unless that is given at once. ``check`` raises UserError for a batch that does not fit, ``begin`` is
    called before a new group, and ``run`` runs a group; a group for which it raises UserError stays in the queue.
    """

    def __init__(
        self,
        check: Callable[[Batch], object],
        begin: Callable[[], object],
        run: RunMicroSteps,
        group: Callable[[], int],
    ) -> None:
        self._check = check
        self._begin = begin
        self._run = run
        self._group = group
        self._waiting: list[tuple[Batch, MicroStepResult]] = []
        self._is_last_done = False
        self._count = 0

    @property
    def waiting(self) -> list[Batch]:
        """The batches of the group that waits."""
        return [batch for batch, _ in self._waiting]

    def micro_step(self, batch: Batch, is_last: bool | None) -> MicroStepResult:
        """Run the waiting group, and the group of this micro-step if it is complete and ``is_last`` is given.

        Raises:
            UserError: where the batch does not fit, the step's last micro-step has already run, or this is the last
                micro-step of the step but not of its group.
        """
        self._check(batch)
        self.require_open()
        self.go_on_within_step()
        if is_last and len(self._waiting) + 1 < self._group():
            raise self._incomplete(self._count + 1)
        if not self._waiting:
            self._begin()
        self._count += 1
        result = MicroStepResult()
        self._waiting.append((batch, result))
        if is_last is not None and self._is_complete:
            self._run_waiting(is_last=is_last)
        return result

    def require_open(self) -> None:
        """Raise UserError where the last micro-step of the current step has run."""
        if self._is_last_done:
            raise UserError(
                "The last micro-step of this step has run: call update() before the next micro_step()."
            )

    def go_on_within_step(self) -> None:
        """Run the waiting group if it is complete, since another micro-step of the step follows."""
        if self._is_complete:
            self._run_waiting(is_last=False)

    def finish(self) -> None:
        """Run the waiting group as the last of the step; the update follows.

        Raises:
            UserError: where there is no micro-step, the last one was declared not to be the last, or a group is
                incomplete.
        """
        self.run_last("update")
        self._is_last_done = False
        self._count = 0

    def run_last(self, what: str) -> None:
        """Run the waiting group as the last of the step; ``what`` is the method that needs it.

        Raises:
            UserError: where there is no micro-step, the last one was declared not to be the last, or a group is
                incomplete.
        """
        if self._count == 0:
            raise UserError(
                f"{what}() needs at least one micro_step() before it; step() updates by itself."
            )
        if self._waiting and not self._is_complete:
            raise self._incomplete(self._count)
        self._run_waiting(is_last=True)
        if not self._is_last_done:
            raise UserError(
                f"{what}() needs a last micro-step, but the one before it was called with is_last=False: call "
                "micro_step(batch, is_last=True), or leave is_last out."
            )

    def require_none(self, what: str) -> None:
        """Raise UserError where a step has begun; ``what`` is the method that must not be called within a step."""
        if self._count:
            raise UserError(f"A step has begun with micro_step(): call update() before {what}().")

    def require_none_waiting(self, what: str) -> None:
        """Raise UserError where a micro-step of the current step waits, or its last one has run.

        ``what`` is the method that must not be called then.
        """
        if self._waiting or self._is_last_done:
            raise UserError(
                f"A micro_step() waits for the next one, or for update(): call update() before {what}(), or say with "
                "is_last whether it is the last of its step."
            )

    def require_known(self) -> None:
        """Raise UserError unless it is known that no micro-step of the current step so far is its last."""
        if self._waiting and not self._is_complete:
            raise UserError(
                f"The program runs its micro-batches in groups of {self._group()}, and a group has begun: save after a "
                "whole group, or between steps."
            )
        if self._waiting:
            raise UserError(
                "The last micro_step() has not run, because it is not known whether it is the last of its step: call "
                "micro_step(batch, is_last=False) before save(), or save between steps."
            )
        if self._is_last_done:
            raise UserError(
                "The last micro-step of this step has run: call update() before save()."
            )

    def go_on(self, micro_steps: int) -> None:
        """Discard the current step, and continue another one after ``micro_steps`` micro-steps."""
        self._waiting.clear()
        self._is_last_done = False
        self._count = micro_steps

    @property
    def _is_complete(self) -> bool:
        return len(self._waiting) >= self._group()

    def _incomplete(self, count: int) -> UserError:
        return UserError(
            f"The program runs its micro-batches in groups of {self._group()}; give a step a multiple of "
            f"{self._group()}, and not {count}."
        )

    def _run_waiting(self, *, is_last: bool) -> None:
        if not self._waiting:
            return
        losses = self._run([batch for batch, _ in self._waiting], is_last)
        for (_, result), loss in zip(self._waiting, losses, strict=True):
            result.set(loss)
        self._waiting.clear()
        self._is_last_done = is_last
