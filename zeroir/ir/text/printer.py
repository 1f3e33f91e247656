"""Canonical printing: one program has one text, one op one line.

What is derived stands only in ``//`` comments.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import assert_never

from zeroir.ir.bounds import AheadBound, BehindBound, Bound, LiveBound
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import (
    Content,
    FlatContent,
    NamedContent,
    SnapshotContent,
    WeightContent,
)
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Op
from zeroir.ir.program import Flat, Program, Section, State
from zeroir.ir.segment import Node, NodeArg, Ref, Segment, Symbol, TensorType
from zeroir.ir.text.lexical import RESERVED_QUANTITIES, VERSION, name, number, quote, word
from zeroir.ir.text.names import Names, strided
from zeroir.ir.text.print_ops import op_text


def print_program(program: Program) -> str:
    """The canonical text, ending with a newline."""
    return "\n".join(program_lines(program)) + "\n"


def print_op(op: Op, program: Program) -> str:
    """One op as it stands in the program's text, without its number."""
    return op_text(op, Names(program=program))


def print_segment(segment: Segment) -> str:
    """One segment as it stands in a program's text, ending with a newline."""
    return "\n".join(segment_lines(segment)) + "\n"


def print_section(section: Section, program: Program) -> str:
    """One section as it stands in the program's text, ending with a newline."""
    return "\n".join(section_lines(section, Names(program=program))) + "\n"


def program_lines(program: Program) -> Iterator[str]:
    """The lines of the canonical text."""
    yield from header_lines(program)
    for segment in program.segments:
        yield ""
        yield from segment_lines(segment)
    names = Names(program=program)
    for section in program.sections:
        yield ""
        yield from section_lines(section, names)


# ------------------------------------------------------------------------------------------- header


def header_lines(program: Program) -> Iterator[str]:
    """Everything before the segments: options, passes, mesh, flats, buffers, bindings."""
    options = " ".join(f"{name(key)}={word(value)}" for key, value in program.options)
    yield f"zeroir {VERSION}  {options}".rstrip()
    yield from (f"pass {word(spec)}" for spec in program.passes)
    if program.fingerprint:
        yield f"fingerprint {word(program.fingerprint)}"
    yield "mesh" + "".join(f" {name(axis.name)}={axis.size}" for axis in program.mesh.axes)
    yield from (f"comm {name(comm.name)} axis={name(comm.axis)}" for comm in program.comms)
    yield "streams" + "".join(f" {name(s.name)}:{s.executor.value}" for s in program.streams)
    yield from (f"bound {bound_text(bound)}" for bound in program.bounds)
    for report in program.reports:
        yield f"report {report.quantity.value} %{name(report.buffer)}"
    if program.weight is not None:
        yield f"weight %{name(program.weight)}"
    if program.interleaved != 1:
        yield f"interleaved {program.interleaved}"
    for flat in program.flats:
        yield from _flat_lines(flat)
    for buffer in program.buffers:
        yield _buffer_line(buffer, program)
    for operator in program.operators:
        module = f" module={name(operator.module)}" if operator.module else ""
        yield f"operator {name(operator.name)} schema={quote(operator.schema)}{module}"
    for binding in program.inputs:
        kind = binding.dtype.value + _numbers(binding.shape)
        yield f"input {name(binding.path)} : {kind} -> %{name(binding.buffer)}"
    for output in program.outputs:
        kind = output.dtype.value + _numbers(output.shape)
        yield f"output {quote(output.path)} : {kind} <- %{name(output.buffer)}"
    for constant in program.batch_constants:
        yield f"batch_constant {name(constant.path)} = {_arg_text(constant.value)}"
    for held in program.module_buffers:
        line = f"module_buffer {name(held.name)} : {_numbers(held.shape)} -> %{name(held.buffer)}"
        if held.data is not None:
            line += f'  data="{base64.b64encode(held.data).decode()}"'
        yield line
    for scalar in program.scalars:
        values = ", ".join(number(value) for value in scalar.values)
        yield f"scalar %{name(scalar.buffer)} = ({values})"
    for group in program.groups:
        intervals = ", ".join(f"{name(flat)}[{a}:{b}]" for flat, a, b in group.intervals)
        settings = f"lr=%{name(group.lr)} hyper=%{name(group.hyper)}"
        yield f"group {name(group.name)} {group.algorithm.value} ({intervals}) {settings}"


def bound_text(bound: Bound) -> str:
    """A bound as its line of the header has it: ``full_gradients ahead=1``."""
    match bound:
        case AheadBound():
            return f"{bound.kind.value} ahead={bound.ahead}"
        case BehindBound():
            return f"{bound.kind.value} behind={name(bound.behind)}"
        case LiveBound():
            return f"{bound.kind.value} live={bound.live}"
        case _:
            assert_never(bound)


def _flat_lines(flat: Flat) -> Iterator[str]:
    kind = "trainable" if flat.is_trainable else "frozen"
    head = f"flat {name(flat.name)} : {flat.dtype.value}[{flat.padded_numel}]"
    yield f"{head} unit={name(flat.unit)} {kind} {{  // {flat.numel} in parameters"
    for slot in flat.slots:
        aliases = "".join(f" alias={name(alias)}" for alias in slot.aliases)
        yield f"  {name(slot.name)} : {_numbers(slot.shape)} offset={slot.offset}{aliases}"
    yield "}"


def _buffer_line(buffer: Buffer, program: Program) -> str:
    line = f"buffer %{name(buffer.name)} : {buffer.dtype.value}[{buffer.numel}]"
    line += f" {buffer.space.value} {buffer.role.value}"
    if buffer.offset is not None:
        line += f" offset={buffer.offset}"
    holds = buffer.holds
    if holds is None:
        return line
    line += " = " + content_text(holds)
    if isinstance(holds, FlatContent) and holds.shard is not None:
        flat = program.flat_by_name.get(holds.flat)
        line += f"  // shard of {flat.padded_numel}" if flat is not None else ""
    return line


def content_text(content: Content) -> str:
    """The content of a region: ``param blocks.0 @dp``, ``value loss``, ``weight micro=past``, ``zeros``.

    A snapshot names the elements that it is a copy of even where they are a whole buffer: ``snapshot %b.param[0:64]``.
    """
    if isinstance(content, NamedContent):
        version = f" version={content.version}" if content.version else ""
        return f"value {name(content.name)}{version}"
    if isinstance(content, WeightContent):
        return f"weight{_reduced(content.reduced)} micro={content.micro.value}"
    if isinstance(content, SnapshotContent):
        copied = f"%{name(content.buffer)}[{content.offset}:{content.offset + content.numel}]"
        shard = "" if content.shard is None else f"@{name(content.shard)}"
        event = "" if content.event is None else f" event=!{name(content.event)}"
        return f"snapshot {copied}{shard}{event}"
    if not isinstance(content, FlatContent):
        return "zeros"
    quantity = content.quantity
    text = quote(quantity) if quantity in RESERVED_QUANTITIES else name(quantity)
    text += " " + name(content.flat)
    if content.shard is not None:
        text += f" @{name(content.shard)}"
    if content.offset:
        text += f" offset={content.offset}"
    if content.stride is not None:
        text += f" stride={content.stride}"
    if content.version:
        text += f" version={content.version}"
    text += _reduced(content.reduced)
    if content.micro is not None:
        text += f" micro={content.micro.value}"
    if content.guessed:
        text += " guessed"
    return text


def _reduced(axes: tuple[str, ...]) -> str:
    return f" reduced=({', '.join(map(name, axes))})" if axes else ""


# ----------------------------------------------------------------------------------------- segments


def segment_lines(segment: Segment) -> Iterator[str]:
    """A segment: its inputs, a node a line with its results' types, and the values it returns."""
    inputs = ", ".join(f"${i}: {_type_text(kind)}" for i, kind in enumerate(segment.inputs))
    workspace = "".join(f" {name(k)}={size}" for k, size in segment.workspace_bytes)
    workspace = f" workspace{workspace}" if workspace else ""
    yield f"segment @{name(segment.name)}({inputs}){workspace} {{"
    number_of_values = len(segment.inputs)
    for node in segment.nodes:
        yield f"  {_node_text(node, number_of_values)}"
        number_of_values += len(node.results)
    yield "  return (" + ", ".join(f"${index}" for index in segment.outputs) + ")"
    yield "}"


def _node_text(node: Node, first: int) -> str:
    args = [_arg_text(arg) for arg in node.args]
    args += [f"{name(key)}={_arg_text(arg)}" for key, arg in node.kwargs]
    results = ", ".join(f"${i}" for i in range(first, first + len(node.results)))
    types = ", ".join("none" if kind is None else _type_text(kind) for kind in node.results)
    if len(node.results) != 1:
        types = f"({types})"
    head = f"{results} = " if results else ""
    text = f"{head}{name(node.op)}({', '.join(args)}) : {types}"
    if node.flops:
        text += f"  flops={node.flops}"
    if node.workspace_bytes is not None:
        text += f"  workspace={node.workspace_bytes}"
    if node.source:
        text += f"  at {quote(node.source)}"
    return text


def _arg_text(arg: NodeArg) -> str:
    match arg:
        case Ref():
            return f"${arg.index}"
        case Symbol():
            return f"#{name(arg.name)}"
        case DType():
            return arg.value
        case None:
            return "none"
        case bool():
            return "true" if arg else "false"
        case int():
            return str(arg)
        case float():
            return number(arg)
        case str():
            return quote(arg)
        case _:
            return "[" + ", ".join([_arg_text(item) for item in arg]) + "]"


def _type_text(kind: TensorType) -> str:
    return kind.dtype.value + "[" + strided(kind.shape, kind.stride) + "]"


def _numbers(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


# ----------------------------------------------------------------------------------------- sections


def section_lines(section: Section, names: Names) -> Iterator[str]:
    """A section: its entry state, its ops with their numbers, its exit state."""
    yield f"section {name(section.name)} {{"
    yield from state_lines("entry", section.entry, names)
    for i, op in enumerate(section.body):
        yield f"{i:>4}: {op_text(op, names)}"
    yield from state_lines("exit", section.exit, names)
    yield "}"


def state_lines(end: str, state: State, names: Names) -> Iterator[str]:
    """The lines of an entry or exit state, none when everything is at rest."""
    yield from (f"  {end} live %{name(buffer)}" for buffer in state.live)
    for holding in state.holdings:
        line = f"  {end} {names.region(holding.region)} = {content_text(holding.content)}"
        yield line if holding.after is None else f"{line} after !{name(holding.after)}"
    for pending in state.pending:
        yield f"  {end} pending !{name(pending.event)} stream={name(pending.stream)}"
