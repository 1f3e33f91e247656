"""The mean step of a program whose batches have the shapes of a histogram, of a file or of the model's own batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import load_program
from zeroir.api.model_of_program import load_model
from zeroir.cost.histogram import MeanStep, Shape, histogram_of, mean_step, read_histogram
from zeroir.cost.machine import Machine, load_machine
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource
    from zeroir.ir.program import Program
    from zeroir.ir.sizes import Dim

BATCHES: Final = "batches"
"""The histogram that is measured from ``batches()`` of the model file."""

MEASURED: Final = 1000
"""The number of batches that are measured, or fewer where they end."""

Histogram = str | Path | Sequence[Mapping[str, int]]
"""A CSV file, ``batches``, or rows such as ``{"length": 512, "count": 30}``."""


def simulate_histogram(
    program: CompiledProgram | str | Path,
    histogram: Histogram,
    machine: Machine | str | Path = "dgx-h100",
    *,
    micro_steps: int | None = None,
    model: str | None = None,
    allow_model_change: bool = False,
) -> MeanStep:
    """Return the expected step of a program whose ranks draw the shapes of their batches for themselves.

    ``histogram`` is a CSV file with a column for each dim and one called ``count``; or a sequence of such rows; or
    ``batches``, the first thousand batches that ``batches()`` of the model file yields on rank 0. Dims that it does not
    name have their largest value. ``model`` is the model file if it has moved.

    Raises:
        UserError: if the program has no dims, or the program, the machine or the histogram is missing or wrong.
    """
    compiled = program if isinstance(program, CompiledProgram) else load_program(program)
    loaded_machine = machine if isinstance(machine, Machine) else load_machine(machine)
    counts = counts_for(compiled, histogram, model, allow_model_change=allow_model_change)
    return mean_step(compiled.program, loaded_machine, counts, micro_steps=micro_steps)


def require_no_sizes(histogram: Histogram | None, at: object) -> None:
    """Raise a UserError if sizes are given beside a histogram."""
    if histogram is not None and at is not None:
        raise UserError(
            "A histogram says which sizes batches have, so it cannot be combined with --at."
        )


def counts_for(
    compiled: CompiledProgram,
    histogram: Histogram,
    model: str | None = None,
    *,
    allow_model_change: bool = False,
) -> Mapping[Shape, int]:
    """Return how often each shape of a compiled program's dims occurs.

    Raises:
        UserError: as ``simulate_histogram``.
    """
    _require_dims(compiled.program)
    if histogram != BATCHES and (model is not None or allow_model_change):
        raise UserError(
            f"Of the model file only batches() would be used, and only by the histogram '{BATCHES}': leave it out."
        )
    source = compiled.source
    if histogram == BATCHES and source is None and compiled.artifact.has_model_file:
        source = load_model(
            compiled.artifact, compiled.path, model=model, allow_model_change=allow_model_change
        )
    return counts_of(compiled.program, histogram, source, compiled.artifact.model_path)


def counts_of(
    program: Program, histogram: Histogram, source: ModelSource | None, model: str
) -> Mapping[Shape, int]:
    """Return how often each shape of a program's dims occurs; ``model`` names the source in messages.

    Raises:
        UserError: as ``simulate_histogram``.
    """
    _require_dims(program)
    if histogram == BATCHES:
        return _measured(program, source, model)
    return counts_within(program.dims, histogram)


def counts_within(dims: Sequence[Dim], histogram: Histogram) -> Mapping[Shape, int]:
    """Return how often each shape of these dims occurs in a CSV file or in rows.

    Raises:
        UserError: if the file or a row is wrong, or there is none.
    """
    if isinstance(histogram, str | Path):
        return read_histogram(Path(histogram), dims)
    rows = ((f"Row {number}", row) for number, row in enumerate(histogram, 1))
    counts = histogram_of(dims, rows)
    if not counts:
        raise UserError("The histogram has no rows: give at least one.")
    return counts


def mean_sizes(program: Program, counts: Mapping[Shape, int]) -> dict[str, int]:
    """Return the mean of each dim over the batches of a histogram, rounded up."""
    total = sum(counts.values())
    return {
        dim.name: -(-sum(shape[number] * count for shape, count in counts.items()) // total)
        for number, dim in enumerate(program.dims)
    }


def _require_dims(program: Program) -> None:
    if not program.dims:
        raise UserError(
            "The program has no dims, so all its batches have one shape: compile it with --shapes for a histogram."
        )


def _measured(program: Program, source: ModelSource | None, model: str) -> Mapping[Shape, int]:
    """Return how often each shape occurs among the first batches of rank 0."""
    from zeroir.runtime.data.training_data import RankOfData, TrainingData
    from zeroir.runtime.execution.batch import shape_of

    if source is None or source.batches is None:
        raise UserError(
            f"{model} has no batches() whose shapes could be measured: define it, or name a CSV file."
        )
    rank = RankOfData(rank=0, world_size=program.mesh.world_size, seed=0)
    data = TrainingData(source.batches, rank)
    counts = Counter(shape_of(program, batch) for batch in data.first(MEASURED))
    if not counts:
        raise UserError("batches() yields no batch whose shape could be measured.")
    return counts
