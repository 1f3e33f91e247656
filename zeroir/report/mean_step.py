"""The mean step of batches of many shapes, as tables for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType

from zeroir.cost.histogram import MeanStep
from zeroir.ir.byte_sizes import format_bytes
from zeroir.report.costs import format_seconds
from zeroir.report.names import counted
from zeroir.report.tables import Lines, columns_table, facts_table

_SHOWN: Final = 10


def mean_text(mean: MeanStep) -> str:
    """Return a mean step as a line: ``1.2 s over 100 batches of 3 shapes, of which a rank waits 0.1 s for …``."""
    batches = counted(mean.batches, "batch", "batches")
    return (
        f"{format_seconds(mean.mean_s)} over {batches} of {counted(len(mean.shapes), 'shape')}, of which a rank waits "
        f"{format_seconds(mean.wait_s)} for slower ones"
    )


def render_mean_step(mean: MeanStep) -> RenderableType:
    """Render the mean step, its wait, what padding would cost, the memory, and the most frequent shapes."""
    grid = facts_table()
    grid.add_row("machine", f"{mean.machine}, {counted(mean.world_size, 'rank')}")
    shapes = counted(len(mean.shapes), "shape")
    grid.add_row("batches", f"{mean.batches:,} of {shapes}{_interpolated(mean)}")
    steps = counted(mean.micro_steps, "micro-step")
    grid.add_row("mean step", f"{format_seconds(mean.mean_s)} ({steps})")
    share = mean.wait_s / mean.mean_s if mean.mean_s else 0.0
    wait = f"{format_seconds(mean.wait_s)} ({share:.1%}), the mean of a rank for slower ones"
    grid.add_row("waiting", wait)
    grid.add_row("padded", f"{format_seconds(mean.padded_s)}, if all batches were the largest")
    grid.add_row("memory", f"{format_bytes(mean.peak_bytes)} a rank, for the largest batches")
    dims = tuple(mean.shapes[0].values)
    figures = (*dims, "batches", "step")
    table = columns_table(*figures, figures=figures, title="most frequent shapes, on all ranks")
    frequent = sorted(mean.shapes, key=lambda shape: (-shape.share, tuple(shape.values.values())))
    for shape in frequent[:_SHOWN]:
        sizes = [f"{value:,}" for value in shape.values.values()]
        table.add_row(*sizes, f"{shape.share:.1%}", format_seconds(shape.step_s))
    rest = frequent[_SHOWN:]
    if rest:
        share = sum(shape.share for shape in rest)
        table.add_row(*["others"], *[""] * (len(dims) - 1), f"{share:.1%}", "")
    return Group(*(Lines(table=each, is_foldable=True) for each in (grid, table)))


def _interpolated(mean: MeanStep) -> str:
    if mean.simulated == len(mean.shapes):
        return ""
    return f", of which {mean.simulated} were simulated and the others interpolated"
