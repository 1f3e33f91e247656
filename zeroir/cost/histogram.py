"""The mean step of batches of many shapes: how often each shape occurs, and how long a step of it takes.

Each rank draws the shape of each of its micro-batches for itself, with the frequencies of a histogram, and a step waits
for its slowest rank. A step in which all micro-batches of all ranks have one shape is simulated; a rank with several
shapes takes the mean of their steps. Ranks that communicate in each micro-step wait for the slowest of them there, and
all ranks do at the end of a step. The expected largest times follow from the distribution of the simulated steps as
order statistics, without drawing any step.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from zeroir.cost.distribution import Distribution
from zeroir.cost.durations import segment_cost
from zeroir.cost.machine import Machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.cost.simulate import simulate
from zeroir.cost.tasks import require_micro_steps
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.instances import instance, largest, values_within
from zeroir.ir.limits import MOST_COUNT
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, Program
from zeroir.ir.sizes import Dim
from zeroir.memory.footprint import footprint

COUNT: Final = "count"
"""The column of a histogram that is not a dim."""

MOST_SIMULATED: Final = 32
"""The most shapes whose steps are simulated; those of others are interpolated."""

Shape = tuple[int, ...]
"""The values of a program's dims, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeStep:
    """A shape of a histogram: the values of dims, the fraction of batches that have it, and the seconds of a step.

    ``step_s`` is that of a step in which all micro-batches of all ranks have the shape.
    """

    values: Mapping[str, int]
    share: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """The expected step of batches whose shapes ranks draw for themselves.

    ``wait_s`` is the part of the mean step in which a rank waits for slower ones, on average over ranks; ``padded_s``
    is the step of the largest shape that the program takes. ``peak_bytes`` are those of a rank's device, planned for
    that shape. ``simulated`` of the ``shapes`` were simulated, the others interpolated.
    """

    machine: str
    world_size: int
    micro_steps: int
    batches: int
    shapes: tuple[ShapeStep, ...]
    simulated: int
    mean_s: float
    wait_s: float
    padded_s: float
    peak_bytes: int


def read_histogram(path: Path, dims: Sequence[Dim]) -> Mapping[Shape, int]:
    """Return how often each shape occurs, from a CSV file with a column for each dim and a column ``count``.

    Dims without a column have their largest value; without ``count`` each row is one batch.

    Raises:
        UserError: if there is no such file, or a row is not a shape of these dims.
    """
    try:
        # Spreadsheets write a mark at the beginning of a file in UTF-8.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True, strict=True)
            rows = [
                (f"'{path}', line {reader.line_num}", row) for row in reader if any(row.values())
            ]
            columns = list(reader.fieldnames or ())
    except OSError as error:
        raise UserError(f"The histogram '{path}' cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"'{path}' is no table in CSV: {error}.") from error
    if not rows or len(set(columns)) < len(columns):
        raise UserError(
            f"'{path}' should have a line of distinct names of dims, such as length,rows,count, and lines of numbers."
        )
    return histogram_of(dims, rows)


def histogram_of(
    dims: Sequence[Dim], rows: Iterable[tuple[str, Mapping[str, object]]]
) -> Mapping[Shape, int]:
    """Return how often each shape occurs; each row has its name in messages, values of dims and a count.

    Raises:
        UserError: if a row is not a shape of these dims, or one of them is called ``count``.
    """
    if any(dim.name == COUNT for dim in dims):
        raise UserError(
            f"The program has a dim '{COUNT}', which is the name of another column of a histogram: compile it with "
            "another name for this dim."
        )
    counts: Counter[Shape] = Counter()
    for name, row in rows:
        numbers = {column: _number(name, column, text) for column, text in row.items()}
        count = numbers.pop(COUNT, 1)
        try:
            values = values_within(dims, numbers)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        if not 1 <= count <= MOST_COUNT:
            raise UserError(f"{name}: count is {count}, but should be from 1 to {MOST_COUNT}.")
        counts[tuple(values.values())] += count
    return counts


def _number(name: str, column: object, value: object) -> int:
    text = str(value).strip()
    if not isinstance(column, str) or value is None or not text.isdecimal() or len(text) > 18:
        shown = "nothing" if value in (None, "") else f"{value!r:.40}"
        raise UserError(
            f"{name}: {column or 'a further column'} is {shown}, but should be a whole number from 1 on."
        )
    return int(text)


def mean_step(
    program: Program,
    machine: Machine,
    histogram: Mapping[Shape, int],
    *,
    micro_steps: int | None = None,
) -> MeanStep:
    """Return the expected step of a program on a machine, with shapes as frequent as in a histogram.

    Raises:
        UserError: as ``simulate``.
    """
    count = require_micro_steps(program, micro_steps)
    names = [dim.name for dim in program.dims]
    shapes = sorted(histogram)

    def step_s(shape: Shape) -> float:
        values = dict(zip(names, shape, strict=True))
        return simulate(instance(program, values), machine, micro_steps=count).step_s

    seconds, simulated = _steps(shapes, step_s, _segments_s(program, machine))
    weights = [histogram[shape] for shape in shapes]
    of_one = Distribution.of(zip(seconds, weights, strict=True))
    world_size = program.mesh.world_size
    group = program.interleaved
    meeting = _meeting_ranks(program) if count > group else 1
    of_group = of_one.mean_of(group).largest_of(meeting)
    of_step = of_group.mean_of(count // group).largest_of(world_size // meeting)
    batches = sum(weights)
    return MeanStep(
        machine=machine.name,
        world_size=world_size,
        micro_steps=count,
        batches=batches,
        shapes=tuple(
            ShapeStep(
                values=dict(zip(names, shape, strict=True)), share=weight / batches, step_s=own_s
            )
            for shape, weight, own_s in zip(shapes, weights, seconds, strict=True)
        ),
        simulated=simulated,
        mean_s=of_step.mean,
        wait_s=of_step.mean - of_one.mean,
        padded_s=step_s(tuple(largest(program).values())),
        peak_bytes=int(footprint(with_measured_workspaces(program, machine)).total_bytes),
    )


def _steps(
    shapes: Sequence[Shape],
    step_s: Callable[[Shape], float],
    segments_s: Callable[[Shape], float],
) -> tuple[list[float], int]:
    """Return the seconds of a step of each shape, and the number of those that were simulated.

    Of many shapes, some are simulated: the fastest, the slowest, and others in equal distances between them by the
    seconds of their segments. Between those, a step is interpolated by the seconds of its segments.
    """
    if len(shapes) <= MOST_SIMULATED:
        return [step_s(shape) for shape in shapes], len(shapes)
    own_s = {shape: segments_s(shape) for shape in shapes}
    ordered = sorted(shapes, key=lambda shape: (own_s[shape], shape))
    low, high = own_s[ordered[0]], own_s[ordered[-1]]
    chosen = {ordered[0]: None, ordered[-1]: None}
    for number in range(1, MOST_SIMULATED - 1):
        at_s = low + (high - low) * number / (MOST_SIMULATED - 1)
        chosen[min(ordered, key=lambda shape: abs(own_s[shape] - at_s))] = None
    known = sorted((own_s[shape], step_s(shape)) for shape in chosen)
    import numpy as np

    places, steps = zip(*known, strict=True)
    return [float(np.interp(own_s[shape], places, steps)) for shape in shapes], len(chosen)


def _segments_s(program: Program, machine: Machine) -> Callable[[Shape], float]:
    """Return a function from a shape to the seconds of the segments of a micro-step."""
    calls = Counter(
        op.segment
        for op in program.section_by_name[LAST_MICRO_STEP].body
        if isinstance(op, ops.Compute)
    )
    names = [dim.name for dim in program.dims]

    def seconds(shape: Shape) -> float:
        # Only the segments are needed.
        plain = instance(
            replace(program, buffers=(), inputs=(), outputs=(), sections=()),
            dict(zip(names, shape, strict=True)),
        )
        return math.fsum(
            calls[segment.name] * segment_cost(segment, machine).seconds
            for segment in plain.segments
            if segment.name in calls
        )

    return seconds


def _meeting_ranks(program: Program) -> int:
    """Return the number of ranks that wait for each other in each section of a step, not only at its end."""
    axes = {
        program.comm_by_name[op.comm].axis
        for op in program.section_by_name[MICRO_STEP].body
        if isinstance(op, ops.Collective)
    }
    return math.prod(program.mesh.size(axis) for axis in axes)
