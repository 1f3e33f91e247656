"""Steps of an engine, alternately timed and recorded for a profile, on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from zeroir.config import options_of
from zeroir.ir.spans import Span
from zeroir.runtime.engine.engine import Engine
from zeroir.torch_ops.batches import Batch

WARM_UP: Final = 3
"""Unmeasured steps at the start, which compile kernels and touch memory for the first time."""

_TIMED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurements:
    """The measurements of all rounds, on rank 0.

    ``seconds`` has the mean time of each round's unrecorded steps; ``steps`` has the spans of one recorded step of each
    round, by rank. ``workspaces`` has the bytes that each segment used on rank 0 beside its buffers, by the segment's
    digest.
    """

    seconds: Sequence[float]
    steps: Sequence[Sequence[Sequence[Span]]]
    workspaces: Mapping[str, int]

    @property
    def step_s(self) -> float:
        """The median time of the unrecorded steps."""
        return median(self.seconds)

    @property
    def noise(self) -> float | None:
        """The difference between the medians of odd and even rounds, as a fraction of the step; None for one round."""
        if len(self.seconds) < 2:
            return None
        return abs(median(self.seconds[::2]) - median(self.seconds[1::2])) / self.step_s


def record(engine: Engine, take: Callable[[int], Batch], *, rounds: int) -> StepMeasurements | None:
    """Run steps, alternately timed and recorded; return None on ranks other than 0. All ranks call this together.

    ``take`` returns the next batch of a step with this number.
    """
    micro_steps = options_of(engine.program).micro_steps.count

    def step() -> None:
        step_number = engine.step_count + 1
        engine.step([take(step_number) for _ in range(micro_steps)])

    for _ in range(WARM_UP):
        step()
    seconds: list[float] = []
    steps: list[Sequence[Sequence[Span]]] = []
    for _ in range(rounds):
        engine.average(0.0)  # all ranks start together
        start = time.perf_counter()
        for _ in range(_TIMED):
            step()
        engine.finish()
        seconds.append((time.perf_counter() - start) / _TIMED)
        # The step after spans were gathered is slower than most, so the next one is recorded.
        engine.record(engine.step_count + 2)
        step()
        step()
        spans = engine.timelines()
        if spans is not None:
            steps.append(spans)
    if engine.rank:
        step()
        return None
    workspaces = engine.workspaces(step)
    return StepMeasurements(seconds=seconds, steps=steps, workspaces=workspaces)
