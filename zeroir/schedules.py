"""Learning-rate schedules, written as text: ``cosine{warmup=100,total=1000,minimum=0.1}``.

A schedule computes the settings of a step from the number of updates before it. Steps that an overflow skipped do not
count, either in DeepSpeed or in torch. ``constant``, ``linear`` and ``cosine`` multiply the learning rate of the
optimizer with the factors of Hugging Face's ``get_scheduler`` (``transformers/optimization.py``), except that the
cosine stays at its minimum after its last step. The others are DeepSpeed's, with its names, options and defaults
(``deepspeed/runtime/lr_schedules.py`` of version 0.19.6): DeepSpeed makes step 1 with a first value, and every later
step t with the formula at iteration t - 2.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroir.errors import UserError
from zeroir.ir.limits import MOST_COUNT

Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Rate = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSettings:
    """The learning rate of a step, and Adam's betas if the schedule sets them."""

    lr: float
    betas: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePoint:
    """A step, after ``updates_done`` updates.

    ``lr`` is the learning rate of the optimizer, and ``steps`` the number of steps of the run, which is used if a
    schedule has no total of its own.
    """

    updates_done: int
    lr: float
    steps: int


class Schedule(BaseModel):
    """A schedule; its fields are the options of its text. ``name`` begins the text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]

    @abstractmethod
    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        """Return the settings of the step at this point."""

    @property
    def needs_steps(self) -> bool:
        """Whether the number of steps of the run matters, because the schedule has no total although it could."""
        totals = {"total", "total_num_steps"} & type(self).model_fields.keys()
        return any(getattr(self, name) is None for name in totals)

    def text(self) -> str:
        """Return the schedule as text, with the options that were set."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        options = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in values.items()
            if key in self.model_fields_set and value is not None
        ]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


class Constant(Schedule):
    """The constant learning rate, after ``warmup`` steps in which it grows linearly from 0."""

    name: ClassVar[str] = "constant"

    warmup: Count = 0

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        return ScheduledSettings(lr=at.lr * _warmed_up(at.updates_done, self.warmup))


class Linear(Schedule):
    """After the warm-up the learning rate falls linearly to ``minimum`` times itself, at step ``total``."""

    name: ClassVar[str] = "linear"

    warmup: Count = 0
    total: Positive | None = None
    minimum: Ratio = 0.0

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        if at.updates_done < self.warmup:
            return ScheduledSettings(lr=at.lr * _warmed_up(at.updates_done, self.warmup))
        total = self.total or at.steps
        left = max(0.0, (total - at.updates_done) / max(1, total - self.warmup))
        return ScheduledSettings(lr=at.lr * (left * (1 - self.minimum) + self.minimum))


class Cosine(Schedule):
    """After the warm-up the learning rate falls by half a cosine to ``minimum`` times itself, at step ``total``."""

    name: ClassVar[str] = "cosine"

    warmup: Count = 0
    total: Positive | None = None
    minimum: Ratio = 0.0

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        if at.updates_done < self.warmup:
            return ScheduledSettings(lr=at.lr * _warmed_up(at.updates_done, self.warmup))
        progress = (at.updates_done - self.warmup) / max(1, (self.total or at.steps) - self.warmup)
        left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return ScheduledSettings(lr=at.lr * (left * (1 - self.minimum) + self.minimum))


def _warmed_up(updates_done: int, warmup: int) -> float:
    return min(1.0, updates_done / max(1, warmup)) if warmup else 1.0


class WarmupLR(Schedule):
    """DeepSpeed's warm-up from one learning rate to another, which then stays."""

    name: ClassVar[str] = "WarmupLR"

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate | None = None
    warmup_num_steps: Count = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        """Return the settings; without ``warmup_max_lr`` the optimizer's learning rate is the largest."""
        largest = at.lr if self.warmup_max_lr is None else self.warmup_max_lr
        if at.updates_done == 0:
            return ScheduledSettings(lr=self.warmup_min_lr)
        factor = self._factor(at)
        return ScheduledSettings(lr=self.warmup_min_lr + (largest - self.warmup_min_lr) * factor)

    def _factor(self, at: SchedulePoint) -> float:
        factor = _warmup_factor(at.updates_done - 1, self.warmup_num_steps, self.warmup_type)
        return 1.0 if factor is None else factor


class WarmupDecayLR(WarmupLR):
    """DeepSpeed's ``WarmupLR`` with a linear decay to 0 at iteration ``total_num_steps``."""

    name: ClassVar[str] = "WarmupDecayLR"

    total_num_steps: Positive | None = None
    warmup_max_lr: Rate | None = 0.001

    def _factor(self, at: SchedulePoint) -> float:
        iteration = at.updates_done - 1
        factor = _warmup_factor(iteration, self.warmup_num_steps, self.warmup_type)
        if factor is not None:
            return factor
        total = self.total_num_steps or at.steps
        return max(0.0, (total - iteration) / max(1.0, total - max(2, self.warmup_num_steps)))


class WarmupCosineLR(Schedule):
    """DeepSpeed's warm-up and half a cosine, both as factors of the optimizer's learning rate."""

    name: ClassVar[str] = "WarmupCosineLR"

    total_num_steps: Positive | None = None
    warmup_min_ratio: Ratio = 0.0
    warmup_num_steps: Count = 1000
    cos_min_ratio: Ratio = 0.0001
    warmup_type: Literal["log", "linear"] = "log"

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        """Return the settings; step 1 has the learning rate 0."""
        if at.updates_done == 0:
            return ScheduledSettings(lr=0.0)
        iteration = at.updates_done - 1
        factor = _warmup_factor(iteration, self.warmup_num_steps, self.warmup_type)
        if factor is not None:
            return ScheduledSettings(
                lr=at.lr * (self.warmup_min_ratio + factor * (1.0 - self.warmup_min_ratio))
            )
        warmup = max(2, self.warmup_num_steps)
        decay = max(1, (self.total_num_steps or at.steps) - warmup)
        progress = min(1.0, (iteration - warmup + 1) / decay)
        left = (1 + math.cos(math.pi * progress)) / 2
        return ScheduledSettings(
            lr=at.lr * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * left)
        )


def _warmup_factor(iteration: int, warmup_num_steps: int, kind: str) -> float | None:
    """Return DeepSpeed's factor during the warm-up, which has at least two steps; None after it."""
    warmup = max(2, warmup_num_steps)
    if iteration >= warmup:
        return None
    if kind == "log":
        return 1.0 / math.log(warmup) * math.log(iteration + 1)
    return iteration / warmup


class OneCycle(Schedule):
    """DeepSpeed's cycle of the learning rate up and down, then its decay; Adam's first beta moves the other way."""

    name: ClassVar[str] = "OneCycle"

    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    decay_step_size: Count = 0
    cycle_momentum: bool = True
    cycle_min_mom: Momentum = 0.8
    cycle_max_mom: Momentum = 0.9
    decay_mom_rate: Rate = 0.0

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        """Return the settings; while ``cycle_momentum`` is true, the second beta is 0.99, as in DeepSpeed."""
        if at.updates_done == 0:
            return self._both(self.cycle_min_lr, self.cycle_min_mom)
        iteration = at.updates_done - 1
        size = self._second_step_size + self.cycle_first_step_size
        if iteration < size:
            height = self._height(at.updates_done)
            return self._both(
                self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height,
                self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height,
            )
        decays = (iteration - size + 1) / self.decay_step_size if self.decay_step_size else 0.0
        return self._both(
            self.cycle_min_lr / (1 + self.decay_lr_rate * decays),
            self.cycle_max_mom * (1 + self.decay_mom_rate * decays),
        )

    @property
    def _second_step_size(self) -> int:
        is_given = self.cycle_second_step_size is not None
        return (self.cycle_second_step_size or 0) if is_given else self.cycle_first_step_size

    def _both(self, lr: float, momentum: float) -> ScheduledSettings:
        return ScheduledSettings(lr=lr, betas=(momentum, 0.99) if self.cycle_momentum else None)

    def _height(self, at: int) -> float:
        """Return the position within the cycle, from 0 at its ends to 1 between its halves."""
        first, second = float(self.cycle_first_step_size), float(self._second_step_size)
        size = first + second
        share = first / size
        x = 1.0 + at / size - math.floor(1 + at / size)
        is_first = x <= share
        height = x / share if is_first else (x - 1) / (share - 1)
        stairs = self.cycle_first_stair_count
        if not is_first and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if not stairs:
            return height
        # Counted in whole steps: the height at a boundary may lie one rounding below its stair.
        step = at % size
        position = step * stairs / first if step <= first else (size - step) * stairs / second
        return math.floor(position) / stairs


class LRRangeTest(Schedule):
    """DeepSpeed's search for the largest learning rate, which grows linearly, or in stairs, without end."""

    name: ClassVar[str] = "LRRangeTest"

    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: bool = False

    def settings(self, at: SchedulePoint) -> ScheduledSettings:
        interval = at.updates_done / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = float(math.floor(interval))
        return ScheduledSettings(
            lr=self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)
        )


SCHEDULES: Final[Mapping[str, type[Schedule]]] = {
    kind.name: kind
    for kind in (
        Constant,
        Linear,
        Cosine,
        WarmupLR,
        WarmupDecayLR,
        WarmupCosineLR,
        OneCycle,
        LRRangeTest,
    )
}
DEEPSPEED_SCHEDULES: Final = (
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "OneCycle",
    "LRRangeTest",
)

_TEXT: Final = re.compile(r"(?P<name>[A-Za-z]+)(?:\{(?P<options>[^{}]*)\})?")


def parse_schedule(text: str) -> Schedule:
    """Parse the text of a schedule.

    Raises:
        UserError: if there is no such schedule or option, or if a value does not fit.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"a schedule is written name or name{{option=value}}, not `{text}`.")
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in (match["options"] or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value) or key in options:
            raise UserError(f"`{item}` should be option=value, given once.")
        options[key] = value
    return make_schedule(match["name"], options)


def make_schedule(name: str, options: Mapping[str, object]) -> Schedule:
    """Make a schedule with these options, and defaults for the others; their values may be strings.

    Raises:
        UserError: in the cases of ``parse_schedule``.
    """
    kind = SCHEDULES.get(name)
    if kind is None:
        nearest = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {nearest[0]}? The" if nearest else "the"
        raise UserError(
            f"there is no schedule {name}; {hint} schedules are {', '.join(SCHEDULES)}."
        )
    is_text = all(isinstance(value, str) for value in options.values())
    try:
        return kind.model_validate_strings(options) if is_text else kind.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise UserError(
                f"{name} has no option {key}; its options are {', '.join(kind.model_fields)}."
            ) from None
        if first["type"] == "missing":
            raise UserError(f"{name} needs its option {key}.") from None
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(
            f"{key} of {name} is {first['input']!s:.60}, but should be {expected}."
        ) from None
