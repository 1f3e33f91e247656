"""The two charts of the page as JSON of Bokeh: the streams over time, and memory over the ops of the step.

They are empty: after each pan and zoom, the script of the page fills them with the items that are visible at their
width. Bokeh draws on a canvas, redraws marks in a layer of their own, and its script can be part of a page that opens
without a network. Only this module imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from zeroir.errors import UserError
from zeroir.report.page.facts import MemoryCurve, StepOp

if TYPE_CHECKING:
    from bokeh.plotting import figure

LANE_HEIGHT_PX: Final = 30
KIND_COLOURS: Final = {
    "compute": "#3f9f63",
    "gather": "#3b82c4",
    "reduce": "#9b5fc0",
    "update": "#d98032",
    "transfer": "#2aa198",
    "memory": "#8b8f98",
    "wait": "#b0b4bc",
}
"""Readable on white and on a dark background."""

CRITICAL_COLOUR: Final = "#d03a3a"

ROLE_COLOURS: Final = {
    "param": "#3b82c4",
    "master": "#27568a",
    "grad": "#9b5fc0",
    "state": "#d98032",
    "gathered": "#6fb1e8",
    "activation": "#7cc08f",
    "saved": "#3f9f63",
    "input": "#c9b458",
    "output": "#6f9bd1",
    "scalar": "#a08f80",
    "module_buffer": "#8a7f2e",
    "constant": "#b5a99a",
    "rng": "#cf6679",
    "staging": "#2aa198",
    "workspace": "#c4566e",
    "snapshot": "#5f7c8a",
    "page": "#e0a458",
}


def require_bokeh() -> None:
    """UserError where Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError(
            "A report is drawn by bokeh, which is not installed: pip install 'zeroir[report]'."
        ) from None


def script() -> str:
    """The code of Bokeh, for the page."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def timeline(
    step_ops: Sequence[StepOp], lanes: Sequence[tuple[int, str, str]]
) -> dict[str, object]:
    """The streams over simulated time; ``lanes`` are a class of ranks, a stream and a label each, from the top."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, FixedTicker
    from bokeh.models.annotations import BoxAnnotation

    end_us = max((span.end_ns for op in step_ops for span in op.spans), default=0) / 1000
    chart = _chart(
        "timeline",
        height_px=LANE_HEIGHT_PX * len(lanes) + 70,
        x_end=end_us,
        y_range=(-len(lanes) + 0.4, 0.6),
        x_label="simulated time, µs",
    )
    for name, colour in (("spans", "colour"), ("critical", None)):
        columns = ("left", "right", "top", "bottom", *((colour, "alpha") if colour else ()))
        chart.quad(
            left="left",
            right="right",
            top="top",
            bottom="bottom",
            fill_color=colour or CRITICAL_COLOUR,
            fill_alpha="alpha" if colour else 1.0,
            line_color=None,
            source=ColumnDataSource({column: [] for column in columns}, name=name),
        )
    chart.yaxis.ticker = FixedTicker(ticks=[-number for number in range(len(lanes))])
    chart.yaxis.major_label_overrides = {
        -number: label for number, (_, _, label) in enumerate(lanes)
    }
    chart.ygrid.visible = False
    chart.add_layout(BoxAnnotation(name="time-mark", level="overlay", visible=False))
    return dict(json_item(chart))


def memory(
    curve: MemoryCurve, *, unit: tuple[float, str], budget_bytes: int | None, ops_count: int
) -> dict[str, object]:
    """Memory over the ops of a step, stacked by role, in the unit of ``memory_unit``, with the budget as a line."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource
    from bokeh.models.annotations import BoxAnnotation, Label, Span

    unit_bytes, name = unit
    top = _top(curve, budget_bytes)
    chart = _chart(
        "memory",
        height_px=320,
        x_end=ops_count,
        y_range=(0, 1.08 * top / unit_bytes or 1),
        x_label="op of the step, in program order",
    )
    chart.yaxis.axis_label = f"{name} on one rank"
    bounds = [
        f"{bound}_{number}" for number in range(len(curve.roles)) for bound in ("low", "high")
    ]
    # One point, because Bokeh never finishes a band without points.
    source = ColumnDataSource({name: [0, 0] for name in ("at", *bounds)}, name="live")
    for number, role in enumerate(curve.roles):
        chart.varea_step(
            x="at",
            y1=f"low_{number}",
            y2=f"high_{number}",
            step_mode="after",
            fill_color=ROLE_COLOURS[role],
            fill_alpha=0.85,
            source=source,
        )
    for at, section in curve.joints:
        chart.add_layout(Span(location=at, dimension="height", line_dash="dotted", name="joint"))
        chart.add_layout(
            Label(
                x=at,
                y=1.075 * top / unit_bytes,
                text=f" {section} ",
                text_align="right" if at > 0.85 * ops_count else "left",
                text_baseline="top",
                text_font_size="11px",
                name="joint-label",
            )
        )
    if budget_bytes is not None and budget_bytes <= top:
        chart.add_layout(
            Span(
                location=budget_bytes / unit_bytes,
                dimension="width",
                line_color="#d03a3a",
                line_width=2,
                line_dash="dashed",
                name="budget",
            )
        )
    chart.add_layout(BoxAnnotation(name="memory-mark", level="overlay", visible=False))
    return dict(json_item(chart))


def _chart(
    name: str, *, height_px: int, x_end: float, y_range: tuple[float, float], x_label: str
) -> figure:
    """A chart that pans and zooms from 0 to ``x_end``, with full numbers on the axis and the background of the page."""
    from bokeh.models import NumeralTickFormatter, Range1d
    from bokeh.plotting import figure

    chart = figure(
        name=name,
        height=height_px,
        sizing_mode="stretch_width",
        x_range=Range1d(start=-0.01 * x_end, end=1.01 * x_end),
        y_range=Range1d(start=y_range[0], end=y_range[1]),
        x_axis_label=x_label,
        tools="xpan,xwheel_zoom,xbox_zoom,reset",
        active_drag="xpan",
        active_scroll="xwheel_zoom",
    )
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    chart.background_fill_color = None
    chart.border_fill_color = None
    chart.outline_line_color = None
    chart.toolbar.logo = None
    return chart


def memory_unit(curve: MemoryCurve, budget_bytes: int | None) -> tuple[float, str]:
    """Bytes and name of the unit of the memory chart."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if _top(curve, budget_bytes) >= size:
            return size, name
    return 1.0, "B"


def _top(curve: MemoryCurve, budget_bytes: int | None) -> int:
    """The highest value of the chart, which includes the budget where it is at most four times the peak."""
    is_near = budget_bytes is not None and budget_bytes <= 4 * curve.peak_bytes
    return max(curve.peak_bytes, budget_bytes if budget_bytes is not None and is_near else 0)
