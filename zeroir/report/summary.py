"""The facts of a program in one structure, for ``--json`` and for tables."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TypedDict

from zeroir.ir.analysis.traffic import collective_bytes, transfer_bytes
from zeroir.ir.buffers import Role, Space
from zeroir.ir.ops import Compute, op_name
from zeroir.ir.program import EVALUATE, MICRO_STEP, STEP_SECTIONS, Program
from zeroir.ir.text.printer import print_record
from zeroir.memory.curve import peak
from zeroir.memory.placement import Placement, placements_with_bound
from zeroir.memory.staging import staging_bytes
from zeroir.memory.states import model_state_bytes, snapshot_bytes
from zeroir.report.opaque_code import KnownModules, OpaqueCode, opaque_code
from zeroir.verify import Report


class TemporaryBytes(TypedDict):
    """Bytes of the block of temporary buffers on the device, and the most bytes that can be live in it at once.

    ``live`` is a lower bound of ``block``.
    """

    block: int
    live: int


class OutsideBytes(TypedDict):
    """Bytes outside the device on one rank: of persistent buffers by role, and of the block of temporary ones.

    Snapshots are not included: saving allocates them.
    """

    resting: dict[str, int]
    block: int


class EvaluationFigures(TypedDict):
    """Bytes of an evaluation: of the collectives by op, and of the device's buffers at the peak by role, per rank."""

    collective_bytes: dict[str, int]
    peak_bytes_per_rank: dict[str, int]


class Summary(TypedDict):
    """Facts of a scheduled program; bytes are per step (collectives) or per rank, by role (model states and peak).

    A step has one micro-step, or one group of ``interleaved`` micro-batches that run unit by unit. The peak is that of
    the buffers on the device in a step, in program order and without the workspaces of segments. ``bounds`` have the
    form of the program's text. ``dims`` are what sizes of a batch depend on, each with its smallest and largest value.
    ``weight`` is a phrase on the weights of batches; None if each counts alike. ``stored_bytes`` has the bytes of each
    tensor that the code stores in a step or an evaluation, by its place: that of a batch of the largest sizes.
    ``opaque`` is the code of the model that runs as it is. ``device`` is the one that the model was captured for, where
    results depend on it. ``ops`` and ``distinct_segments`` count those
    of training steps. ``evaluation`` has the figures of one evaluation; None if the program has none.
    ``snapshot_bytes_per_rank`` is the host memory that saving takes from the first save on; 0 if the program cannot
    save. ``transfer_bytes`` are the bytes that a rank copies to and from its host and its disk in a step, by op, and
    ``outside_bytes_per_rank`` what it keeps there, by space. ``staging_bytes_per_rank`` is the peak of the temporary
    buffers of these copies, by space; it is part of the blocks.
    """

    stage: int
    world_size: int
    precision: str
    device: str | None
    mesh: dict[str, int]
    parameters_numel: int
    units: list[str]
    ops: dict[str, int]
    sections: dict[str, int]
    dims: dict[str, tuple[int, int]]
    weight: str | None
    stored_bytes: dict[str, int]
    opaque: list[OpaqueCode]
    interleaved: int
    distinct_segments: int
    bounds: list[str]
    collective_bytes: dict[str, int]
    collective_bytes_by_axis: dict[str, dict[str, int]]
    model_state_bytes_per_rank: dict[str, int]
    peak_bytes_per_rank: dict[str, int]
    temporary_bytes_per_rank: TemporaryBytes
    transfer_bytes: dict[str, int]
    outside_bytes_per_rank: dict[str, OutsideBytes]
    staging_bytes_per_rank: dict[str, int]
    evaluation: EvaluationFigures | None
    snapshot_bytes_per_rank: int
    laws: dict[str, str]
    fingerprint: str


def summarise(
    program: Program,
    report: Report,
    *,
    stage: int,
    precision: str,
    known: KnownModules = MappingProxyType({}),
) -> Summary:
    """Collect the facts of a program that ``report`` verified; ``known`` are opaque modules."""
    called = {op.segment for op in program.step_ops() if isinstance(op, Compute)}
    names = Counter(op_name(type(op)) for op in program.step_ops())
    placed = placements_with_bound(program)
    return Summary(
        stage=stage,
        world_size=program.mesh.world_size,
        precision=precision,
        device=program.options.texts.get("device"),
        mesh={axis.name: axis.size for axis in program.mesh.axes},
        parameters_numel=program.parameters_numel,
        units=list(dict.fromkeys(flat.unit for flat in program.flats)),
        ops={name: names[name] for name in sorted(names)},
        sections={section.name: len(section.body) for section in program.sections},
        dims={dim.name: (dim.minimum, dim.maximum) for dim in program.dims},
        weight=_weight(program),
        stored_bytes=_stored_bytes(program),
        opaque=opaque_code(program, known),
        interleaved=program.interleaved,
        distinct_segments=len({program.segment_by_name[name].digest() for name in called}),
        bounds=[print_record(bound, program) for bound in program.bounds],
        collective_bytes=dict(collective_bytes(program)),
        collective_bytes_by_axis={
            axis.name: dict(collective_bytes(program, axis=axis.name)) for axis in program.mesh.axes
        },
        model_state_bytes_per_rank=dict(model_state_bytes(program)),
        peak_bytes_per_rank=dict(peak(program, sections=STEP_SECTIONS).role_bytes),
        temporary_bytes_per_rank=_temporary(placed.get(Space.DEVICE)),
        transfer_bytes=dict(transfer_bytes(program)),
        outside_bytes_per_rank={
            space.value: _outside(program, space, placed.get(space))
            for space in (Space.HOST, Space.DISK)
        },
        staging_bytes_per_rank={s.value: size for s, size in staging_bytes(program).items()},
        evaluation=_evaluation(program),
        snapshot_bytes_per_rank=snapshot_bytes(program),
        laws=dict(report.laws),
        fingerprint=program.fingerprint,
    )


def _stored_bytes(program: Program) -> dict[str, int]:
    stored: dict[str, int] = {}
    for output in program.outputs:
        if output.stored is not None:
            size_bytes = int(program.buffer_by_name[output.buffer].size_bytes)
            stored[output.path] = max(stored.get(output.path, 0), size_bytes)
    return stored


def _weight(program: Program) -> str | None:
    if program.weight is None:
        return None
    segment = program.weighing_segment
    if segment is None:
        return "of a batch is what the function weight(batch) returns"
    ops = {node.op: node for node in segment.nodes}
    if "aten.ne.Scalar" in ops:
        ignored = ops["aten.ne.Scalar"].args[1]
        return f"of a batch is the number of labels that its loss counts (ignore index {ignored})"
    if segment.inputs:
        return "of a batch is the sum over it that its loss is divided by"
    return "of a batch is the number of elements that its loss is the mean over"


def _evaluation(program: Program) -> EvaluationFigures | None:
    section = program.section_by_name.get(EVALUATE)
    if section is None:
        return None
    return EvaluationFigures(
        collective_bytes=dict(collective_bytes(program, sections=(EVALUATE,))),
        peak_bytes_per_rank=dict(peak(program, sections=(EVALUATE,)).role_bytes),
    )


def _outside(program: Program, space: Space, placed: Placement | None) -> OutsideBytes:
    sizes: Counter[str] = Counter()
    for buffer in program.buffers:
        if buffer.is_persistent and buffer.space is space and buffer.role is not Role.SNAPSHOT:
            sizes[buffer.role.value] += buffer.size_bytes
    return OutsideBytes(resting=dict(sizes), block=0 if placed is None else placed.size_bytes)


def _temporary(placed: Placement | None) -> TemporaryBytes:
    if placed is None:
        return TemporaryBytes(block=0, live=0)
    return TemporaryBytes(block=placed.size_bytes, live=placed.live_bytes)


def counted_step(summary: Summary) -> str:
    """Return what a summary's traffic refers to: ``step``, ``step of one micro-step``, ``step of 4 micro-batches``."""
    group = summary["interleaved"]
    if MICRO_STEP not in summary["sections"]:
        return "step" if group == 1 else f"step of {group} micro-batches"
    return "step of one micro-step" if group == 1 else f"step of one group of {group} micro-batches"
