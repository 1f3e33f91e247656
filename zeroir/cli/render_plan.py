"""A plan as tables for the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeroir.api.search.candidates import Candidate
from zeroir.api.search.largest_batches import LargestBatches
from zeroir.api.search.plan import Plan
from zeroir.api.search.search_space import words
from zeroir.config.shapes import values_text
from zeroir.ir.byte_sizes import format_bytes
from zeroir.report.costs import format_seconds, measured_counts
from zeroir.report.mean_step import mean_text
from zeroir.report.names import counted
from zeroir.report.tables import Lines, columns_table, facts_table

_SHOWN: int = 12


def render_plan(plan: Plan, *, is_unfolded: bool = False) -> RenderableType:
    """Render the chosen options, the lower bound, and the closest alternatives; all of them if ``is_unfolded``."""
    chosen = plan.chosen
    grid = facts_table()
    grid.add_row("machine", f"{plan.machine}, {counted(plan.world_size, 'rank')}")
    grid.add_row("memory", f"{format_bytes(plan.budget_bytes)} a rank")
    found = plan.largest_batches
    if found is not None:
        grid.add_row("fits", str(found))
        grid.add_row("shapes", plan.compiled.options.shapes)
    if plan.at:
        grid.add_row("batches", values_text(plan.at))
    ended = "" if plan.is_finished else ", the allowed number"
    grid.add_row("tried", f"{plan.tried:,} of {counted(plan.choices, 'choice')}{ended}")
    grid.add_row("chosen", words(chosen.settings))
    step_s = (chosen.step_ns or 0) / 1e9
    grid.add_row("step", f"{format_seconds(step_s)}, {_bounded(chosen)}")
    if plan.mean is not None:
        grid.add_row("mean step", mean_text(plan.mean))
    if chosen.measured is not None and (chosen.measured.segments or chosen.measured.collectives):
        grid.add_row("measured", measured_counts(chosen.measured))
    grid.add_row("needs", f"{format_bytes(chosen.needed_bytes)}, most {chosen.culprit}")
    grid.add_row(
        "no choice below",
        f"{format_seconds(plan.bound_ns / 1e9)} ({plan.bound_ns / 1e9 / step_s:.0%} of the step): "
        "the segments alone, or the bytes alone",
    )
    table = columns_table(
        *("options", "step", "memory", "why"), figures=("step", "memory"), title="what lost"
    )
    shown = plan.alternatives if is_unfolded else plan.alternatives[:_SHOWN]
    for alternative in shown:
        candidate = alternative.candidate
        table.add_row(
            words(candidate.settings),
            "-" if candidate.step_ns is None else format_seconds(candidate.step_ns / 1e9),
            format_bytes(candidate.needed_bytes),
            alternative.why,
        )
    parts: list[RenderableType] = [Lines(table=grid, is_foldable=True)]
    if found is not None:
        parts.append(Lines(table=_limits_table(found), is_foldable=True))
    if shown:
        parts.append(Lines(table=table, is_foldable=True))
    rest = len(plan.alternatives) - len(shown)
    if rest:
        parts.append(Text(f"… and {rest:,} more: --all prints them."))
    return Group(*parts)


def _limits_table(found: LargestBatches) -> Table:
    dims = tuple(found.limits[0].sizes)
    figures = (*dims, "product", "memory")
    table = columns_table(*figures, figures=figures, title="batches of at most")
    for limit in found.limits:
        sizes = [f"{size:,}" for size in limit.sizes.values()]
        table.add_row(*sizes, f"{limit.elements:,}", format_bytes(limit.needed_bytes))
    return table


def plan_json(plan: Plan) -> dict[str, object]:
    """Return all of a plan except its program."""
    return {
        "machine": plan.machine,
        "world_size": plan.world_size,
        "at": dict(plan.at),
        "mean": None if plan.mean is None else asdict(plan.mean),
        "largest_batches": None if plan.largest_batches is None else asdict(plan.largest_batches),
        "memory_bytes": plan.budget_bytes,
        "tried": plan.tried,
        "choices": plan.choices,
        "is_finished": plan.is_finished,
        "bound_seconds": plan.bound_ns / 1e9,
        "chosen": _candidate_json(plan.chosen),
        "options": plan.compiled.options.flat,
        "alternatives": [
            {**_candidate_json(alternative.candidate), "why": alternative.why}
            for alternative in plan.alternatives
        ],
    }


def _candidate_json(candidate: Candidate) -> dict[str, object]:
    return {
        "settings": dict(candidate.settings),
        "needed_bytes": candidate.needed_bytes,
        "fullest": candidate.culprit,
        "step_seconds": None if candidate.step_ns is None else candidate.step_ns / 1e9,
        "exposed_communication_seconds": candidate.exposed_ns / 1e9,
        "critical_path": dict(candidate.bounded_by),
        "measured": None if candidate.measured is None else asdict(candidate.measured),
    }


def _bounded(candidate: Candidate) -> str:
    what, share = candidate.bounded_by[0]
    return f"bound by {what} ({share:.0%} of it)"
