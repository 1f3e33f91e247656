"""The page of a report in a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.report.browser import open_browser
from tests.report.pages import page_of, program, reported, simulated
from tests.report.test_measured import MICRO_STEPS, read, timelines
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.report.page.charts import HIDDEN_KINDS
from zeroir.report.page.facts import StepOp, step_ops
from zeroir.report.page.html import report_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH = 1400


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    scheme: Any = "light",  # noqa: ANN401
    width: int = WIDTH,
) -> Iterator[Page]:
    """The page in a window of its own, where each error and each request other than for the file fails the test."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 1500})
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda r: None if r.url.startswith(("file:", "data:")) else troubles.append(r.url),
    )
    page.goto(path.as_uri())
    page.evaluate("zeroir.ready")
    yield page
    assert not troubles
    context.close()


def marked(page: Page) -> dict[str, Any]:
    """The row that is marked, and where the marks stand in the charts."""
    found: dict[str, Any] = page.evaluate(
        """() => {
            const [timeMark] = zeroir.models.timeMarks;
            const [memoryMark] = zeroir.models.memoryMarks;
            const line = document.querySelector("#rows .marked");
            return {
                row: line && Number(line.dataset.row),
                time: timeMark.visible && [timeMark.left, timeMark.right],
                memory: memoryMark.visible && memoryMark.left,
            };
        }"""
    )
    return found


def centre_of(page: Page, chart: str, x: float, y: float) -> tuple[float, float]:
    """Where in the window a point of a chart is, given in the chart's own coordinates."""
    found: list[float] = page.evaluate(
        """([name, x, y]) => {
            const [model] = [zeroir.models[name]].flat();
            const view = Bokeh.index.get_one(model);
            const frame = view.frame;
            const box = view.el.getBoundingClientRect();
            return [box.left + frame.x_scale.compute(x), box.top + frame.y_scale.compute(y)];
        }""",
        [chart, x, y],
    )
    return found[0], found[1]


def zoom(page: Page, chart: str, start: float, end: float) -> None:
    _awaited(
        page,
        """async ([name, start, end]) => {
            [zeroir.models[name]].flat()[0].x_range.setv({ start, end });
            await new Promise((next) => requestAnimationFrame(() => setTimeout(next, 100)));
        }""",
        [chart, start, end],
    )


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_narrow_screen_and_a_keyboard_suffice(tmp_path: Path) -> None:
    """At 400 pixels nothing is cut off, and keys go from op to op with their tooltips in sight."""
    path = written(tmp_path / "mlp.html", page_of(program()))
    shown_ops = step_ops(program(), simulated(program()))
    with open_browser() as browser, opened(browser, path, width=400) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        assert (
            page.evaluate(
                """[...document.querySelectorAll("section, .tile, #ops, #head > *")]
                .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.textContent)"""
            )
            == []
        )
        of_stream = sorted(
            (op.spans[0].start_ns, number)
            for number, op in enumerate(shown_ops)
            if op.stream == "compute" and op.spans[0].duration_ns and op.kind not in HIDDEN_KINDS
        )
        page.focus("#timeline")
        for _, number in of_stream[:3]:
            page.keyboard.press("ArrowRight")
            assert marked(page)["row"] == number
            assert shown_ops[number].op in page.inner_text("#tip b")
            tip = page.locator("#tip").bounding_box()
            assert tip is not None
            assert tip["x"] >= 0
            assert tip["x"] + tip["width"] <= 400
        before = page.evaluate("zeroir.models.memory[0].x_range.end")
        page.keyboard.press("+")
        assert page.evaluate("zeroir.models.memory[0].x_range.end") < before
        page.keyboard.press("0")
        assert page.evaluate("zeroir.models.memory[0].x_range.end") == before
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")


@pytest.mark.slow
def test_two_programs_in_a_browser(tmp_path: Path) -> None:
    """Ops that stand for each other are marked together, and all charts show the same time."""
    old, new = reported(program(stage=2), "2.zir"), reported(program(), "3.zir")
    path = written(tmp_path / "two.html", report_html(old, new))
    with open_browser() as browser, opened(browser, path) as page:
        pairs = page.evaluate("zeroir.data.pairs")
        ops = page.evaluate("zeroir.data.ops.op")
        b = next(b for a, b, _ in pairs if min(a, b) >= 0 and ops[a] == "compute")
        page.evaluate("row => zeroir.mark(row)", b)
        lanes = page.evaluate(
            "zeroir.models.timeMarks.filter((box) => box.visible).map((box) => Math.round(-(box.top + box.bottom) / 2))"
        )
        assert [page.evaluate(f"zeroir.data.lanes[{lane}].side") for lane in lanes] == [0, 1]
        assert page.evaluate("zeroir.models.memoryMarks.map((box) => box.visible)") == [True, True]
        assert " in A, " in page.inner_text("#detail")
        assert page.locator("#rows .marked").count() == 1
        zoom(page, "timeline", 100, 200)
        limits = "chart => [chart.x_range.start, chart.x_range.end]"
        assert page.evaluate(f"zeroir.models.memory.map({limits})") == [[100, 200], [100, 200]]
        page.check("input[name=axis][value=ops]")
        zoom(page, "memory", 10, 20)
        assert page.evaluate(f"zeroir.models.memory.map({limits})") == [[10, 20], [10, 20]]
        assert page.evaluate(f"({limits})(zeroir.models.timeline)") == [100, 200]
        page.check("#changes")
        sides = set(page.locator("#rows .row > :nth-child(2)").all_inner_texts())
        assert sides <= {"only A", "only B", "changed"}
        assert len(sides) >= 2


@pytest.mark.slow
def test_a_measured_step_in_a_browser(tmp_path: Path) -> None:
    """The table begins with the largest difference on the chosen rank, whose times the timeline shows."""
    made = program(MICRO_STEPS)
    path = written(
        tmp_path / "traced.html", report_html(reported(made), measured=read(tmp_path, timelines()))
    )
    shown_ops = step_ops(made, simulated(made))
    visible = [op.spans[0] for op in shown_ops if op.kind not in HIDDEN_KINDS]
    most_ns = max(span.duration_ns for span in visible)
    longest = [i for i, op in enumerate(shown_ops) if op.spans[0].duration_ns == most_ns]
    with open_browser() as browser, opened(browser, path) as page:
        for rank in (0, 3):
            page.select_option("#rank", str(rank))
            row = page.locator("#rows .row").first
            number = int(row.get_attribute("data-row") or -1)
            assert number in longest
            assert row.locator("span").last.inner_text() == f"{2 + rank}×"
            page.evaluate("row => zeroir.mark(row)", number)
            span = shown_ops[number].spans[0]
            assert page.evaluate("zeroir.models.timeMarks.map((box) => [box.left, box.right])") == [
                [span.start_ns / 1000, span.end_ns / 1000],
                [(2 + rank) * span.start_ns / 1000 + rank, (2 + rank) * span.end_ns / 1000 + rank],
            ]
            page.evaluate("zeroir.mark(null)")
        page.check("#stretch")
        end = "sides[0].end * stretch()"
        assert page.evaluate(f"Math.abs({end} - measured.end) < 1e-6 * measured.end")


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    path = written(tmp_path / "mlp.html", page_of(program()))
    shown_ops = step_ops(program(), simulated(program()))
    with open_browser() as browser:
        with opened(browser, path) as page:
            _require_links(page, shown_ops)
            _require_labels(page, shown_ops)
            _require_filter(page, shown_ops)
            _require_all_is_drawn(page)
            _require_all_columns(page)
            light = page.screenshot(path=tmp_path / "light.png")
        with opened(browser, path, "dark") as page:
            dark = page.screenshot(path=tmp_path / "dark.png")
            shades = {"dark": _shades(page)}
            page.emulate_media(color_scheme="light")
            shades["light"] = _shades(page)
    assert light != dark
    # In both, what is written differs enough from what it is written on (WCAG asks for 4.5).
    for scheme, contrasts in shades.items():
        assert contrasts, scheme
        assert min(contrasts) >= 4.5, (scheme, contrasts)


def _require_links(page: Page, shown_ops: Sequence[StepOp]) -> None:
    """Pointing at a row marks both charts, and pointing into a chart the row and the other chart."""
    wanted = next(i for i, op in enumerate(shown_ops) if op.op == "compute" and i > 3)
    page.evaluate("row => zeroir.mark(row)", wanted)
    page.locator(f'#rows .row[data-row="{wanted}"]').hover()
    page.wait_for_function("document.querySelector('#rows .marked:hover')")
    span = shown_ops[wanted].spans[0]
    at_row = marked(page)
    assert at_row["row"] == wanted
    assert at_row["time"] == [span.start_ns / 1000, span.end_ns / 1000]
    assert at_row["memory"] == shown_ops[wanted].memory_ns / 1000
    page.mouse.move(5, 5)
    page.wait_for_function(
        "!document.querySelector('#rows .marked') && !zeroir.models.timeMarks[0].visible"
    )
    later = next(i for i, op in enumerate(shown_ops) if op.op == "compute" and i > wanted)
    span = shown_ops[later].spans[0]
    lane = page.evaluate("zeroir.data.lanes.findIndex(one => one.stream === 'compute')")
    middle_us = (span.start_ns + span.end_ns) / 2000
    page.mouse.move(*centre_of(page, "timeline", middle_us, -lane))
    page.wait_for_function(
        "row => document.querySelector(`#rows .marked[data-row='${row}']`)", arg=later
    )
    assert marked(page)["memory"] == shown_ops[later].memory_ns / 1000
    assert f"@{shown_ops[later].detail.split(' ')[0].lstrip('@')}" in page.inner_text("#tip")
    assert f"@{shown_ops[later].detail.split(' ')[0].lstrip('@')}" in page.inner_text("#detail")
    ends = [op.memory_ns for op in shown_ops if op.memory_ns > shown_ops[wanted].memory_ns]
    middle_us = (shown_ops[wanted].memory_ns + min(ends)) / 2000
    page.mouse.move(*centre_of(page, "memory", middle_us, 0.1))
    page.wait_for_function(
        "row => document.querySelector(`#rows .marked[data-row='${row}']`)", arg=wanted
    )
    assert marked(page)["time"] == at_row["time"]


def _require_labels(page: Page, shown_ops: Sequence[StepOp]) -> None:
    """A wide bar is named in full, every name fits into its bar, and phases have colours of their own."""
    op = next(op for op in shown_ops if op.kind == "forward" and op.units == ("blocks.1",))
    start, end = op.spans[0].start_ns / 1000, op.spans[0].end_ns / 1000
    whole = page.evaluate(
        "[zeroir.models.timeline.x_range.start, zeroir.models.timeline.x_range.end]"
    )
    colours: dict[str, str] = {}
    for limits in ([start, end], whole):
        zoom(page, "timeline", *limits)
        texts, beyond, colours = page.evaluate(
            """() => {
                const { labels, spans: { data }, timeline } = zeroir.models;
                const pixel = (timeline.x_range.end - timeline.x_range.start) / timeline.inner_width;
                const { x, y, text } = labels.data;
                const barOf = (i) => data.left.findIndex((left, bar) =>
                    Math.max(left, timeline.x_range.start) === x[i] && data.bottom[bar] < y[i] && y[i] < data.top[bar]);
                const beyond = text.filter((word, i) =>
                    widthOf(word) > (Math.min(data.right[barOf(i)], timeline.x_range.end) - x[i]) / pixel);
                const kinds = data.row.map((row, bar) => [zeroir.data.ops.kind[row], data.colour[bar]]);
                return [text, beyond, Object.fromEntries(kinds)];
            }"""
        )
        assert beyond == []
        if limits != whole:
            assert "blocks.1 forward" in texts
    assert len({colours["forward"], colours["backward"]}) == 2


def _require_filter(page: Page, shown_ops: Sequence[StepOp]) -> None:
    """The filter leaves the rows that hold every word, and the head sorts them."""
    page.fill("#filter", "reduce_scatter LAST_micro")
    kept = [i for i, op in enumerate(shown_ops) if op.op == "reduce_scatter"]
    assert kept
    rows = page.locator("#rows .row")
    first = [int(rows.nth(i).get_attribute("data-row") or -1) for i in range(rows.count())]
    assert first == kept[: len(first)]
    assert page.inner_text("#count") == f"{len(kept):,} of {len(shown_ops):,}"
    page.wait_for_function(
        """kept => {
            const { alpha, row } = zeroir.models.spans.data;
            const solid = row.filter((_, i) => alpha[i] > 0.4);
            return solid.length && solid.length <= kept.length && solid.length < row.length;
        }""",
        arg=kept,
    )
    page.locator("#head button", has_text="size").click()
    assert page.locator('#head button[aria-sort="descending"]').inner_text().startswith("size")
    sizes = [
        shown_ops[int(rows.nth(i).get_attribute("data-row") or -1)].size_bytes
        for i in range(rows.count())
    ]
    assert sizes == sorted(sizes, reverse=True)
    page.fill("#filter", "")
    kinds = page.evaluate("[...zeroir.chosen.hidden]")
    hidden = sum(op.kind in kinds for op in shown_ops)
    shown = f"{len(shown_ops) - hidden:,} of " if hidden else ""
    rest = f"; {hidden:,} are of kinds that are not shown" if hidden else ""
    assert page.inner_text("#count") == f"{shown}{len(shown_ops):,}{rest}"


def _require_all_columns(page: Page) -> None:
    """All columns are in sight in a window of 1,280 pixels, and can be scrolled to in a smaller one."""
    for width in (1280, 900):
        page.set_viewport_size({"width": width, "height": 800})
        beyond = page.evaluate(
            """() => {
                const table = document.getElementById("ops");
                table.scrollLeft = 1e4;
                const last = document.querySelector("#head button:last-child").getBoundingClientRect();
                return [last.right - table.getBoundingClientRect().right, table.scrollLeft];
            }"""
        )
        assert beyond[0] <= 0
        assert (beyond[1] == 0) == (width == 1280)
    labels = page.evaluate(
        "zeroir.models.timeline.below[0].formatter.doFormat([2e5, 1234.5, 0.25], {loc: 0})"
    )
    assert labels == ["200,000", "1,234.5", "0.25"]


def _shades(page: Page) -> list[float]:
    """The contrast of the colours of texts with their backgrounds, by the formula of WCAG 2."""
    contrasts: list[float] = page.evaluate(
        """() => {
            const light = (text) => {
                const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
                    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const behind = (one) => {
                while (one && getComputedStyle(one).backgroundColor.match(/, 0\\)$/)) one = one.parentElement;
                return light(getComputedStyle(one || document.body).backgroundColor);
            };
            return ["h1", "h2", ".tile span", ".tile b", "td", "th", "td.proved", "#detail", "#rows .row", "#head"]
                .map((selector) => document.querySelector(selector))
                .map((one) => [light(getComputedStyle(one).color), behind(one)].sort((a, b) => b - a))
                .map(([high, low]) => (high + 0.05) / (low + 0.05));
        }"""
    )
    # The charts hear of the scheme after the page's style has changed.
    page.wait_for_function(
        """() => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim() ===
            zeroir.models.timeline.below[0].major_label_text_color"""
    )
    return contrasts


def _awaited(page: Page, function: str, argument: object = None) -> list[Any]:
    """The result of an asynchronous function in the page.

    It is asked for again and again: a browser under load may collect a promise that it should wait for.
    """
    page.evaluate(
        f"""argument => {{
            globalThis.outcome = null;
            ({function})(argument).then(
                (value) => {{ globalThis.outcome = {{ value: value ?? null }}; }},
                (error) => {{ globalThis.outcome = {{ error: String(error) }}; }},
            );
        }}""",
        argument,
    )
    deadline = time.monotonic() + 60
    while (outcome := page.evaluate("globalThis.outcome")) is None:
        assert time.monotonic() < deadline, "the page does not answer"
        page.wait_for_timeout(50)
    assert "error" not in outcome, outcome["error"]
    result: list[Any] = outcome["value"]
    return result


def _require_all_is_drawn(page: Page) -> None:
    """At every zoom each op of some duration is under a block of its lane, and the peak of the memory is visible."""
    lost = _awaited(
        page,
        """async () => {
            const { timeline, memory: [memory], spans, live: [live] } = zeroir.models;
            const { ops, lanes, sides: [side], hidden } = zeroir.data;
            const lost = [];
            const width = timeline.x_range.end - timeline.x_range.start;
            for (const [from, share] of [[0, 1], [0.3, 0.1], [0.5, 0.004]]) {
                const start = timeline.x_range.start;
                timeline.x_range.setv({ start: start + from * width, end: start + (from + share) * width });
                await new Promise((next) => setTimeout(next, 0));
                const { start: left, end: right } = timeline.x_range;
                const pixel = (right - left) / timeline.inner_width;
                const drawn = spans.data;
                const blocks = lanes.map((_, lane) =>
                    drawn.left.map((one, i) => [one, drawn.right[i], drawn.top[i] + drawn.bottom[i]])
                        .filter(([, , middle]) => Math.abs(middle + 2 * lane) < 0.01));
                const most = 2 * lanes.length * timeline.inner_width;
                if (drawn.left.length > most) lost.push(["too many", drawn.left.length]);
                ops.op.forEach((_, row) => {
                    const lane = lanes.findIndex((one) => one.stream === ops.stream[row]);
                    const [begin, end] = [ops.start[row][0], ops.end[row][0]];
                    if (end <= begin || end < left || begin > right || hidden.includes(ops.kind[row])) return;
                    const middle = (Math.max(begin, left) + Math.min(end, right)) / 2;
                    const isUnder = ([a, b]) => a - pixel <= middle && middle <= b + pixel;
                    if (!blocks[lane].some(isUnder)) lost.push([share, row]);
                });
                timeline.x_range.setv({ start, end: start + width });
            }
            const { roles } = side;
            const totals = side.at.map((_, i) => roles.reduce((sum, sizes) => sum + sizes[i], 0));
            const peak = Math.max(...totals) / zeroir.data.bytes.size;
            for (const axis of ["ops", "time"]) {
                document.querySelector(`input[name=axis][value=${axis}]`).click();
                await new Promise((next) => setTimeout(next, 0));
                const shown = Math.max(...live.data[`high_${roles.length - 1}`]);
                if (Math.abs(shown - peak) > 1e-9 * peak) lost.push(["peak", axis, shown, peak]);
                if (live.data.at.length > 2 * memory.inner_width) lost.push(["too many", axis, live.data.at.length]);
            }
            return lost.slice(0, 5);
        }""",
    )
    assert lost == []


@pytest.mark.slow
def test_ten_thousand_ops_stay_fluid(tmp_path: Path) -> None:
    """The page has only the visible rows and blocks, and pointing at an op does not draw the charts again."""
    made = applied(mlp(blocks=390, dim=16), for_stage(3, 4, overlap_update=True))
    path = written(
        tmp_path / "deep.html", report_html(reported(made, "deep.zir", budget_bytes=None))
    )
    shown_ops = step_ops(made, simulated(made))
    assert len(shown_ops) >= 10_000
    with open_browser() as browser, opened(browser, path) as page:
        page.set_default_timeout(60_000)
        assert page.evaluate("zeroir.data.ops.op.length") == len(shown_ops)
        assert page.locator("#rows .row").count() < 60
        for kind in ("alloc, free", "wait"):
            page.check(f'#kinds input[value="{kind}"]')
        page.evaluate("document.getElementById('ops').scrollTop = 24 * 8000")
        page.wait_for_function("document.querySelector('#rows .row[data-row=\"8005\"]')")
        assert page.locator("#rows .row").count() < 60
        _require_all_is_drawn(page)
        glyphs, marking, is_painted_anew = _awaited(
            page,
            """async () => {
                let painted = 0;
                const view = Bokeh.index.get_one(zeroir.models.timeline);
                const glyphs = [...view.all_renderer_views].filter((one) => one.glyph);
                for (const one of glyphs) {
                    const paint = one.paint.bind(one);
                    one.paint = (...given) => { painted += 1; return paint(...given); };
                }
                const marking = [];
                while (marking.length < 5 && marking.at(-1) !== 0) {
                    painted = 0;
                    for (let row = 0; row < 20; row += 1) {
                        zeroir.mark(row * 20);
                        await new Promise((next) =>
                            requestAnimationFrame(() => setTimeout(next, 0)));
                    }
                    marking.push(painted);
                }
                painted = 0;
                zeroir.models.timeline.x_range.end /= 2;
                for (let wait = 0; wait < 600 && painted === 0; wait += 1) {
                    await new Promise((next) => setTimeout(next, 100));
                }
                return [glyphs.length, marking, painted > 0];
            }""",
        )
        assert glyphs == 3
        # A paint that was asked for before, by zooming, may come among the first marks.
        assert marking[-1] == 0
        assert is_painted_anew
        # Of the whole step an op is less than a pixel, at which nobody can point.
        zoom(page, "timeline", 0, 500)
        _require_links(page, shown_ops)
        zoom(page, "timeline", 0, shown_ops[-1].spans[0].end_ns / 1000)
        _require_filter(page, shown_ops)
