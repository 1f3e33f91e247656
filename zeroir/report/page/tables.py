"""The tiles and tables of a page, of one program or of two; cells that differ contain both values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from typing import Final

from zeroir.ir.analysis.traffic import on_the_wire
from zeroir.ir.byte_sizes import format_bytes
from zeroir.report.costs import wire_label
from zeroir.report.diff import diff, summary
from zeroir.report.measured import MeasuredStep
from zeroir.report.names import counted, format_flops
from zeroir.report.page.facts import unit_facts
from zeroir.report.page.sides import LETTERS, Side
from zeroir.report.summary import counted_step
from zeroir.verify import PROVED
from zeroir.verify.laws import CODES

MOST_DIFF_LINES: Final = 400
"""The most lines of a diff on a page; `zeroir diff` prints all."""

MOST_BUFFERS: Final = 12
"""The most resized buffers on a page, those with the largest changes."""

NO_BREAK: Final = "\xa0"
"""The space between a number and its unit, without a line break."""

Rows = Mapping[str, Sequence[str]]
"""The rows of a table of one side: the other cells by the first one."""


def tiles(shown: Sequence[Side], measured: MeasuredStep | None) -> str:
    """Return the figures at the top of the page."""
    columns = [_figures(side) for side in shown]
    titles = dict.fromkeys(title for column in columns for title in column)
    parts = [
        _tile(title, [column.get(title, _TileText(text="none")) for column in columns])
        for title in titles
    ]
    if measured is not None:
        ratio = measured.step_ns / max(1, shown[0].reported.simulation.step_ns)
        figure = _TileText(
            text=format_time(measured.step_ns), note=f"{ratio:.3g} times the simulated one"
        )
        parts.insert(3, _tile("measured step", [figure]))
    return "".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TileText:
    """A figure of a program: its text, its explanation, and its number if a change of it is meaningful."""

    text: str
    note: str = ""
    number: float | None = None
    is_bad: bool = False


def _figures(side: Side) -> dict[str, _TileText]:
    reported = side.reported
    facts, simulation, budget_bytes = reported.summary, reported.simulation, reported.budget_bytes
    peak_bytes = side.curve.peak_bytes
    share = (
        "with workspaces"
        if budget_bytes is None
        else f"of {format_bytes(budget_bytes)}: {_percent(peak_bytes / budget_bytes)}"
    )
    exposed_ns = simulation.exposed_s * 1e9
    traffic = sum(on_the_wire(facts["collective_bytes"]).values())
    figures = {
        "program": _TileText(
            text=f"stage {facts['stage']}, {facts['precision']}",
            note=" × ".join(f"{name} {size}" for name, size in facts["mesh"].items()),
        ),
        "parameters": _TileText(
            text=f"{facts['parameters_numel']:,}",
            note=f"in {counted(len(facts['units']), 'unit')}",
            number=facts["parameters_numel"],
        ),
        "simulated step": _TileText(
            text=format_time(simulation.step_ns),
            note=f"on {simulation.machine}",
            number=simulation.step_ns,
        ),
        "exposed communication": _TileText(
            text=format_time(round(exposed_ns)),
            note=f"{_percent(exposed_ns / simulation.step_ns)} of the step"
            if simulation.step_ns
            else "",
            number=exposed_ns,
        ),
    }
    if any(facts["transfer_bytes"].values()):
        exposed_transfers_ns = simulation.exposed_transfers_s * 1e9
        figures["exposed transfers"] = _TileText(
            text=format_time(round(exposed_transfers_ns)), number=exposed_transfers_ns
        )
    return figures | {
        "MFU": _TileText(
            text=_percent(simulation.mfu), note="of the dense peak", number=simulation.mfu
        ),
        "peak memory": _TileText(
            text=format_bytes(peak_bytes),
            note=share,
            number=peak_bytes,
            is_bad=budget_bytes is not None and peak_bytes > budget_bytes,
        ),
        "on the wire": _TileText(
            text=format_bytes(traffic),
            note=f"full buffers, a {counted_step(facts)}",
            number=traffic,
        ),
    }


def _tile(title: str, figures: Sequence[_TileText]) -> str:
    old, new = figures[0], figures[-1]
    note = _versus([figure.note for figure in figures])
    if len(figures) > 1 and old.number and new.number is not None:
        note = _change(old.number, new.number)
    is_bad = any(figure.is_bad for figure in figures)
    return (
        f'<div class="tile{" bad" if is_bad else ""}{" pair" if len(figures) > 1 else ""}">'
        f"<span>{escape(title)}</span>"
        f"<b>{escape(_versus([figure.text.replace(' ', NO_BREAK) for figure in figures]))}</b>"
        f"<small>{escape(note)}</small></div>"
    )


def _change(old: float, new: float) -> str:
    if old == new:
        return "no change"
    if new >= 10 * old:
        return f"{new / old:,.0f} times as much"
    share = new / old - 1
    return f"{'+' if share > 0 else '−'}{_percent(abs(share))}"


def streams(shown: Sequence[Side], measured: MeasuredStep | None) -> str:
    """Return the working time of each stream; with a measured step also the mean measured time over ranks."""
    columns = []
    for side in shown:
        simulation = side.reported.simulation
        columns.append(
            {
                f"{result.label} · {stream}" if len(simulation.classes) > 1 else stream: [
                    format_time(round(busy_s * 1e9)),
                    _percent(busy_s * 1e9 / simulation.step_ns),
                ]
                for result in simulation.classes
                for stream, busy_s in result.busy_s.items()
                if simulation.step_ns
            }
        )
    table = merged(["stream", "#busy", "#of the step"], columns)
    return table if measured is None else table + _measured_kinds(shown[0], measured)


def _measured_kinds(side: Side, measured: MeasuredStep) -> str:
    """Return the time of the ops of each kind, simulated and measured (mean over ranks), sorted by difference."""
    ranks = len(measured.ranks)
    simulated_ns: Counter[str] = Counter()
    measured_ns: Counter[str] = Counter()
    for number, op in enumerate(side.ops):
        simulated_ns[op.kind] += op.spans[0].duration_ns
        measured_ns[op.kind] += round(sum(measured.durations_ns(number)) / ranks)
    kinds = sorted(measured_ns, key=lambda kind: -abs(measured_ns[kind] - simulated_ns[kind]))
    rows = [
        [
            kind,
            format_time(simulated_ns[kind]),
            format_time(measured_ns[kind]),
            f"{measured_ns[kind] / simulated_ns[kind]:.3g}" if simulated_ns[kind] else "",
        ]
        for kind in kinds
    ]
    return table(["ops", "#simulated", "#measured", "#ratio"], rows)


def units(shown: Sequence[Side]) -> str:
    """Return the units: their parameters, and what a step on one rank computes and communicates for them."""
    columns: list[Rows] = [
        {
            unit.name: [
                f"{unit.parameters_numel:,}",
                format_flops(unit.flops),
                format_bytes(unit.gathered_bytes),
                format_bytes(unit.reduced_bytes),
            ]
            for unit in unit_facts(side.reported.program, side.ops)
        }
        for side in shown
    ]
    return merged(["unit", "#parameters", "#computes", "#gathered", "#reduced"], columns)


def volume(shown: Sequence[Side]) -> str:
    """Return the bytes of collectives by axis of the mesh, and those that a rank sends over each link."""
    by_kind: list[Rows] = []
    by_wire: list[Rows] = []
    for side in shown:
        facts, simulation = side.reported.summary, side.reported.simulation
        by_kind.append(
            {
                f"{kind} over {axis}": [format_bytes(size)]
                for axis, axis_bytes in facts["collective_bytes_by_axis"].items()
                for kind, size in on_the_wire(axis_bytes).items()
                if size
            }
        )
        by_wire.append(
            {
                f"{wire_label(wire)}"
                + (f" · {result.label}" if len(simulation.classes) > 1 else ""): [
                    format_bytes(round(count))
                ]
                for result in simulation.classes
                for wire, count in result.bytes_by_wire.items()
            }
        )
    return merged(["collective", "#full buffers"], by_kind) + merged(
        ["link", "#sent by a rank"], by_wire
    )


def laws(shown: Sequence[Side]) -> str:
    """Return the laws and their verdicts."""
    rows = []
    codes = dict.fromkeys(code for side in shown for code in side.reported.report.laws)
    for code in codes:
        holders = [side for side in shown if code in side.reported.report.laws]
        verdicts = [side.reported.report.laws[code] for side in holders]
        mark = "proved" if set(verdicts) == {PROVED} else "broken"
        only = "" if len(holders) == len(shown) else f", only {holders[0].letter}"
        rows.append(
            f"<tr><td><code>{escape(code)}</code></td><td>{escape(CODES[code].title)}</td>"
            f'<td class="{mark}">{escape(_versus(verdicts) + only)}</td></tr>'
        )
    return f"<table><tr><th>law</th><th>rules out</th><th></th></tr>{''.join(rows)}</table>"


def passes(shown: Sequence[Side]) -> str:
    """Return the passes; those of only one of two programs are marked."""
    old, new = shown[0].reported.program.passes, shown[-1].reported.program.passes
    items: list[tuple[str, str]] = []
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            items += [("", spec) for spec in old[a:b]]
        else:
            items += [(LETTERS[0], spec) for spec in old[a:b]]
            items += [(LETTERS[1], spec) for spec in new[c:d]]
    return "".join(
        f'<li class="{"only" if letter else ""}">'
        f"{f'<b>only {letter}</b> ' if letter else ''}<code>{escape(spec)}</code></li>"
        for letter, spec in items
    )


def options(shown: Sequence[Side]) -> str:
    """Return the options of the compilations; for two programs those that differ come first."""
    columns: list[Rows] = [
        {name: [value] for name, value in side.reported.program.options.pairs} for side in shown
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    by_difference = sorted(
        names, key=lambda name: all(column.get(name) == columns[0].get(name) for column in columns)
    )
    return merged(["option", "value"], columns, order=by_difference)


def differences(old: Side, new: Side) -> str:
    """Return the results of ``zeroir diff``: different ops and buffers, the model states, and the programs' lines."""
    before, after = old.reported.program, new.reported.program
    facts = summary(before, after)
    keys = sorted({*facts.ops_added, *facts.ops_removed})
    ops = table(
        ["ops that differ", "#in A", "#in B"],
        [
            [key, f"{facts.ops_removed.get(key, 0):,}", f"{facts.ops_added.get(key, 0):,}"]
            for key in keys
        ]
        or [["none", "", ""]],
    )
    states = merged(
        ["model states", "#of a rank"],
        [
            {key: [format_bytes(size)] for key, size in of_side.items() if size}
            for of_side in (facts.old_model_state_bytes, facts.new_model_state_bytes)
        ],
    )
    resized = sorted(facts.buffers_resized, key=lambda item: -abs(item[2] - item[1]))
    removed, added = len(facts.buffers_removed), len(facts.buffers_added)
    rows = [
        [name, f"{format_bytes(before_bytes)} → {format_bytes(after_bytes)}"]
        for name, before_bytes, after_bytes in resized[:MOST_BUFFERS]
    ]
    if len(resized) > MOST_BUFFERS:
        rows.append([f"{len(resized) - MOST_BUFFERS:,} more", ""])
    buffers = table(
        ["buffers", "#size"],
        [["only in A", f"{removed:,}"], ["only in B", f"{added:,}"], *rows],
    )
    return f'<div class="tables"><div>{ops}</div><div>{states}</div><div>{buffers}</div></div>' + (
        _diff_lines(old, new)
    )


def _diff_lines(old: Side, new: Side) -> str:
    lines = diff(
        old.reported.program,
        new.reported.program,
        context=1,
        old_name=old.reported.name,
        new_name=new.reported.name,
    ).splitlines()
    if not lines:
        return "<p>The programs are equal.</p>"
    changed = sum(line.startswith(("+", "-")) for line in lines[2:])
    classes = {"+": "added", "-": "removed", "@": "hunk"}
    text = "\n".join(
        f'<span class="{classes[line[0]]}">{escape(line)}</span>'
        if line[:1] in classes
        else escape(line)
        for line in lines[:MOST_DIFF_LINES]
    )
    rest = len(lines) - MOST_DIFF_LINES
    more = f"\n… and {rest:,} more lines: zeroir diff" if rest > 0 else ""
    return (
        f"<details><summary>The lines that differ ({changed:,})</summary>"
        f'<pre tabindex="0">{text}{more}</pre></details>'
    )


def merged(
    heads: Sequence[str], columns: Sequence[Rows], *, order: Sequence[str] | None = None
) -> str:
    """Return a table of the rows of all sides by their first cells; cells that differ contain both values."""
    names = order or list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        holders = [number for number, column in enumerate(columns) if name in column]
        title = name if len(holders) == len(columns) else f"{name} · only {LETTERS[holders[0]]}"
        values = zip(*(columns[number][name] for number in holders), strict=True)
        rows.append([title, *(_versus(cells) for cells in values)])
    return table(heads, rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; a heading that begins with # is that of a column of numbers."""
    classes = ["number" if head.startswith("#") else "" for head in heads]
    top = "".join(
        f'<th class="{kind}">{escape(head.removeprefix("#"))}</th>'
        for head, kind in zip(heads, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}{" differs" if " → " in cell else ""}">{escape(cell)}</td>'
            for cell, kind in zip(row, classes, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _versus(texts: Sequence[str]) -> str:
    """Return the common text, or the first and the last one if they differ."""
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} → {texts[-1]}"


def format_time(count_ns: int) -> str:
    """Format nanoseconds in a suitable unit with three digits."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if count_ns >= size:
            count = count_ns / size
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
    return f"{count_ns} ns"


def _percent(share: float) -> str:
    return "< 0.1 %" if 0 < share < 0.001 else f"{100 * share:.3g} %"
