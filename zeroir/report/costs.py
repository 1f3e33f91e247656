"""Simulations and estimates as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from zeroir.config.shapes import values_text
from zeroir.cost.estimate import (
    Activations,
    BatchesEstimate,
    Estimate,
    StageEstimate,
)
from zeroir.cost.estimate_options import (
    ESTIMATE_ROWS,
    gathered_bytes_per_parameter,
    has_master,
    states_per_parameter,
)
from zeroir.cost.simulate import ClassResult, Measured, PathItem, Simulation
from zeroir.cost.wires import Wire
from zeroir.ir import ops
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.mesh import Executor
from zeroir.ir.program import Program
from zeroir.report.names import counted, format_flops
from zeroir.report.tables import Lines, columns_table, facts_table

_SHOWN_ITEMS = 8


def format_seconds(seconds: float) -> str:
    """Format a time in a suitable unit: ``1.234 s``, ``56.7 ms``, ``8.9 µs``."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """The items of one kind on a critical path: their number, and the sum of their seconds."""

    what: str
    count: int
    seconds: float


def path_shares(program: Program, simulation: Simulation) -> list[PathShare]:
    """Group the critical path by the kind of its items, the largest share first."""
    counts: Counter[str] = Counter()
    total_ns: Counter[str] = Counter()
    for item in simulation.critical_path:
        what = _what(program, item)
        counts[what] += 1
        total_ns[what] += item.duration_ns
    shares = [
        PathShare(what=what, count=count, seconds=total_ns[what] / 1e9)
        for what, count in counts.items()
    ]
    return sorted(shares, key=lambda share: (-share.seconds, share.what))


def _what(program: Program, item: PathItem) -> str:
    if item.is_issue:
        return "issuing ops on the host"
    op = program.section_by_name[item.section].body[item.index]
    name = ops.op_name(type(op))
    match op:
        case ops.Compute():
            return f"compute @{op.segment}"
        case ops.Collective():
            return f"{name} comm={op.comm}"
        case ops.Elementwise() | ops.Update() if _is_of_host(program, op.stream):
            return f"{name} on the host"
        case _:
            return name


def _is_of_host(program: Program, stream: str) -> bool:
    executors = {declared.name: declared.executor for declared in program.streams}
    return executors[stream] is not Executor.DEVICE


def render_simulation(program: Program, simulation: Simulation) -> RenderableType:
    """Render the time of the step, its parts, and its critical path."""
    grid = facts_table()
    grid.add_row("machine", f"{simulation.machine}, {counted(simulation.world_size, 'rank')}")
    if simulation.at:
        grid.add_row("batches", values_text(simulation.at))
    steps = counted(simulation.micro_steps, "micro-step")
    slow = "" if simulation.straggler == 1 else f", rank 0 slower by {simulation.straggler:g}"
    grid.add_row("step", f"{format_seconds(simulation.step_s)} ({steps}{slow})")
    if simulation.redone_s is not None:
        redone = f"{format_seconds(simulation.redone_s)}, if clipping or an overflow undoes the speculative update"
        grid.add_row("redone", redone)
    if simulation.evaluation_s is not None:
        grid.add_row("evaluation", f"{format_seconds(simulation.evaluation_s)}, between two steps")
    grid.add_row("exposed communication", _share(simulation.exposed_s, simulation.step_s))
    if any(isinstance(op, ops.Transfer) for op in program.step_ops()):
        shown = _share(simulation.exposed_transfers_s, simulation.step_s)
        grid.add_row("exposed transfers", shown)
    again = "" if simulation.hfu <= simulation.mfu else f", HFU {simulation.hfu:.1%}"
    grid.add_row("MFU", f"{simulation.mfu:.1%} of the dense peak{again}")
    measured = simulation.measured
    if measured.segments or measured.collectives:
        grid.add_row("measured", measured_counts(measured))
    if simulation.peak_bytes is not None:
        planned = ", for the largest batches" if simulation.at else ""
        grid.add_row("memory", f"{format_bytes(simulation.peak_bytes)} a rank{planned}")
    is_alone = len(simulation.classes) == 1
    classes = [
        _class_table(rank_class, simulation, is_alone=is_alone) for rank_class in simulation.classes
    ]
    return _printed([grid, *classes, _path_table(program, simulation)])


def measured_counts(measured: Measured) -> str:
    """Return how many of a program's segments and collectives the machine has measurements of."""
    segments = counted(measured.of_segments, "segment")
    collectives = counted(measured.of_collectives, "collective")
    return f"{measured.segments} of {segments}, {measured.collectives} of {collectives}"


def _class_table(result: ClassResult, simulation: Simulation, *, is_alone: bool) -> Table:
    first_rank = result.ranks[0]
    if is_alone:
        title = "every rank"
    elif result.is_straggler:
        title = f"rank {first_rank}, the straggler"
    else:
        others = len(result.ranks) - 1
        title = f"rank {first_rank}" + (f", and {others:,} like it" if others else "")
    table = columns_table("stream", "busy", figures=("busy",), title=title)
    for stream, busy_s in result.busy_s.items():
        table.add_row(stream, _share(busy_s, simulation.step_s))
    for wire, count in result.bytes_by_wire.items():
        table.add_row(wire_label(wire), f"{format_bytes(round(count))} sent")
    return table


def wire_label(wire: str) -> str:
    """Describe a link, with the direction for those to the host or a disk."""
    match Wire(wire):
        case Wire.TO_DEVICE:
            return "host to device"
        case Wire.TO_HOST:
            return "device to host"
        case Wire.DISK_READ:
            return "disk to host"
        case Wire.DISK_WRITE:
            return "host to disk"
        case _:
            return f"over the {wire.replace('_', ' ')}"


def _path_table(program: Program, simulation: Simulation) -> Table:
    figures = ("times", "seconds")
    table = columns_table("what", *figures, figures=figures, title="critical path")
    shares = path_shares(program, simulation)
    for share in shares[:_SHOWN_ITEMS]:
        table.add_row(share.what, f"{share.count:,}", _share(share.seconds, simulation.step_s))
    rest = shares[_SHOWN_ITEMS:]
    if rest:
        seconds = sum(share.seconds for share in rest)
        times = sum(share.count for share in rest)
        table.add_row("everything else", f"{times:,}", _share(seconds, simulation.step_s))
    return table


def _share(seconds: float, of: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / of if of else 0:.1%})"


def simulation_json(program: Program, simulation: Simulation) -> dict[str, object]:
    """Return the whole simulation as plain data."""
    return {
        "machine": simulation.machine,
        "world_size": simulation.world_size,
        "micro_steps": simulation.micro_steps,
        "straggler": simulation.straggler,
        "at": dict(simulation.at),
        "peak_bytes": simulation.peak_bytes,
        "step_seconds": simulation.step_s,
        "redone_seconds": simulation.redone_s,
        "evaluation_seconds": simulation.evaluation_s,
        "exposed_communication_seconds": simulation.exposed_s,
        "exposed_transfer_seconds": simulation.exposed_transfers_s,
        "flops_per_rank": simulation.flops,
        "mfu": simulation.mfu,
        "hfu": simulation.hfu,
        "measured": asdict(simulation.measured),
        "classes": [
            {
                "first_rank": result.ranks[0],
                "ranks": len(result.ranks),
                "is_straggler": result.is_straggler,
                "busy_seconds": dict(result.busy_s),
                "exposed_communication_seconds": result.exposed_s,
                "exposed_transfer_seconds": result.exposed_transfers_s,
                "bytes_sent_by_wire": dict(result.bytes_by_wire),
            }
            for result in simulation.classes
        ],
        "critical_path": [
            {
                "section": item.section,
                "index": item.index,
                "what": _what(program, item),
                "rank": simulation.classes[item.rank_class].ranks[0],
                "seconds": item.duration_ns / 1e9,
            }
            for item in simulation.critical_path
        ],
    }


def render_estimate(estimate: Estimate) -> RenderableType:
    """Render memory and communication of every stage, and the activations if the shape is known."""
    options = estimate.options
    low, high = states_per_parameter(options.optimizer)
    per, optimizer = options.itemsize_bytes, estimate.optimizer_bytes_per_parameter
    states = f"{low}" if low == high else f"{low} to {high}"
    is_apart = has_master(options) and options.optimizer != "adam-fp32-master"
    beside = ["the FP32 master weight"] if is_apart else []
    beside += ["an average"] if options.ema else []
    also = "".join(f", and {what}" for what in beside)
    grid = facts_table()
    grid.add_row("parameters", f"{options.params:,.0f}, {options.precision}")
    grid.add_row("ranks", f"{options.world_size:,}")
    kind = "FP32 numbers" if options.optimizer_bits == 32 else "numbers of 8 bits"
    grid.add_row("optimizer", f"{options.optimizer}: {states} {kind} a parameter{also}")
    grid.add_row(
        "a parameter takes", f"{per} + {per} + {optimizer:.4g} bytes (weight, gradient, optimizer)"
    )
    grid.add_row("a full gradient", format_bytes(estimate.full_gradient_bytes))
    tables = [grid, _states_table(estimate)]
    if options.layers is not None:
        tables.append(_beside_table(estimate))
    if any(stage.host_bytes + stage.disk_bytes for stage in estimate.stages):
        tables.append(_outside_table(estimate))
        if estimate.stages[0].host_staging_bytes is not None:
            tables.append(_staging_table(estimate))
    tables.append(_communication_table(estimate))
    if estimate.activations is not None:
        tables.append(_activations_grid(estimate.activations))
    if estimate.batches is not None:
        tables += _batches_tables(estimate.batches)
    return _printed(tables)


def _batches_tables(batches: BatchesEstimate) -> list[Table]:
    """Return tables about batches of other sizes than the largest, and what a rank copies for them."""
    sizes = f"{batches.batches:,} batches of {counted(batches.shapes, 'shape')}"
    if batches.sizes is not None:
        sizes = values_text(batches.sizes)
    figures = ["mean", "largest"]
    table = columns_table("what", *figures, figures=figures, title=f"a step of a rank: {sizes}")
    table.add_row("tokens", f"{batches.tokens:,.0f}", f"{batches.largest_tokens:,}")
    stored = (round(batches.activations_bytes), batches.largest_activations_bytes)
    table.add_row("activations", *map(format_bytes, stored))
    table.add_row("products", *map(format_flops, (round(batches.flops), batches.largest_flops)))
    if batches.shapes > 1:
        table.add_row("waiting for slower ranks", f"{batches.wait_share:.1%}", "")
    tables = [table]
    if not any(moved.to_host + moved.to_device for moved in batches.moved):
        return tables
    is_disk = any(moved.load + moved.store for moved in batches.moved)
    figures = ["to host", "to device", *["loaded", "stored"] * is_disk]
    table = columns_table("stage", *figures, figures=figures, title="copied for them in a step")
    for stage, moved in enumerate(batches.moved):
        row = [moved.to_host, moved.to_device, *[moved.load, moved.store] * is_disk]
        table.add_row(str(stage), *map(format_bytes, row))
    return [*tables, table]


def _states_table(estimate: Estimate) -> Table:
    figures = ("weights", "gradients", "optimizer", "model states")
    table = columns_table("stage", *figures, figures=figures, title="memory of a rank")
    for stage in estimate.stages:
        table.add_row(
            str(stage.stage),
            format_bytes(stage.params_bytes),
            format_bytes(stage.gradients_bytes),
            format_bytes(stage.optimizer_bytes),
            format_bytes(stage.model_states_bytes),
        )
    return table


def _beside_table(estimate: Estimate) -> Table:
    """Return a second table, since one table of all columns is too wide for a terminal."""
    has_activations = estimate.activations is not None
    figures = ["whole units", *["activations"] * has_activations, "with model states"]
    table = columns_table("stage", *figures, figures=figures, title="beside the model states")
    for stage in estimate.stages:
        row = [format_bytes(_whole_units(stage))]
        if stage.activations_bytes is not None:
            row.append(format_bytes(stage.activations_bytes))
        table.add_row(str(stage.stage), *row, format_bytes(stage.total_bytes))
    return table


def _outside_table(estimate: Estimate) -> Table:
    """Return a table of the memory outside the device, and the copies of a step to and from it."""
    is_disk = any(stage.disk_bytes for stage in estimate.stages)
    figures = ["on the host", *["on disk"] * is_disk, "to host", "to device"]
    figures += ["loaded", "stored"] * is_disk
    table = columns_table(
        "stage", *figures, figures=figures, title="offloaded, and copied in a step"
    )
    for stage in estimate.stages:
        moved = stage.moved
        row = [stage.host_bytes, *[stage.disk_bytes] * is_disk, moved.to_host, moved.to_device]
        row += [moved.load, moved.store] if is_disk else []
        table.add_row(str(stage.stage), *map(format_bytes, row))
    return table


def _staging_table(estimate: Estimate) -> Table:
    """Return a table of the staging buffers of copies, if they are known."""
    figures = ("on the device", "on the host")
    table = columns_table("stage", *figures, figures=figures, title="staging of these copies")
    for stage in estimate.stages:
        sizes = (stage.device_staging_bytes or 0, stage.host_staging_bytes or 0)
        table.add_row(str(stage.stage), *map(format_bytes, sizes))
    return table


def _whole_units(stage: StageEstimate) -> int:
    return (stage.gathered_bytes or 0) + (stage.gradients_in_flight_bytes or 0)


def _communication_table(estimate: Estimate) -> Table:
    figures = ("elements", "sent by a rank")
    table = columns_table("stage", *figures, figures=figures, title="communication of a step")
    ranks = estimate.options.world_size
    for stage in estimate.stages:
        elements = f"{stage.communicated_per_parameter}Ψ × {ranks - 1:,}/{ranks:,}"
        if stage.stage >= 1 and gathered_bytes_per_parameter(estimate.options.optimizer):
            elements += " and whole parameters"
        table.add_row(str(stage.stage), elements, format_bytes(stage.sent_bytes))
    return table


def _activations_grid(activations: Activations) -> Table:
    table = columns_table("what", "size", figures=("size",), title="activations")
    table.add_row("kept by the layers", format_bytes(activations.layers_bytes))
    if activations.recomputed_bytes:
        table.add_row("one layer, recomputed", format_bytes(activations.recomputed_bytes))
    if activations.outside_bytes:
        table.add_row("embedding and logits", format_bytes(activations.outside_bytes))
    return table


def estimate_json(estimate: Estimate) -> dict[str, object]:
    """Return the whole estimate as plain data."""
    activations = estimate.activations
    return {
        "options": {name: estimate.options.value(name) for name in ESTIMATE_ROWS},
        "optimizer_bytes_per_parameter": estimate.optimizer_bytes_per_parameter,
        "full_gradient_bytes": estimate.full_gradient_bytes,
        "activations": None
        if activations is None
        else {**asdict(activations), "total_bytes": activations.total_bytes},
        "stages": [
            {
                **asdict(stage),
                "model_states_bytes": stage.model_states_bytes,
                "total_bytes": stage.total_bytes,
            }
            for stage in estimate.stages
        ],
        "batches": None if estimate.batches is None else asdict(estimate.batches),
    }


def _printed(tables: Sequence[Table]) -> RenderableType:
    return Group(*(Lines(table=table, is_foldable=True) for table in tables))
