"""Limits on counts, names and sizes (Z011), so that a proof takes bounded time and memory, and no number overflows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zeroir.ir import limits, ops
from zeroir.ir.bounds import AheadBound
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment, TensorType
from zeroir.verify.context import Findings
from zeroir.verify.structure.names import too_long_names


def check_limits(program: Program, findings: Findings) -> None:
    """Check everything that a program declares; all other checks rely on these limits."""
    for sentence in (*_counts(program), *too_long_names(program), *_sizes(program)):
        findings.add("Z011", sentence)


def _counts(program: Program) -> Iterator[str]:
    slots = sum(len(flat.slots) for flat in program.flats)
    nodes = sum(len(segment.nodes) for segment in program.segments)
    ops_ = sum(len(section.body) for section in program.sections)
    states = [state for section in program.sections for state in (section.entry, section.exit)]
    counted = (
        ("axes", len(program.mesh.axes), limits.MOST_AXES),
        ("streams", len(program.streams), limits.MOST_STREAMS),
        ("communicators", len(program.comms), limits.MOST_COMMUNICATORS),
        ("bounds", len(program.bounds), limits.MOST_ITEMS),
        ("dims", len(program.dims), limits.MOST_DIMS),
        ("flats", len(program.flats), limits.MOST_ITEMS),
        ("parameters", slots, limits.MOST_ITEMS),
        ("buffers", len(program.buffers), limits.MOST_ITEMS),
        ("operators of libraries", len(program.operators), limits.MOST_ITEMS),
        ("segments", len(program.segments), limits.MOST_ITEMS),
        ("nodes", nodes, limits.MOST_ITEMS),
        ("ops", ops_, limits.MOST_ITEMS),
        ("outputs", len(program.outputs), limits.MOST_ITEMS),
        ("holdings", sum(len(state.holdings) for state in states), limits.MOST_ITEMS),
        ("groups", len(program.groups), limits.MOST_ITEMS),
    )
    for what, count, most in counted:
        if count > most:
            yield f"the program has {count:,} {what}, more than {most:,}"
    if not 1 <= program.interleaved <= limits.MOST_ITEMS:
        yield f"a section runs {program.interleaved:,} micro-batches, which is not between 1 and {limits.MOST_ITEMS:,}"
    if math.prod(max(axis.size, 1) for axis in program.mesh.axes[:20]) > limits.MOST_RANKS:
        yield f"the mesh has more than {limits.MOST_RANKS:,} ranks"


def _sizes(program: Program) -> Iterator[str]:
    for flat in program.flats:
        yield from _numel(f"flat {flat.name}", flat.padded_numel)
        for slot in flat.slots:
            yield from _shape(f"parameter {slot.name}", slot.shape)
            yield from _numel(f"parameter {slot.name} begins at element", slot.offset)
    for buffer in program.buffers:
        yield from _numel(f"buffer %{buffer.name}", buffer.numel)
        if buffer.offset is not None and buffer.offset > limits.MOST_BYTES:
            yield f"buffer %{buffer.name} stands at byte {buffer.offset:,}, beyond {limits.MOST_BYTES:,}"
    for bound in program.bounds:
        if isinstance(bound, AheadBound) and bound.ahead > limits.MOST_ITEMS:
            yield f"the bound on {bound.kind.value} lets more than {limits.MOST_ITEMS:,} groups run ahead"
    bindings = [(binding.buffer, binding.shape) for binding in program.inputs]
    bindings += [(binding.buffer, binding.shape) for binding in program.outputs]
    bindings += [(binding.buffer, binding.shape) for binding in program.module_buffers]
    for name, shape in bindings:
        yield from _shape(f"what is bound to %{name}", shape)
    for segment in program.segments:
        yield from _segment(segment)
    for op in program.ops():
        if isinstance(op, ops.Compute):
            views = [argument.view for argument in op.arguments]
            views += [given.view for given in op.destinations if given is not None]
            for view in views:
                yield from _strided(f"compute @{op.segment}", view.shape, view.stride)


def _segment(segment: Segment) -> Iterator[str]:
    where = f"segment @{segment.name}"
    results = (result for node in segment.nodes for result in node.results)
    for kind in (*segment.inputs, *results):
        if isinstance(kind, TensorType):
            yield from _strided(where, kind.shape, kind.stride)
    for node in segment.nodes:
        if not 0 <= (node.workspace_bytes or 0) <= limits.MOST_BYTES:
            yield f"{where} calls {node.op} with a workspace of {node.workspace_bytes:,} bytes"
    for backend, size in segment.workspace_bytes:
        if not 0 <= size <= limits.MOST_BYTES:
            yield f"{where} has a workspace of {size:,} bytes for {backend}"


def _strided(where: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Iterator[str]:
    yield from _shape(where, shape)
    if len(stride) != len(shape):
        yield f"{where} has a tensor of {len(shape)} sizes and {len(stride)} strides"
    if any(not 0 <= step <= limits.MOST_ELEMENTS for step in stride):
        yield f"{where} has a tensor with a stride below 0 or above {limits.MOST_ELEMENTS:,}"


def _shape(where: str, shape: tuple[int, ...]) -> Iterator[str]:
    if len(shape) > limits.MOST_DIMENSIONS:
        yield f"{where} has a tensor of {len(shape):,} dimensions, more than {limits.MOST_DIMENSIONS}"
    elif any(size < 0 for size in shape):
        yield f"{where} has a tensor with a size below 0"
    elif math.prod(shape) > limits.MOST_ELEMENTS:
        yield f"{where} has a tensor of more than {limits.MOST_ELEMENTS:,} elements"


def _numel(what: str, numel: int) -> Iterator[str]:
    if numel > limits.MOST_ELEMENTS:
        yield f"{what} has {numel:,} elements, more than {limits.MOST_ELEMENTS:,}"
