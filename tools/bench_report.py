"""Measure the frame rate of a report's page in a real browser: ``python -m tools.bench_report [--ops 10000 30000]``.

A deep program of about that number of ops is written as a page and opened in headless Chromium, without a graphics
card. Each figure is the time from what a person does until the browser has painted what follows, the median of twenty;
what takes no more than 100 ms feels immediate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.report.browser import open_browser
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.cost.machine import load_machine
from zeroir.cost.simulate import simulate
from zeroir.ir.program import Program
from zeroir.report.page.html import report_html
from zeroir.report.page.sides import ReportedProgram
from zeroir.report.summary import summarise
from zeroir.verify import verify

RANKS: Final = 8
ROUNDS: Final = 20

MEASURE: Final = """async (rounds) => {
    const { timeline, memory: [memory] } = zeroir.models;
    const charts = [timeline, memory].map((chart) => Bokeh.index.get_one(chart));
    let painted = 0;
    for (const chart of charts) {
        for (const renderer of [...chart.all_renderer_views].filter((view) => view.glyph)) {
            const paint = renderer.paint.bind(renderer);
            renderer.paint = (...args) => { paint(...args); painted += 1; };
        }
    }
    const shown = () => new Promise((next) => requestAnimationFrame(() => setTimeout(next, 0)));
    const took = async (act, isDone = () => true) => {
        await shown();
        const start = performance.now();
        act();
        do await shown(); while (!isDone() && performance.now() - start < 20000);
        return performance.now() - start;
    };
    const repeat = async (act, prepare = () => () => true) => {
        const times_ms = [];
        for (let round = 0; round < rounds; round += 1) {
            const isDone = prepare();
            times_ms.push(await took(() => act(round), isDone));
        }
        return times_ms;
    };
    const isPainted = () => { const before = painted; return () => painted > before; };
    const count = zeroir.data.ops.op.length;
    const filter = document.getElementById("filter");
    const type = (text) => { filter.value = text; filter.dispatchEvent(new Event("input")); };
    const words = ["pref", "prefetch blocks.1", "wait", "", "reduce", "compute @"];
    const { start, end } = timeline.x_range;
    const at = (share) => start + share * (end - start);
    const look = (from, to) => timeline.x_range.setv({ start: at(from), end: at(to) });
    const heads = () => document.querySelectorAll("#head button");
    const figures = {};
    figures["an idle frame"] = await repeat(() => {});
    figures["filter: table"] = await repeat((r) => type(words[r % words.length]));
    await new Promise((next) => setTimeout(next, 1000));
    figures["filter: timeline"] = await repeat((r) => type(words[r % words.length]), isPainted);
    await took(() => type(""), isPainted());
    figures["sort by a column"] = await repeat((r) => heads()[r % 2 ? 7 : 9].click());
    figures["mark an op in all three"] = await repeat((r) => zeroir.mark(Math.floor(((r + 0.5) / rounds) * count)));
    figures["scroll the table"] = await repeat((r) => { document.getElementById("ops").scrollTop = 2400 * r; });
    figures["pan the whole timeline"] = await repeat((r) => look(0.002 * (r + 1), 1 + 0.002 * (r + 1)), isPainted);
    figures["pan a tenth of it"] = await repeat((r) => look(0.02 * r, 0.02 * r + 0.1), isPainted);
    figures["zoom the timeline"] = await repeat((r) => look(0.44 - 0.02 * r, 0.56 + 0.02 * r), isPainted);
    timeline.x_range.setv({ start, end });
    document.querySelector("input[name=axis][value=ops]").click();
    const seen = (r) => ({ start: (r + 1) * (count / 400), end: count + (r + 1) * (count / 400) });
    figures["pan the memory, over ops"] = await repeat((r) => memory.x_range.setv(seen(r)), isPainted);
    document.querySelector("input[name=axis][value=time]").click();
    const waits = document.querySelector("#kinds input[value=wait]");
    figures["show and hide waits"] = await repeat(() => waits.click(), isPainted);
    for (const box of document.querySelectorAll("#kinds input:not(:checked)")) box.click();
    figures["pan it with all kinds"] = await repeat((r) => look(0.002 * (r + 1), 1 + 0.002 * (r + 1)), isPainted);
    return figures;
}"""


def lowered(ops: int) -> Program:
    """A program at stage 3 of about this number of ops, neither verified nor with its memory planned."""

    def of(blocks: int) -> Program:
        return applied(mlp(blocks=blocks, dim=16), for_stage(3, RANKS, overlap_update=True))

    few, more = (sum(1 for _ in of(blocks).ops()) for blocks in (4, 8))
    return of(max(1, -(-(ops - few) * 4 // (more - few)) + 4))


def write(program: Program, path: Path) -> float:
    """Write a program's page, and return the seconds that took once it was verified and simulated."""
    report = verify(program)
    simulation = simulate(program, load_machine("dgx-h100"))
    reported = ReportedProgram(
        name="deep.zir",
        program=program,
        report=report,
        summary=summarise(program, report, stage=3, precision="fp32"),
        simulation=simulation,
        budget_bytes=None,
    )
    start = time.perf_counter()
    text = report_html(reported)
    path.write_text(text, encoding="utf-8")
    return time.perf_counter() - start


def measured(path: Path) -> Mapping[str, list[float]]:
    """Milliseconds by what was done to the page."""
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1500})
        page.goto(path.as_uri())
        opened_ms = page.evaluate(
            """async () => {
                await zeroir.ready;
                await new Promise((next) => requestAnimationFrame(() => setTimeout(next, 0)));
                return performance.now();
            }"""
        )
        times_ms: Mapping[str, list[float]] = page.evaluate(MEASURE, ROUNDS)
        return {"open the page": [opened_ms], **times_ms}


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=int, nargs="*", default=[10_000, 30_000])
    for count in parser.parse_args().ops:
        program = lowered(count)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "deep.html"
            seconds = write(program, path)
            size_mb = path.stat().st_size / 1e6
            print(
                f"{sum(1 for _ in program.ops()):,} ops: {size_mb:.1f} MB, written in {seconds:.1f} s"
            )
            for name, times in measured(path).items():
                print(f"  {name:<26} {statistics.median(times):8.0f} ms  most {max(times):6.0f} ms")


if __name__ == "__main__":
    main()
