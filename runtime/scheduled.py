"""A learning-rate schedule that drives the settings of optimizer groups, step by step."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from zeroir.errors import UserError
from zeroir.schedules import SchedulePoint, parse_schedule


class Scheduler:
    """Gives optimizer groups the settings of a schedule: those of step 1 at once, and of each further step by ``step``.

    ``schedule`` is the text of a schedule, ``groups`` are ``param_groups`` like those of torch's optimizers, and
    ``steps`` is the number of steps of the run, for a schedule that names no total. The factors of a schedule multiply
    the learning rate that each group has at first; its absolute values are those of all groups. Betas are set in the
    groups that have them.

    Raises:
        UserError: where the schedule needs ``steps``, and there are none.
    """

    def __init__(
        self, schedule: str, groups: Sequence[MutableMapping[str, object]], steps: int | None
    ) -> None:
        self._schedule = parse_schedule(schedule)
        if steps is None and self._schedule.needs_steps:
            raise UserError(
                f"The schedule {schedule} names no total: give it one, or pass the number of steps."
            )
        self._groups = groups
        self._lrs = [_number(group["lr"]) for group in groups]
        self._steps = steps or 1
        self._updates_done = 0
        self._set()

    @property
    def lr(self) -> float:
        """The learning rate of the first group in the next step."""
        return _number(self._groups[0]["lr"])

    def step(self, *, is_skipped: bool = False) -> None:
        """Set the settings of the next step, after one step; a skipped step is repeated with its settings."""
        self._updates_done += not is_skipped
        self._set()

    def _set(self) -> None:
        for group, lr in zip(self._groups, self._lrs, strict=True):
            point = SchedulePoint(updates_done=self._updates_done, lr=lr, steps=self._steps)
            settings = self._schedule.settings(point)
            group["lr"] = settings.lr
            if settings.betas is not None and "betas" in group:
                group["betas"] = settings.betas


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
