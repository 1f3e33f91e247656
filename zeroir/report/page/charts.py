"""The charts of the page as Bokeh's JSON: the streams over time, and the memory of each program.

They are empty: after each pan and zoom, the script of the page fills them with the items that are visible at their
width. Bokeh draws on a canvas, redraws marks in a separate layer, and its script can be embedded in a page that opens
without a network. Only this module imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.report.page.facts import MemoryCurve, ShownKind

if TYPE_CHECKING:
    from bokeh.plotting import figure

LANE_HEIGHT_PX: Final = 30
MEMORY_HEIGHT_PX: Final = 300
KIND_COLOURS: Final = {
    ShownKind.FORWARD: "#4fae76",
    ShownKind.BACKWARD: "#23714a",
    ShownKind.RECOMPUTED: "#a5d3ae",
    ShownKind.GATHER: "#3b82c4",
    ShownKind.REDUCE: "#9b5fc0",
    ShownKind.UPDATE: "#d98032",
    ShownKind.TRANSFER: "#2aa198",
    ShownKind.ELEMENTWISE: "#8b8f98",
    ShownKind.MEMORY: "#a89984",
    ShownKind.WAIT: "#b0b4bc",
}
"""The colours of kinds, readable on white and on dark; the three kinds of computes are shades of one colour."""

HIDDEN_KINDS: Final = frozenset({ShownKind.MEMORY, ShownKind.WAIT})
"""Kinds that the page shows only on request."""

CRITICAL_COLOUR: Final = "#d03a3a"

ROLE_COLOURS: Final = {
    Role.PARAM: "#3b82c4",
    Role.MASTER: "#27568a",
    Role.GRAD: "#9b5fc0",
    Role.STATE: "#d98032",
    Role.GATHERED: "#6fb1e8",
    Role.ACTIVATION: "#7cc08f",
    Role.SAVED: "#3f9f63",
    Role.INPUT: "#c9b458",
    Role.OUTPUT: "#6f9bd1",
    Role.SCALAR: "#a08f80",
    Role.MODULE_BUFFER: "#8a7f2e",
    Role.CONSTANT: "#b5a99a",
    Role.RNG: "#cf6679",
    Role.STAGING: "#2aa198",
    Role.WORKSPACE: "#c4566e",
    Role.SNAPSHOT: "#5f7c8a",
    Role.PAGE: "#e0a458",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUnit:
    """The unit of an axis: its size in the unit of the data (µs or bytes), and its name."""

    size: float
    name: str


def time_scale(end_us: float) -> AxisUnit:
    """Return the unit of a time axis that ends at ``end_us``."""
    for size, name in ((1e6, "s"), (1e3, "ms")):
        if end_us >= 10 * size:
            return AxisUnit(size=size, name=name)
    return AxisUnit(size=1, name="µs")


def memory_scale(top_bytes: int) -> AxisUnit:
    """Return the unit of a memory axis that ends at ``top_bytes``."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if top_bytes >= size:
            return AxisUnit(size=size, name=name)
    return AxisUnit(size=1, name="B")


def top_bytes(curve: MemoryCurve, budget_bytes: int | None) -> int:
    """Return the highest value of a memory chart, including the budget if it is at most four times the peak."""
    is_near = budget_bytes is not None and budget_bytes <= 4 * curve.peak_bytes
    return max(curve.peak_bytes, budget_bytes if budget_bytes is not None and is_near else 0)


def require_bokeh() -> None:
    """Raise a UserError if Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError(
            "A report is drawn by bokeh, which is not installed: pip install 'zeroir[report]'."
        ) from None


def script() -> str:
    """Return Bokeh's code to embed in the page."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def timeline(
    labels: Sequence[str], groups: Sequence[int], *, marks: int, end_us: float, scale: AxisUnit
) -> dict[str, object]:
    """Draw the streams over time, with a lane for each label from the top; lanes of one group share a background.

    An op has at most ``marks`` bars, each of which can be marked.
    """
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, FixedTicker
    from bokeh.models.annotations import BoxAnnotation

    chart = _chart(
        "timeline",
        height_px=LANE_HEIGHT_PX * len(labels) + 70,
        x_end=end_us,
        y_range=(-len(labels) + 0.4, 0.6),
        scale=scale,
    )
    for number, group in enumerate(groups):
        if group % 2 and len(set(groups)) < len(groups):
            chart.add_layout(
                BoxAnnotation(
                    top=0.5 - number,
                    bottom=-0.5 - number,
                    level="image",
                    line_color=None,
                    name="band",
                )
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
    chart.text(
        x="x",
        y="y",
        text="text",
        text_color="ink",
        text_font_size="11px",
        text_baseline="middle",
        x_offset=4,
        source=ColumnDataSource({"x": [], "y": [], "text": [], "ink": []}, name="words"),
    )
    chart.yaxis.ticker = FixedTicker(ticks=[-number for number in range(len(labels))])
    chart.yaxis.major_label_overrides = {-number: label for number, label in enumerate(labels)}
    chart.ygrid.visible = False
    for _ in range(marks):
        chart.add_layout(BoxAnnotation(name="mark", level="overlay", visible=False))
    return dict(json_item(chart))


def memory(
    curve: MemoryCurve,
    *,
    title: str,
    scale: AxisUnit,
    top: int,
    budget_bytes: int | None,
    end_us: float,
    x_scale: AxisUnit,
) -> dict[str, object]:
    """Draw memory over the timeline's axis, stacked by role, from 0 to ``top`` bytes, with a line for the budget."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource
    from bokeh.models.annotations import BoxAnnotation, Label, Span

    chart = _chart(
        "memory",
        height_px=MEMORY_HEIGHT_PX,
        x_end=end_us,
        y_range=(0, 1.08 * top / scale.size or 1),
        scale=x_scale,
    )
    chart.yaxis.axis_label = f"{title}, {scale.name}" if title else scale.name
    bounds = [
        f"{bound}_{number}" for number in range(len(curve.roles)) for bound in ("low", "high")
    ]
    # One point, because Bokeh never finishes drawing an area without points.
    source = ColumnDataSource({name: [0, 0] for name in ("at", *bounds)}, name="live")
    for number, role in enumerate(curve.roles):
        chart.varea_step(
            x="at",
            y1=f"low_{number}",
            y2=f"high_{number}",
            step_mode="after",
            fill_color=ROLE_COLOURS[Role(role)],
            fill_alpha=0.85,
            source=source,
        )
    for _, section in curve.boundaries:
        chart.add_layout(Span(location=0, dimension="height", line_dash="dotted", name="boundary"))
        chart.add_layout(
            Label(
                x=0,
                y=1.075 * top / scale.size,
                text=f" {section} ",
                text_baseline="top",
                text_font_size="11px",
                name="boundary-label",
            )
        )
    if budget_bytes is not None and budget_bytes <= top:
        chart.add_layout(
            Span(
                location=budget_bytes / scale.size,
                dimension="width",
                line_color=CRITICAL_COLOUR,
                line_width=2,
                line_dash="dashed",
                name="budget",
            )
        )
    chart.add_layout(BoxAnnotation(name="mark", level="overlay", visible=False))
    return dict(json_item(chart))


def _chart(
    name: str, *, height_px: int, x_end: float, y_range: tuple[float, float], scale: AxisUnit
) -> figure:
    """Make a chart that pans and zooms from 0 to ``x_end``, with the background of the page."""
    from bokeh.models import CustomJSTickFormatter, Range1d
    from bokeh.plotting import figure

    left, right = -0.01 * x_end, 1.01 * x_end
    chart = figure(
        name=name,
        height=height_px,
        sizing_mode="stretch_width",
        x_range=Range1d(start=left, end=right, reset_start=left, reset_end=right),
        y_range=Range1d(start=y_range[0], end=y_range[1]),
        tools="xpan,xwheel_zoom,xbox_zoom,reset",
        active_drag="xpan",
        active_scroll="xwheel_zoom",
    )
    chart.xaxis.formatter = CustomJSTickFormatter(
        args={"size": scale.size},
        code="return axisNumber.format(tick / size);",
    )
    chart.background_fill_color = None
    chart.border_fill_color = None
    chart.outline_line_color = None
    chart.toolbar.logo = None
    return chart
