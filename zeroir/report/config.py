"""The options that a configuration file set, and where each comes from."""

from __future__ import annotations

from typing import TypedDict

from rich.console import Group, RenderableType
from rich.text import Text

from zeroir.artifact import Artifact, ConfigRecord
from zeroir.ir.program import Program
from zeroir.report.tables import Lines, columns_table


class ResolvedOption(TypedDict):
    """An option that is not simply a default, as text, and the place that set it."""

    value: str
    origin: str


class ConfigFacts(TypedDict, total=False):
    """``config`` is left out where there was no file."""

    config: str
    options: dict[str, ResolvedOption]
    notes: list[str]


def config_json(artifact: Artifact) -> ConfigFacts:
    """The configuration of a program as plain data."""
    record = artifact.config
    if record is None:
        return {}
    values = artifact.scheduled.option
    return {
        "config": record.name,
        "options": {
            option: {"value": values.get(option, "none"), "origin": origin}
            for option, origin in record.origins
        },
        "notes": list(record.notes),
    }


def render_config(record: ConfigRecord, program: Program) -> RenderableType:
    """A line per option: its name, its value, the place that set it; then the notes."""
    table = columns_table("option", "value", "from")
    for option, origin in record.origins:
        table.add_row(option, program.option.get(option, "none"), origin)
    notes = [Text(note) for note in record.notes]
    title = Text(f"Options with {record.name}", style="bold")
    return Group(title, Lines(table=table, is_foldable=False), *notes, Text())
