"""Facts as a table of a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table with a row for each fact: its name, and what it says, whose lines remain apart."""
    rows = "".join(
        f"<tr><th style='text-align: left'>{escape(name)}</th>"
        f"<td style='text-align: left; white-space: pre-line'>{escape(fact)}</td></tr>"
        for name, fact in facts
    )
    return f"<table>{rows}</table>"
