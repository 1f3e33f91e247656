"""A learning-rate schedule that drives the settings of optimizer groups, step by step."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from zeroir.schedules import SchedulePoint, parse_schedule


class ScheduleDriver:
    """Gives optimizer groups the settings of a schedule before each step.

    ``schedule`` is the text of a schedule, ``groups`` are ``param_groups`` like those of torch's optimizers, and
    ``steps`` is the number of steps of the run. The factors of a schedule multiply the learning rate that each group
    has at first; its absolute values are those of all groups. Betas are set in the groups that have them.
    """

    def __init__(
        self, schedule: str, groups: Sequence[MutableMapping[str, object]], steps: int
    ) -> None:
        self._schedule = parse_schedule(schedule)
        self._groups = groups
        self._lrs = [_number(group["lr"]) for group in groups]
        self._steps = steps
        self._updates_done = 0

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return _number(self._groups[0]["lr"])

    def before_step(self) -> None:
        """Set the settings of the next step."""
        for group, lr in zip(self._groups, self._lrs, strict=True):
            point = SchedulePoint(updates_done=self._updates_done, lr=lr, steps=self._steps)
            settings = self._schedule.settings(point)
            group["lr"] = settings.lr
            if settings.betas is not None and "betas" in group:
                group["betas"] = settings.betas

    def after_step(self, *, is_skipped: bool) -> None:
        """Count an update, unless an overflow skipped it."""
        self._updates_done += not is_skipped


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
