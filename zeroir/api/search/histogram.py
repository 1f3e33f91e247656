"""The mean step of a program whose batches have the shapes of a histogram, of a file or of the model's own batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import load_program
from zeroir.api.model_of_program import load_model
from zeroir.cost.histogram import MeanStep, Shape, histogram_of, mean_step, read_histogram
from zeroir.cost.machine import Machine, load_machine
from zeroir.errors import UserError

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
    if not compiled.program.dims:
        raise UserError(
            "The program has no dims, so all its batches have one shape: compile it with --shapes for a histogram."
        )
    loaded_machine = machine if isinstance(machine, Machine) else load_machine(machine)
    if histogram == BATCHES:
        counts = _measured(compiled, model, allow_model_change=allow_model_change)
    elif model is not None or allow_model_change:
        raise UserError(
            f"Of the model file only batches() would be used, and only by the histogram '{BATCHES}': leave it out."
        )
    elif isinstance(histogram, str | Path):
        counts = read_histogram(Path(histogram), compiled.program)
    else:
        rows = ((f"Row {number}", row) for number, row in enumerate(histogram, 1))
        counts = histogram_of(compiled.program, rows)
        if not counts:
            raise UserError("The histogram has no rows: give at least one.")
    return mean_step(compiled.program, loaded_machine, counts, micro_steps=micro_steps)


def _measured(
    compiled: CompiledProgram, model: str | None, *, allow_model_change: bool
) -> Mapping[Shape, int]:
    """Return how often each shape occurs among the first batches of rank 0."""
    from zeroir.runtime.data.training_data import RankOfData, TrainingData
    from zeroir.runtime.execution.batch import shape_of

    artifact, source = compiled.artifact, compiled.source
    if source is None and artifact.has_model_file:
        source = load_model(
            artifact, compiled.path, model=model, allow_model_change=allow_model_change
        )
    if source is None or source.batches is None:
        raise UserError(
            f"{artifact.model_path} has no batches() whose shapes could be measured: define it, or name a CSV file."
        )
    program = compiled.program
    rank = RankOfData(rank=0, world_size=program.mesh.world_size, seed=0)
    data = TrainingData(source.batches, rank)
    counts = Counter(shape_of(program, batch) for batch in data.first(MEASURED))
    if not counts:
        raise UserError("batches() yields no batch whose shape could be measured.")
    return counts
