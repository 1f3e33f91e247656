"""The report: one HTML file with its data and all code, which needs no network."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Final

from zeroir.ir.byte_sizes import format_bytes
from zeroir.report.measured import MeasuredStep
from zeroir.report.page import charts, tables
from zeroir.report.page.data import MOST_RANKS, lanes_of, page_data
from zeroir.report.page.sides import ReportedProgram, Side, sides

_ASSETS: Final = resources.files("zeroir.report.page")
_SCRIPTS: Final = ("detail.js", "model.js", "table.js", "marks.js", "charts.js", "page.js")


def report_html(
    program: ReportedProgram,
    other: ReportedProgram | None = None,
    *,
    measured: MeasuredStep | None = None,
) -> str:
    """Return the page of a program; with ``other``, of both for comparison, with ``measured``, of a measured step, too.

    ``measured`` has as many micro-steps as the simulation of the program.

    Raises:
        UserError: if bokeh is not installed.
        ValueError: for two programs and a measured step.
    """
    if other is not None and measured is not None:
        raise ValueError("A measured step is shown over one program.")
    charts.require_bokeh()
    shown = sides([program] if other is None else [program, other])
    lanes = lanes_of(shown, measured)
    is_compared = other is not None
    slots = {
        "name": escape(" → ".join(side.reported.name for side in shown)),
        "title": _title(shown),
        "style": _asset("page.css"),
        "head": tables.tiles(shown, measured),
        "kinds": _kinds(shown),
        "ranks": "" if measured is None else _ranks(measured),
        "roles": _roles(shown),
        "changes": '<label class="key"><input type="checkbox" id="changes"> only ops that differ</label>'
        if is_compared
        else "",
        "memories": "".join(
            f'<div class="plot" id="memory-{number}" tabindex="0" role="application" aria-describedby="keys" '
            f'aria-label="Memory{" of " + side.letter if side.letter else ""} over the step"></div>'
            for number, side in enumerate(shown)
        ),
        "differences": ""
        if other is None
        else f"<section><h2>Differences</h2>{tables.differences(*shown)}</section>",
        "streams": tables.streams(shown, measured),
        "units": tables.units(shown),
        "volume": tables.volume(shown),
        "laws": tables.laws(shown),
        "options": tables.options(shown),
        "passes": tables.passes(shown),
        "data": _json(page_data(shown, lanes, measured)),
        "library": charts.script(),
        "code": "".join(_asset(name) for name in _SCRIPTS),
    }
    page = _asset("page.html")
    parts = page.split("<!--slot:")
    return parts[0] + "".join(_filled(part, slots) for part in parts[1:])


def _filled(part: str, slots: Mapping[str, str]) -> str:
    slot, _, rest = part.partition("-->")
    return slots[slot] + rest


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """Return JSON that cannot close the script element of the page."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _title(shown: Sequence[Side]) -> str:
    return " ".join(
        f"{f'<i>{side.letter}</i> ' if side.letter else ''}{escape(side.reported.name)}"
        for side in shown
    )


def _kinds(shown: Sequence[Side]) -> str:
    """Return the legend of the timeline, whose boxes show and hide kinds of ops."""
    present: Collection[str] = {op.kind for side in shown for op in side.ops}
    boxes = "".join(
        f'<label class="key"><input type="checkbox" value="{kind}"'
        f"{'' if kind in charts.HIDDEN_KINDS else ' checked'}>"
        f'<i style="background:{colour}"></i>{kind}</label>'
        for kind, colour in charts.KIND_COLOURS.items()
        if kind in present
    )
    return boxes + _key("critical path", charts.CRITICAL_COLOUR)


def _roles(shown: Sequence[Side]) -> str:
    """Return the legend of the memory charts: roles, and the budgets that are drawn."""
    present = {role for side in shown for role in side.curve.roles}
    keys = [
        _key(role.value.replace("_", " "), colour)
        for role, colour in charts.ROLE_COLOURS.items()
        if role.value in present
    ]
    budgets = {side.reported.budget_bytes for side in shown}
    top_bytes = max(charts.top_bytes(side.curve, side.reported.budget_bytes) for side in shown)
    drawn = sorted(budget for budget in budgets if budget is not None and budget <= top_bytes)
    if drawn:
        amounts = " and ".join(format_bytes(budget) for budget in drawn)
        keys.append(_key(f"budget of {amounts}", charts.CRITICAL_COLOUR))
    return "".join(keys)


def _key(name: str, colour: str) -> str:
    return f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'


def _ranks(measured: MeasuredStep) -> str:
    """Return the controls for the measured rank, and for stretching the simulated step to the measured one."""
    options = "".join(
        f'<option value="{rank}">rank {rank}</option>'
        for rank in range(min(MOST_RANKS, len(measured.ranks)))
    )
    return (
        f'<label>measured on <select id="rank">{options}</select></label> '
        '<label class="key"><input type="checkbox" id="stretch"> stretch the simulated step to the measured one</label>'
    )
