"""A learning-rate schedule that drives the settings of optimizer groups, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence

from zeroir.errors import UserError
from zeroir.schedules import SchedulePoint, parse_schedule


class Scheduler:
    """Sets the settings of optimizer groups by a schedule: those of step 1 at once, and of each later step by ``step``.

    ``schedule`` is the text of a schedule, ``groups`` are ``param_groups`` like those of torch's optimizers, and
    ``steps`` is the number of steps of the run, for a schedule without a total of its own. The factors of a schedule
    multiply the initial learning rate of each group; its absolute values apply to all groups. Betas are set in the
    groups that have them.

    Raises:
        UserError: where the schedule needs ``steps``, and they are not given.
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

    @property
    def needs_steps(self) -> bool:
        """Whether the schedule depends on the number of steps of the run."""
        return self._schedule.needs_steps

    def step(self, *, is_skipped: bool = False) -> None:
        """Set the settings of the next step, after a step; a skipped step is repeated with its settings."""
        self._updates_done += not is_skipped
        self._set()

    def state_dict(self) -> dict[str, object]:
        """Return the number of updates that counted, and the initial learning rate of each group.

        ``schedule`` and ``steps`` document what these belong to, and are not loaded.
        """
        return {
            "schedule": self._schedule.text(),
            "steps": self._steps,
            "updates_done": self._updates_done,
            "lrs": list(self._lrs),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue after as many updates from the same initial learning rates, by this scheduler's own schedule.

        Raises:
            UserError: where the state is of another number of groups, or not a scheduler's.
        """
        updates_done, lrs = state.get("updates_done"), state.get("lrs")
        if (
            not isinstance(updates_done, int)
            or updates_done < 0
            or not isinstance(lrs, list)
            or not all(isinstance(lr, int | float) and 0 <= lr < math.inf for lr in lrs)
        ):
            raise UserError("The state of the learning-rate schedule is not one that was saved.")
        if len(lrs) != len(self._groups):
            raise UserError(
                f"The state of the learning-rate schedule is of {len(lrs)} groups, but the optimizer has "
                f"{len(self._groups)}: compile the program with the same groups."
            )
        self._updates_done = updates_done
        self._lrs = [_number(lr) for lr in lrs]
        self._set()

    def go_to(self, updates_done: int) -> None:
        """Set the settings of the step after ``updates_done`` updates."""
        self._updates_done = updates_done
        self._set()

    def follow_groups(self) -> None:
        """Set the settings of groups that were added, whose learning rates are their initial ones."""
        known = len(self._lrs)
        self._lrs += [_number(group["lr"]) for group in self._groups[known:]]
        self._set(known)

    def _set(self, first: int = 0) -> None:
        for group, lr in zip(self._groups[first:], self._lrs[first:], strict=True):
            point = SchedulePoint(updates_done=self._updates_done, lr=lr, steps=self._steps)
            settings = self._schedule.settings(point)
            group["lr"] = settings.lr
            if settings.betas is not None and "betas" in group:
                group["betas"] = settings.betas


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
