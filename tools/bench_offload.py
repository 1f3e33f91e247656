"""Measure offloading on this machine, and simulate it for models of published sizes.

    python -m tools.bench_offload [--parts traffic rates paper speculation] [--models gpt_10b …]
                                  [--steps 10] [--folder DIR] [--record FILE]

* ``traffic``: `tools/peers/gpt.py` on one rank, on a CPU, where device and host are arenas that are counted apart. The
  bytes that a step copied, by its recorded ops, against the plan's; the share of the copies and of the host's updates
  that ran beside the segments; the step against the same without offloading, in rounds that take turns.
* ``rates``: an update on the host against a plain copy in memory, and the disk against fio on the same folder.
* ``paper``: simulated steps of models whose states exceed the memory of their GPUs, and published results beside them.
* ``speculation``: simulated steps under clipping whose update on the host waits for the decision, or does not.

Parts and models that are left out keep what the record has. Nothing else should run on the machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

import zeroir
from tools import bench_disk, offload_models, offload_on_paper, record_file
from tools.peers import gpt
from zeroir.api import CompiledProgram
from zeroir.cost.durations import Durations
from zeroir.cost.machine import load_machine
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import transfer_bytes
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.mesh import COMPUTE, Executor
from zeroir.ir.program import Program
from zeroir.ir.spans import Span
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.host_profile import measure_host

MODEL = "tools/peers/gpt.py"
PARTS = ("traffic", "rates", "paper", "speculation")
OFFLOADS = (
    "optimizer",
    "optimizer,gradients",
    "parameters",
    "activations",
    "optimizer,gradients,parameters,activations",
)
TRAFFIC_HEAD = [
    *("offloaded", "down a step", "up a step", "as planned"),
    *("beside segments", "device", "host", "step / without"),
]
RATES_HEAD = ["what", "GB/s", "against", "GB/s", "share"]
WARM_UP = 3
DISK_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class OffloadedEngine:
    """An engine of a program, its step times, and the spans of recorded steps."""

    offloaded: str
    compiled: CompiledProgram
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    steps: list[Sequence[Span]] = field(default_factory=list)

    @property
    def program(self) -> Program:
        """The program that the engine runs."""
        return self.engine.program

    def step(self) -> float:
        """The seconds of one step."""
        start = time.perf_counter()
        self.engine.step(gpt.batch())
        self.engine.finish()
        return time.perf_counter() - start


def traffic(steps: int) -> list[list[str]]:
    """The rows of the first table."""
    contestants = [_engine_of("")] + [_engine_of(what) for what in OFFLOADS]
    for contestant in contestants:
        for _ in range(WARM_UP):
            contestant.step()
    for _ in range(steps):
        for contestant in contestants:
            contestant.seconds.append(contestant.step())
            contestant.engine.record(contestant.engine.step_count + 1)
            contestant.step()
            spans = contestant.engine.timelines()
            assert spans is not None
            contestant.steps.append(spans[0])
    plain = contestants[0]
    rows = [_traffic_cells(contestant, plain) for contestant in contestants]
    for contestant in contestants:
        contestant.engine.close()
    return rows


def _engine_of(offload: str) -> OffloadedEngine:
    options = {"offload": offload} if offload else {}
    compiled = zeroir.compile(MODEL, stage=3, world_size=1, precision="fp32", **options)  # type: ignore[arg-type]
    return OffloadedEngine(
        offloaded=offload or "nothing", compiled=compiled, engine=compiled.engine()
    )


def _traffic_cells(contestant: OffloadedEngine, plain: OffloadedEngine) -> list[str]:
    program, summary = contestant.program, contestant.compiled.summary()
    planned = transfer_bytes(program)
    copied = [copied_bytes(program, step) for step in contestant.steps]
    is_as_planned = all(step == planned for step in copied)
    beside = median(beside_segments(program, step) for step in contestant.steps)
    ratio = median(a / b for a, b in zip(contestant.seconds, plain.seconds, strict=True))
    host = summary["outside_bytes_per_rank"]["host"]
    return [
        contestant.offloaded,
        format_bytes(copied[0]["to_host"]),
        format_bytes(copied[0]["to_device"]),
        "every step" if is_as_planned else "no",
        f"{beside:.0%}" if any(planned.values()) else "",
        format_bytes(sum(summary["peak_bytes_per_rank"].values())),
        format_bytes(sum(host["resting"].values()) + host["block"]),
        f"{ratio:.2f}",
    ]


def copied_bytes(program: Program, spans: Iterable[Span]) -> Mapping[str, int]:
    """Bytes of the transfers that a recorded step carried out, by op."""
    totals = dict.fromkeys(transfer_bytes(program), 0)
    for span in spans:
        op = program.section_by_name[span.section].body[span.index]
        if isinstance(op, ops.Transfer):
            item = program.buffer_by_name[op.source.buffer].dtype.itemsize_bytes
            totals[ops.op_name(type(op))] += op.source.local_numel(program.mesh) * item
    return totals


def beside_segments(program: Program, spans: Iterable[Span]) -> float:
    """The share of the time of transfers, and of the host's own ops, in which the stream ``compute`` works."""
    executors = {stream.name: stream.executor for stream in program.streams}
    working: list[tuple[int, int]] = []
    moving: list[tuple[int, int]] = []
    for span in spans:
        op = program.section_by_name[span.section].body[span.index]
        match op:
            case ops.Wait() | ops.Memory():
                pass
            case ops.Transfer():
                moving.append((span.start_ns, span.end_ns))
            case _ if op.stream == COMPUTE:
                working.append((span.start_ns, span.end_ns))
            case _ if executors[op.stream] is not Executor.DEVICE:
                moving.append((span.start_ns, span.end_ns))
            case _:
                pass
    total_ns = sum(end - start for start, end in moving)
    both_ns = sum(
        max(0, min(end, stop) - max(start, begin))
        for start, end in moving
        for begin, stop in working
    )
    return both_ns / total_ns if total_ns else 0.0


def rates(steps: int, folder: Path) -> list[list[str]]:
    """The rows of the second table."""
    contestant = _engine_of("optimizer")
    for _ in range(WARM_UP):
        contestant.step()
    for _ in range(steps):
        contestant.engine.record(contestant.engine.step_count + 1)
        contestant.step()
        spans = contestant.engine.timelines()
        assert spans is not None
        contestant.steps.append(spans[0])
    update = median(update_bytes_per_s(contestant.program, step) for step in contestant.steps)
    contestant.engine.close()
    host = measure_host(torch.device("cpu"), lambda: None)
    copy = host.memory_bytes_per_s
    return [
        _rate_cells("an update in a step", update, "a copy in memory", copy),
        _rate_cells("an update alone", host.update_bytes_per_s, "a copy in memory", copy),
        *bench_disk.cells(bench_disk.measure(folder, DISK_BYTES, steps)),
    ]


def update_bytes_per_s(program: Program, spans: Iterable[Span]) -> float:
    """Bytes that the host's optimizer steps read and write, per second of their spans."""
    durations = Durations(program, load_machine("cpu-local"))
    total_bytes = total_ns = 0
    for span in spans:
        op = program.section_by_name[span.section].body[span.index]
        if isinstance(op, ops.OptimizerStep):
            total_bytes += durations.traffic_bytes(op)
            total_ns += span.duration_ns
    return total_bytes / total_ns * 1e9


def _rate_cells(what: str, rate: float, against: str, other: float) -> list[str]:
    return [what, f"{rate / 1e9:.2f}", against, f"{other / 1e9:.2f}", f"{rate / other:.0%}"]


def paper(models: Sequence[str], known: Sequence[list[str]]) -> list[list[str]]:
    """The rows of the simulated table; those of other models than ``models`` are the ``known`` ones."""
    scenarios = offload_on_paper.SCENARIOS
    results = offload_on_paper.simulated(s for s in scenarios if s.model in models)
    rows: list[list[str]] = []
    for model in dict.fromkeys(scenario.model for scenario in scenarios):
        if model not in models:
            rows += [row for row in known if row[0] == model]
            continue
        for _ in range(sum(scenario.model == model for scenario in scenarios)):
            rows.append(next(results).cells())
            print(" | ".join(rows[-1]), file=sys.stderr)
    return rows


def main() -> int:
    """Measure and simulate the parts that were asked for; print and record their tables."""
    parser = record_file.parser(__doc__)
    models = list(offload_models.LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    path: Path | None = arguments.record
    tables: dict[str, object] = {}
    earlier = record_file.commands_of(path)
    if path is not None and path.is_file():
        tables = {k: v for k, v in json.loads(path.read_text()).items() if k != "about"}
    if "traffic" in arguments.parts:
        tables["traffic"] = {"head": TRAFFIC_HEAD, "rows": traffic(arguments.steps)}
    if "rates" in arguments.parts:
        rows = rates(arguments.steps, arguments.folder)
        tables["rates"] = {"head": RATES_HEAD, "rows": rows}
    if "paper" in arguments.parts:
        known = tables.get("paper", {"rows": []})
        assert isinstance(known, dict)
        rows = paper(arguments.models, known["rows"])
        tables["paper"] = {"head": offload_on_paper.HEAD, "rows": rows}
        head = offload_on_paper.PUBLISHED_HEAD
        tables["published"] = {"head": head, "rows": offload_on_paper.published_rows(rows)}
    if "speculation" in arguments.parts:
        head = offload_on_paper.SPECULATION_HEAD
        tables["speculation"] = {"head": head, "rows": list(offload_on_paper.speculation_rows())}
    for table in tables.values():
        assert isinstance(table, dict)
        record_file.print_table(table["head"], table["rows"])
    about = {"threads": torch.get_num_threads()}
    record_file.write(path, "bench_offload", tables, about, after=earlier)
    return 0


if __name__ == "__main__":
    sys.exit(main())
