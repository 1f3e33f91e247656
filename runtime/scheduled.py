"""A learning-rate schedule that drives the settings of an engine's optimizer, step by step."""

from __future__ import annotations

from zeroir.runtime.engine import Engine
from zeroir.schedules import Schedule, ScheduledSettings, SchedulePoint, parse_schedule


class ScheduleDriver:
    """Writes the settings of a program's schedule before each step; without a schedule the first settings stay.

    ``steps`` is the number of steps of the run. The factors of a schedule multiply the learning rate of each optimizer
    group; its absolute values are those of all groups.
    """

    def __init__(self, engine: Engine, steps: int) -> None:
        text = engine.program.option.get("schedule")
        self.schedule: Schedule | None = None if text is None else parse_schedule(text)
        self._engine = engine
        self._steps = steps
        self._lrs = {
            scalar.buffer: scalar.values[0]
            for scalar in engine.program.scalars
            if scalar.buffer == "lr" or scalar.buffer.startswith("lr.")
        }
        self._updates_done = 0
        self.lr = self._lrs.get("lr", 0.0)

    def before_step(self) -> None:
        """Write the settings of the next step; ``lr`` is then the learning rate of the first group."""
        if self.schedule is None:
            return
        self._engine.finish()
        for buffer, lr in self._lrs.items():
            settings = self.schedule.settings(
                SchedulePoint(updates_done=self._updates_done, lr=lr, steps=self._steps)
            )
            self._write(buffer, settings)
            if buffer == "lr":
                self.lr = settings.lr

    def after_step(self, *, is_skipped: bool) -> None:
        """Count an update, unless an overflow skipped it."""
        self._updates_done += not is_skipped

    def _write(self, buffer: str, settings: ScheduledSettings) -> None:
        self._engine.buffer(buffer).fill_(settings.lr)
        algorithm = self._engine.program.option.get("optimizer")
        if settings.betas is not None and algorithm in ("adam", "adamw"):
            hyper = self._engine.buffer(buffer.replace("lr", "hyper", 1))
            hyper[0], hyper[1] = settings.betas
