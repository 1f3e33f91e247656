"""Micro-steps one by one: each runs when it is known whether it is the step's last."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zeroir.errors import UserError
from zeroir.torch_ops.batches import Batch

RunMicroStep = Callable[[Batch, bool], Tensor]
"""Runs a micro-step, the last one or not, and returns its loss, f32[]."""


class MicroStepResult:
    """The result of ``Engine.micro_step``."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    @property
    def loss(self) -> float:
        """The loss of the batch on this rank, without its weight. Reading it waits for the device.

        Raises:
            UserError: where the micro-step has not run yet.
        """
        if self._loss is None:
            raise UserError(
                "This micro-step runs with the next call of micro_step or update, which says whether it is the last of "
                "its step: read its loss afterwards, or call micro_step with is_last."
            )
        return float(self._loss)

    def set(self, loss: Tensor) -> None:
        """Give it its loss, f32[]."""
        self._loss = loss


class Accumulation:
    """The micro-steps of the step that has begun.

    A micro-step waits for the next call unless it is said whether it is the last. ``check`` raises a UserError for a
    batch that does not fit, and ``run`` runs a micro-step; one that raises a UserError waits on.
    """

    def __init__(self, check: Callable[[Batch], object], run: RunMicroStep) -> None:
        self._check = check
        self._run = run
        self._waiting: tuple[Batch, MicroStepResult] | None = None
        self._is_last_done = False
        self._count = 0

    def micro_step(self, batch: Batch, is_last: bool | None) -> MicroStepResult:
        """Run the micro-step that waits, and this one if ``is_last`` is given.

        Raises:
            UserError: where the batch does not fit, or the step's last micro-step has run already.
        """
        self._check(batch)
        if self._is_last_done:
            raise UserError(
                "The last micro-step of this step has run: call update() before the next micro_step()."
            )
        self._run_waiting(is_last=False)
        self._count += 1
        result = MicroStepResult()
        self._waiting = (batch, result)
        if is_last is not None:
            self._run_waiting(is_last=is_last)
        return result

    def finish(self) -> None:
        """Run the micro-step that waits as the last one; the update follows.

        Raises:
            UserError: where there is no micro-step, or its last one was said not to be the last.
        """
        if self._count == 0:
            raise UserError("update() needs at least one micro_step() before it.")
        self._run_waiting(is_last=True)
        if not self._is_last_done:
            raise UserError(
                "update() needs a last micro-step, but the one before it was called with is_last=False: call "
                "micro_step(batch, is_last=True), or leave is_last out."
            )
        self._is_last_done = False
        self._count = 0

    def require_none(self, what: str) -> None:
        """Raise UserError where a step has begun; ``what`` is the method that needs the end of one."""
        if self._count:
            raise UserError(f"A step has begun with micro_step(): call update() before {what}().")

    def require_known(self) -> None:
        """Raise UserError unless it is known that no micro-step of the step that has begun is its last."""
        if self._waiting is not None:
            raise UserError(
                "The last micro_step() has not run, because it is not known whether it is the last of its step: call "
                "micro_step(batch, is_last=False) before save(), or save between steps."
            )
        if self._is_last_done:
            raise UserError(
                "The last micro-step of this step has run: call update() before save()."
            )

    def go_on(self, micro_steps: int) -> None:
        """Forget the step that has begun, and go on after so many micro-steps of another one."""
        self._waiting = None
        self._is_last_done = False
        self._count = micro_steps

    def _run_waiting(self, *, is_last: bool) -> None:
        if self._waiting is None:
            return
        batch, result = self._waiting
        result.set(self._run(batch, is_last))
        self._waiting = None
        self._is_last_done = is_last
