"""Steps of an engine as they are timed and recorded for a profile: on all ranks at once, in rounds that take turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from zeroir.ir.spans import Span
from zeroir.runtime.batch import Batch
from zeroir.runtime.engine import Engine

WARM_UP: Final = 3
"""Steps that nobody looks at: kernels are made, memory is first touched."""

_TIMED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurements:
    """What rank 0 knows after the rounds.

    ``seconds`` are of steps that nobody recorded, a mean for each round; ``steps`` the spans of one other step of each
    round, by rank. ``workspaces`` are the bytes that each segment took on rank 0 beside its buffers, by the segment's
    digest.
    """

    seconds: Sequence[float]
    steps: Sequence[Sequence[Sequence[Span]]]
    workspaces: Mapping[str, int]

    @property
    def step_s(self) -> float:
        """The median of the steps that nobody recorded."""
        return median(self.seconds)

    @property
    def noise(self) -> float | None:
        """How far the medians of the odd and of the even rounds are apart, as a fraction of the step; None of one."""
        if len(self.seconds) < 2:
            return None
        return abs(median(self.seconds[::2]) - median(self.seconds[1::2])) / self.step_s


def record(engine: Engine, batches: Iterator[Batch], *, rounds: int) -> StepMeasurements | None:
    """Take steps, some timed and some recorded in turns; None on other ranks than 0. Every rank calls this alike."""
    micro_steps = int(engine.program.option.get("micro_steps", "1"))

    def step() -> None:
        engine.step([next(batches) for _ in range(micro_steps)])

    for _ in range(WARM_UP):
        step()
    seconds: list[float] = []
    steps: list[Sequence[Sequence[Span]]] = []
    for _ in range(rounds):
        engine.average(0.0)  # so that all ranks begin at once
        start = time.perf_counter()
        for _ in range(_TIMED):
            step()
        engine.finish()
        seconds.append((time.perf_counter() - start) / _TIMED)
        # Where spans were gathered just before, a step is slower than most: the one after it is recorded.
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
