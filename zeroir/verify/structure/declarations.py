"""Checks of the header: names are declared once, flats are laid out correctly, and referenced names are declared."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from zeroir.ir.bounds import AheadBound, LiveBound
from zeroir.ir.buffers import Buffer, Role
from zeroir.ir.contents import FlatContent, Micro, WeightContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import HOST
from zeroir.ir.optimizers.forms import StateForm, form_of
from zeroir.ir.program import (
    PARAMETER_ALIGNMENT_NUMEL,
    Flat,
    OptimizerGroup,
    Program,
)
from zeroir.ir.segments.allowlist import OPAQUE_OPS, refusal
from zeroir.ir.segments.operators import call_problem, declaration_problem
from zeroir.ir.segments.views import mistyped
from zeroir.verify.context import Findings
from zeroir.verify.equivalence.provenance import Problems, provenance_problems
from zeroir.verify.equivalence.reports import report_problems
from zeroir.verify.structure.names import name_problems
from zeroir.verify.structure.regions import content_problem
from zeroir.verify.structure.states import boundary_problems, state_problems

PLACE_ALIGNMENT_BYTES: Final = 64
"""Alignment of buffers in planned memory: the widest vector of a CPU. NCCL and kernels on a GPU need 16."""


def check_declarations(program: Program, findings: Findings) -> None:
    """Check the header, the flats, the segments, the states and the boundaries."""
    for problems in (
        name_problems(program),
        _mesh(program),
        _bounds(program),
        _flats(program),
        _buffers(program),
        _segments(program),
        _bindings(program),
        _groups(program),
        report_problems(program),
        provenance_problems(program),
        state_problems(program),
        boundary_problems(program),
    ):
        for code, sentence in problems:
            findings.add(code, sentence)


def _bounds(program: Program) -> Problems:
    for bound in program.bounds:
        match bound:
            case AheadBound() if bound.ahead < 0:
                yield "Z008", f"the bound on {bound.kind.value} lets {bound.ahead} run ahead"
            case LiveBound() if bound.live < 1:
                yield "Z008", f"the bound on {bound.kind.value} lets {bound.live} be live"
            case _:
                pass


def _mesh(program: Program) -> Problems:
    for axis in program.mesh.axes:
        if axis.size < 1:
            yield "Z008", f"mesh axis {axis.name} has size {axis.size}"
    for comm in program.comms:
        if comm.ranks is None or not program.mesh.has_axis(comm.axis):
            continue
        if comm.ranks < 1 or program.mesh.size(comm.axis) != 1:
            yield (
                "Z008",
                f"communicator {comm.name} stands for {comm.ranks} ranks along an axis of more than one",
            )
    if any(stream.name == HOST for stream in program.streams):
        yield "Z008", "a stream cannot be called host: that is the thread that issues the ops"


def _flats(program: Program) -> Problems:
    blocks = _blocks(program)
    for flat in program.flats:
        block_numel = blocks.get(flat.name, 1)
        stop = 0
        for slot in sorted(flat.slots, key=lambda slot: slot.offset):
            where = f"parameter {slot.name}"
            start = f"{where} begins at element {slot.offset} of flat {flat.name}"
            if slot.offset % PARAMETER_ALIGNMENT_NUMEL:
                yield "Z008", f"{start}, which is not a multiple of {PARAMETER_ALIGNMENT_NUMEL}"
            elif slot.offset % block_numel:
                yield (
                    "Z008",
                    f"{start}, within one of the blocks of {block_numel} elements whose states share a scale",
                )
            if slot.offset < stop:
                yield "Z008", f"{where} overlaps its neighbour in flat {flat.name}"
            stop = max(stop, slot.offset + slot.numel)
        if stop > flat.padded_numel:
            what = f"flat {flat.name} has {flat.padded_numel} elements"
            yield "Z008", f"{what}, its parameters need {stop}"


def _blocks(program: Program) -> Mapping[str, int]:
    """Return the block size of the flats whose states are stored in blocks with one number each."""
    return {
        buffer.holds.flat: form_of(buffer.holds.quantity).block_numel
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
        and form_of(buffer.holds.quantity) is not StateForm.FP32
    }


def _buffers(program: Program) -> Problems:
    for buffer in program.buffers:
        if buffer.numel < 0:
            yield "Z003", f"buffer %{buffer.name} has {buffer.numel} elements"
        sentence = _offset_problem(buffer)
        if sentence is not None:
            yield "Z008", f"buffer %{buffer.name} {sentence}"
        if buffer.holds is not None:
            sentence = content_problem(program, buffer.holds, buffer.numel)
            if sentence is not None:
                yield "Z008", f"buffer %{buffer.name} {sentence}"
    temporary = [buffer for buffer in program.buffers if not buffer.is_persistent]
    unplanned = [buffer.name for buffer in temporary if buffer.offset is None]
    if unplanned and len(unplanned) < len(temporary):
        yield (
            "Z008",
            f"buffer %{unplanned[0]} has no offset, though other temporary buffers have one",
        )


def _offset_problem(buffer: Buffer) -> str | None:
    if buffer.offset is None:
        return None
    if buffer.is_persistent:
        return "outlives the sections, and only temporary buffers have an offset"
    if buffer.offset < 0 or buffer.offset % PLACE_ALIGNMENT_BYTES:
        return f"stands at byte {buffer.offset}, which is not a multiple of {PLACE_ALIGNMENT_BYTES}"
    return None


def _segments(program: Program) -> Problems:
    """Check that segments use allowed operators in order, and that views have the types that operators produce."""
    declared = program.operator_by_name
    if len(declared) < len(program.operators):
        yield "Z008", "an operator is declared twice"
    for operator in program.operators:
        reason = declaration_problem(operator)
        if reason is not None:
            yield "Z008", f"the operator {operator.name} {reason}"
    for segment in program.segments:
        count = len(segment.inputs)
        types = segment.types()
        for number, node in enumerate(segment.nodes):
            op = f"{node.op}, {node.source}" if node.source else node.op
            where = f"node {number} ({op}) of segment @{segment.name}"
            reason = refusal(node.op, declared) or call_problem(node, declared)
            if reason is not None:
                yield "Z008", f"{where} names an operator that {reason}"
            may_declare = node.op in declared or node.op in OPAQUE_OPS
            if node.workspace_bytes is not None and not may_declare:
                yield (
                    "Z008",
                    f"{where} declares a workspace, which only opaque calls and operators of libraries and models do",
                )
            missing = [ref.index for ref in node.refs() if not 0 <= ref.index < count]
            for index in missing:
                yield "Z008", f"{where} uses value {index} before it exists"
            if not missing:
                sentence = mistyped(node, types)
                if sentence is not None:
                    yield "Z008", f"{where} {sentence}"
            count += len(node.results)
        for index in segment.outputs:
            if not 0 <= index < count or types[index] is None:
                yield "Z008", f"segment @{segment.name} yields value {index}, which is undefined"


def _bindings(program: Program) -> Problems:
    weight = program.buffer_by_name.get(program.weight or "")
    if weight is not None and weight.holds != WeightContent(micro=Micro.CURRENT):
        yield "Z008", f"the weight is bound to %{weight.name}, which rests with another content"
    rank = program.buffer_by_name.get(program.rank or "")
    if rank is not None and (rank.dtype, rank.numel) != (DType.I64, 1):
        yield "Z008", f"the rank, i64[1], is bound to %{rank.name}, {rank.dtype}[{rank.numel}]"
    yield from _weighing(program)
    for binding in program.scalars:
        buffer = program.buffer_by_name.get(binding.buffer)
        if buffer is not None and len(binding.values) != buffer.numel:
            counts = f"{buffer.numel} elements and {len(binding.values)} initial values"
            yield "Z008", f"%{buffer.name} has {counts}"


def _weighing(program: Program) -> Problems:
    """Check that the weight of a micro-batch is computed from inputs that the segment takes, and is one number."""
    weighing = program.weighing
    segment = None if weighing is None else program.segment_by_name.get(weighing.segment)
    if weighing is None or segment is None:
        return
    inputs = {binding.buffer: binding for binding in program.inputs}
    given = [inputs.get(name) for name in weighing.arguments]
    types = [None if each is None else (each.dtype, each.shape) for each in given]
    if types != [(kind.dtype, kind.shape) for kind in segment.inputs]:
        yield (
            "Z008",
            f"segment @{segment.name} computes weights from other tensors than those of inputs",
        )
    results = [kind for kind in map(dict(enumerate(segment.types())).get, segment.outputs) if kind]
    if [kind.shape for kind in results] != [()]:
        yield "Z008", f"segment @{segment.name} computes weights, but its result is not one number"


def _groups(program: Program) -> Problems:
    """Check the intervals and the settings of optimizer groups."""
    intervals: list[tuple[str, int, int, str]] = []
    blocks = _blocks(program)
    for group in program.groups:
        for name in (group.lr, group.hyper):
            buffer = program.buffer_by_name.get(name)
            if buffer is not None and buffer.role is not Role.SCALAR:
                what = f"has its settings in %{name}, which is no scalar but {buffer.role}"
                yield "Z008", f"group {group.name} {what}"
        for name, start, stop in group.intervals:
            flat = program.flat_by_name.get(name)
            if flat is None:
                yield "Z001", f"group {group.name} names the undeclared flat {name}"
            elif not 0 <= start <= stop <= flat.padded_numel:
                yield "Z003", f"group {group.name} goes beyond flat {name}"
            elif start % PARAMETER_ALIGNMENT_NUMEL or stop % PARAMETER_ALIGNMENT_NUMEL:
                cut = f"group {group.name} cuts {name}[{start}:{stop}] off the"
                numel = PARAMETER_ALIGNMENT_NUMEL
                what = f"{cut} {numel} elements that kernels take at a time"
                yield "Z003", f"{what}, which changes the rounding"
            elif start % blocks.get(name, 1) or stop % blocks.get(name, 1):
                cut = f"group {group.name} cuts {name}[{start}:{stop}] off the"
                yield "Z003", f"{cut} {blocks[name]} elements whose states share a scale"
            else:
                yield from _cut_parameters(group, flat, start, stop)
            intervals.append((name, start, stop, group.name))
    intervals.sort()
    for (name, _, stop, group_name), (next_name, start, _, next_group) in pairwise(intervals):
        if name == next_name and start < stop:
            twice = "twice" if group_name == next_group else f"and in group {next_group}"
            yield "Z403", f"flat {name} from element {start} is in group {group_name} {twice}"


def _cut_parameters(group: OptimizerGroup, flat: Flat, start: int, stop: int) -> Problems:
    """Report parameters that are partly in an interval, where the optimizer needs whole ones."""
    if group.algorithm.direction_dtype is None:
        return
    for slot in flat.slots:
        behind = slot.offset + slot.numel
        if slot.offset < start < behind or slot.offset < stop < behind:
            what = f"group {group.name} contains a part of parameter {slot.name}"
            yield "Z403", f"{what}, but {group.algorithm} takes whole parameters"
