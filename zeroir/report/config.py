"""The options that a configuration file set, and their origins."""

from __future__ import annotations

from io import StringIO
from typing import TypedDict

from rich.console import Console, Group, RenderableType
from rich.text import Text

from zeroir.artifact import Artifact, ConfigRecord
from zeroir.ir.program import Program
from zeroir.report.tables import UNBOUNDED_WIDTH, Lines, columns_table


class ResolvedOption(TypedDict):
    """An option that does not simply have its default, as a string, and the place that set it."""

    value: str
    origin: str


class ConfigFacts(TypedDict, total=False):
    """The facts about a configuration; ``config`` is left out if there was no file."""

    config: str
    options: dict[str, ResolvedOption]
    notes: list[str]


def config_json(artifact: Artifact) -> ConfigFacts:
    """Return the configuration of a program as plain data."""
    record = artifact.config
    if record is None:
        return {}
    values = artifact.scheduled.options.texts
    return {
        "config": record.name,
        "options": {
            option: {"value": values.get(option, "none"), "origin": origin}
            for option, origin in record.origins
        },
        "notes": list(record.notes),
    }


def config_text(artifact: Artifact) -> str:
    """Return the configuration of a program as text without colours or wrapped lines; empty if there is none."""
    if artifact.config is None:
        return ""
    sink = StringIO()
    console = Console(file=sink, width=UNBOUNDED_WIDTH, no_color=True, highlight=False)
    console.print(render_config(artifact.config, artifact.scheduled))
    return sink.getvalue()


def render_config(record: ConfigRecord, program: Program) -> RenderableType:
    """Render a line per option with its name, its value and the place that set it, followed by the notes."""
    table = columns_table("option", "value", "from")
    texts = program.options.texts
    for option, origin in record.origins:
        table.add_row(option, texts.get(option, "none"), origin)
    notes = [Text(note) for note in record.notes]
    title = Text(f"Options with {record.name}", style="bold")
    return Group(title, Lines(table=table, is_foldable=False), *notes, Text())
