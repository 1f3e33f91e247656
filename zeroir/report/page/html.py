"""The report: one HTML file with its data and all code, which needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Final

from zeroir.cost.simulate import Simulation
from zeroir.ir.mesh import HOST
from zeroir.ir.program import Program
from zeroir.ir.traffic import on_the_wire
from zeroir.report.costs import wire_label
from zeroir.report.names import counted, format_bytes, format_flops
from zeroir.report.page import charts
from zeroir.report.page.facts import (
    MemoryCurve,
    StepOp,
    UnitFacts,
    memory_curve,
    step_ops,
    unit_facts,
)
from zeroir.report.summary import Summary, counted_step
from zeroir.verify import PROVED, Report
from zeroir.verify.explain import CODES

_ASSETS: Final = resources.files("zeroir.report.page")


def report_html(
    program: Program,
    report: Report,
    summary: Summary,
    simulation: Simulation,
    *,
    name: str,
    budget_bytes: int | None,
) -> str:
    """The page of a program that ``report`` verified, timed by ``simulation``.

    ``name`` is the name of the program on the page; ``budget_bytes`` is the device memory of a rank, drawn as a line.

    Raises:
        UserError: where bokeh is not installed.
    """
    charts.require_bokeh()
    shown_ops = step_ops(program, simulation)
    lanes = _lanes(program, simulation, shown_ops)
    curve = memory_curve(program)
    unit = charts.memory_unit(curve, budget_bytes)
    data = {
        "ops": _columns(shown_ops),
        "lanes": [{"class": number, "stream": stream} for number, stream, _ in lanes],
        "timeline": charts.timeline(shown_ops, lanes),
        "live": {"at": curve.at, "roles": list(curve.roles.values()), "unit_bytes": unit[0]},
        "memory": charts.memory(
            curve, unit=unit, budget_bytes=budget_bytes, ops_count=len(shown_ops)
        ),
    }
    slots = {
        "name": escape(name),
        "style": _asset("page.css"),
        "head": _headline(summary, simulation, curve, budget_bytes),
        "kinds": _legend({kind: charts.KIND_COLOURS[kind] for kind in _present(shown_ops)})
        + _legend({"critical path": charts.CRITICAL_COLOUR}),
        "roles": _legend({role: charts.ROLE_COLOURS[role] for role in curve.roles}),
        "streams": _streams(simulation),
        "units": _units(unit_facts(program, shown_ops)),
        "volume": _volume(summary, simulation),
        "laws": _laws(report),
        "options": _options(program),
        "passes": "".join(f"<li><code>{escape(spec)}</code></li>" for spec in program.passes),
        "data": _json(data),
        "library": charts.script(),
        "code": _asset("detail.js") + _asset("page.js"),
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
    """JSON that cannot end the script element of the page."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _lanes(
    program: Program, simulation: Simulation, shown_ops: Sequence[StepOp]
) -> list[tuple[int, str, str]]:
    """A lane for every stream of every class of ranks with an op of some duration."""
    busy = {
        (number, op.stream)
        for op in shown_ops
        for number, span in enumerate(op.spans)
        if span.duration_ns
    }
    streams = [HOST, *(stream.name for stream in program.streams)]
    return [
        (number, stream, f"{result.label} · {stream}" if len(simulation.classes) > 1 else stream)
        for number, result in enumerate(simulation.classes)
        for stream in streams
        if (number, stream) in busy
    ]


def _columns(shown_ops: Sequence[StepOp]) -> dict[str, list[object]]:
    return {
        "section": [op.section for op in shown_ops],
        "line": [op.index for op in shown_ops],
        "op": [op.op for op in shown_ops],
        "kind": [op.kind for op in shown_ops],
        "stream": [op.stream for op in shown_ops],
        "unit": [", ".join(op.units) for op in shown_ops],
        "what": [op.detail for op in shown_ops],
        "source": [op.source for op in shown_ops],
        "bytes": [op.size_bytes for op in shown_ops],
        "flops": [op.flops for op in shown_ops],
        "used": [op.used_bytes for op in shown_ops],
        "start": [[span.start_ns / 1000 for span in op.spans] for op in shown_ops],
        "end": [[span.end_ns / 1000 for span in op.spans] for op in shown_ops],
        "critical": [[int(is_critical) for is_critical in op.is_critical] for op in shown_ops],
    }


def _present(shown_ops: Sequence[StepOp]) -> list[str]:
    present = {op.kind for op in shown_ops}
    return [kind for kind in charts.KIND_COLOURS if kind in present]


def _headline(
    summary: Summary, simulation: Simulation, curve: MemoryCurve, budget_bytes: int | None
) -> str:
    mesh = " × ".join(f"{name} {size}" for name, size in summary["mesh"].items())
    share = (
        ""
        if budget_bytes is None
        else f"of {format_bytes(budget_bytes)}: {_percent(curve.peak_bytes / budget_bytes)}"
    )
    is_over = budget_bytes is not None and curve.peak_bytes > budget_bytes
    traffic = sum(on_the_wire(summary["collective_bytes"]).values())
    tiles = [
        ("program", f"stage {summary['stage']}, {summary['precision']}", mesh, False),
        (
            "parameters",
            f"{summary['parameters_numel']:,}",
            f"in {counted(len(summary['units']), 'unit')}",
            False,
        ),
        ("simulated step", _time(simulation.step_ns), f"on {simulation.machine}", False),
        (
            "exposed communication",
            _time(round(simulation.exposed_s * 1e9)),
            f"{_percent(simulation.exposed_s * 1e9 / simulation.step_ns)} of the step"
            if simulation.step_ns
            else "",
            False,
        ),
        *(
            [("exposed transfers", _time(round(simulation.exposed_transfers_s * 1e9)), "", False)]
            if any(summary["transfer_bytes"].values())
            else []
        ),
        ("MFU", _percent(simulation.mfu), "of the dense peak", False),
        ("peak memory", format_bytes(curve.peak_bytes), share or "with workspaces", is_over),
        (
            "on the wire",
            format_bytes(traffic),
            f"full buffers, a {counted_step(summary)}",
            False,
        ),
    ]
    return "".join(
        f'<div class="tile{" bad" if is_bad else ""}"><span>{escape(title)}</span>'
        f"<b>{escape(value)}</b><small>{escape(note)}</small></div>"
        for title, value, note, is_bad in tiles
    )


def _legend(colours: Mapping[str, str]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name.replace("_", " "))}</span>'
        for name, colour in colours.items()
    )


def _streams(simulation: Simulation) -> str:
    rows = [
        [
            result.label,
            stream,
            _time(round(busy_s * 1e9)),
            _percent(busy_s * 1e9 / simulation.step_ns),
        ]
        for result in simulation.classes
        for stream, busy_s in result.busy_s.items()
        if simulation.step_ns
    ]
    return _table(["ranks", "stream", "#busy", "#of the step"], rows)


def _units(units: Sequence[UnitFacts]) -> str:
    rows = [
        [
            unit.name,
            f"{unit.parameters_numel:,}",
            format_flops(unit.flops),
            format_bytes(unit.gathered_bytes),
            format_bytes(unit.reduced_bytes),
        ]
        for unit in units
    ]
    return _table(["unit", "#parameters", "#computes", "#gathered", "#reduced"], rows)


def _volume(summary: Summary, simulation: Simulation) -> str:
    axes = [
        (axis, on_the_wire(axis_bytes))
        for axis, axis_bytes in summary["collective_bytes_by_axis"].items()
    ]
    rows = [
        [kind, *(format_bytes(sent.get(kind, 0)) for _, sent in axes)]
        for kind, count in summary["collective_bytes"].items()
        if count
    ]
    by_kind = _table(["collective", *(f"#over {axis}" for axis, _ in axes)], rows)
    wires = [
        [result.label, wire_label(wire), format_bytes(round(count))]
        for result in simulation.classes
        for wire, count in result.bytes_by_wire.items()
    ]
    return by_kind + _table(["ranks", "link", "#sent by a rank"], wires)


def _laws(report: Report) -> str:
    rows = []
    for code, verdict in report.laws.items():
        mark = "proved" if verdict == PROVED else "broken"
        rows.append(
            f"<tr><td><code>{escape(code)}</code></td><td>{escape(CODES[code].title)}</td>"
            f'<td class="{mark}">{escape(verdict)}</td></tr>'
        )
    return f"<table><tr><th>law</th><th>rules out</th><th></th></tr>{''.join(rows)}</table>"


def _options(program: Program) -> str:
    return _table(["option", "value"], [[name, value] for name, value in program.options])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a head that begins with # heads a column of numbers."""
    classes = [' class="number"' if head.startswith("#") else "" for head in heads]
    top = "".join(
        f"<th{kind}>{escape(head.removeprefix('#'))}</th>"
        for head, kind in zip(heads, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _time(count_ns: int) -> str:
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if count_ns >= size:
            return f"{count_ns / size:.3g} {unit}"
    return f"{count_ns} ns"


def _percent(share: float) -> str:
    return "< 0.1 %" if 0 < share < 0.001 else f"{100 * share:.3g} %"
