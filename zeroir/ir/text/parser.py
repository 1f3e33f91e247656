"""Parsing a whole program: the header, and by other modules the segments and sections."""

from __future__ import annotations

import base64
import binascii

from zeroir.ir.bounds import AheadBound, BehindBound, Bound, BoundKind, LiveBound
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.mesh import STREAMS, Axis, Communicator, Executor, Mesh, Stream
from zeroir.ir.operators import Operator
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import (
    ConstantBinding,
    Flat,
    InputBinding,
    ModuleBufferBinding,
    OptimizerGroup,
    OutputBinding,
    Program,
    ScalarBinding,
    Section,
    Slot,
)
from zeroir.ir.reports import Quantity, ReportBinding
from zeroir.ir.segment import Segment, TensorType
from zeroir.ir.text.lexical import VERSION
from zeroir.ir.text.names import declared_outputs
from zeroir.ir.text.parse_ops import OpParser
from zeroir.ir.text.parse_section import parse_content, parse_section
from zeroir.ir.text.parse_segment import parse_constant, parse_dtype, parse_segment
from zeroir.ir.text.scanner import Scanner


def parse(text: str) -> Program:
    """The program that the text says.

    What is checked is the grammar, and that whole buffers and segments are declared above their
    use; whether the program is valid is for the verifier.

    Raises:
        ParseError: at the first thing that is not understood.
    """
    return _ProgramParser(text.replace("\r\n", "\n")).program()


class _ProgramParser:
    """Reads items in any order; each kind of item keeps its own order."""

    def __init__(self, text: str) -> None:
        self.scanner = Scanner(text)
        self.mesh: Mesh | None = None
        self.streams: tuple[Stream, ...] | None = None
        self.bounds: list[Bound] = []
        self.reports: list[ReportBinding] = []
        self.weight: str | None = None
        self.interleaved: int | None = None
        self.fingerprint: str | None = None
        self.passes: list[str] = []
        self.comms: list[Communicator] = []
        self.flats: list[Flat] = []
        self.buffers: list[Buffer] = []
        self.operators: list[Operator] = []
        self.segments: list[Segment] = []
        self.sections: list[Section] = []
        self.inputs: list[InputBinding] = []
        self.outputs: list[OutputBinding] = []
        self.batch_constants: list[ConstantBinding] = []
        self.module_buffers: list[ModuleBufferBinding] = []
        self.scalars: list[ScalarBinding] = []
        self.groups: list[OptimizerGroup] = []
        self.numels: dict[str, int] = {}
        self.types: dict[
            str, tuple[tuple[TensorType | None, ...], tuple[TensorType | None, ...]]
        ] = {}
        self.ops = OpParser(self.scanner, self.numels, self.types)

    def program(self) -> Program:
        scan = self.scanner
        scan.skip_blank_lines()
        options = self._first_line()
        while not scan.is_at_end:
            self._item()
            scan.end_line()
        if self.mesh is None:
            scan.fail("expected a line 'mesh AXIS=SIZE …' somewhere in the program.")
        return Program(
            mesh=self.mesh,
            comms=tuple(self.comms),
            streams=STREAMS if self.streams is None else self.streams,
            bounds=tuple(self.bounds),
            flats=tuple(self.flats),
            buffers=tuple(self.buffers),
            operators=tuple(self.operators),
            segments=tuple(self.segments),
            sections=tuple(self.sections),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            batch_constants=tuple(self.batch_constants),
            module_buffers=tuple(self.module_buffers),
            scalars=tuple(self.scalars),
            groups=tuple(self.groups),
            reports=tuple(self.reports),
            weight=self.weight,
            interleaved=1 if self.interleaved is None else self.interleaved,
            options=options,
            passes=tuple(self.passes),
            fingerprint=self.fingerprint or "",
        )

    def _first_line(self) -> tuple[tuple[str, str], ...]:
        scan = self.scanner
        start = scan.here()
        if not scan.accept_keyword("zeroir"):
            scan.fail(f"expected a program, which begins with 'zeroir {VERSION}'.")
        version_at = scan.here()
        version = scan.integer()
        if version != VERSION:
            newer = "upgrade zeroir to read it" if version > VERSION else "print it again"
            scan.fail(
                f"this text is version {version} and zeroir reads version {VERSION}: {newer}.",
                version_at if version_at > start else start,
            )
        options: list[tuple[str, str]] = []
        while not _is_at_line_end(scan):
            key = scan.name("an option's name or the end of the line")
            scan.expect("=", f"expected '=' after the option '{key}'.")
            options.append((key, scan.word(f"the value of the option '{key}'")))
        scan.end_line()
        return tuple(options)

    def _item(self) -> None:
        scan = self.scanner
        start = scan.here()
        keyword = scan.name("an item such as 'buffer', 'segment' or 'section'")
        match keyword:
            case "pass":
                self.passes.append(scan.word("the spec of a pass"))
            case "fingerprint":
                self._once(self.fingerprint, keyword, start)
                self.fingerprint = scan.word("a fingerprint")
            case "mesh":
                self._once(self.mesh, keyword, start)
                self.mesh = self._mesh()
            case "comm":
                name = scan.name("a communicator's name")
                axis = scan.attribute("axis", scan.name)
                self.comms.append(Communicator(name=name, axis=axis))
            case "streams":
                self._once(self.streams, keyword, start)
                self.streams = self._streams()
            case "bound":
                self.bounds.append(self._bound())
            case "report":
                self.reports.append(self._report())
            case "weight":
                self._once(self.weight, keyword, start)
                self.weight = self.ops.buffer()
            case "interleaved":
                self._once(self.interleaved, keyword, start)
                self.interleaved = scan.integer()
            case "flat":
                self.flats.append(self._flat())
            case "buffer":
                self._buffer()
            case "operator":
                self.operators.append(self._operator())
            case "input":
                self.inputs.append(self._input())
            case "output":
                self.outputs.append(self._output())
            case "batch_constant":
                path = scan.name("the path of a constant in the batch")
                scan.expect("=")
                self.batch_constants.append(ConstantBinding(path=path, value=parse_constant(scan)))
            case "module_buffer":
                self.module_buffers.append(self._module_buffer())
            case "scalar":
                buffer = self.ops.buffer()
                scan.expect("=")
                self.scalars.append(ScalarBinding(buffer=buffer, values=scan.several(scan.float)))
            case "group":
                self.groups.append(self._group())
            case "segment":
                segment = parse_segment(scan)
                self.segments.append(segment)
                self.types[segment.name] = (segment.inputs, declared_outputs(segment))
            case "section":
                self.sections.append(parse_section(self.ops))
            case _:
                scan.fail(
                    "expected one of pass, fingerprint, mesh, comm, streams, bound, report, weight, "
                    "interleaved, flat, buffer, operator, input, output, batch_constant, module_buffer, scalar, group, "
                    f"segment, section, but found '{keyword}'.",
                    start,
                )

    def _once(self, value: object, keyword: str, start: int) -> None:
        if value is not None:
            self.scanner.fail(f"expected only one '{keyword}' line.", start)

    # --------------------------------------------------------------------------------------- header

    def _mesh(self) -> Mesh:
        scan = self.scanner
        axes: list[Axis] = []
        while not _is_at_line_end(scan):
            name = scan.name("an axis of the mesh")
            scan.expect("=", f"expected '=' after the axis '{name}'.")
            axes.append(Axis(name=name, size=scan.integer()))
        return Mesh(axes=tuple(axes))

    def _streams(self) -> tuple[Stream, ...]:
        scan = self.scanner
        streams: list[Stream] = []
        while not _is_at_line_end(scan):
            name = scan.name("a stream's name")
            scan.expect(":", f"expected ':' after the stream '{name}'.")
            executor = self.scanner.member(Executor, "what executes the stream")
            streams.append(Stream(name=name, executor=executor))
        return tuple(streams)

    def _bound(self) -> Bound:
        scan = self.scanner
        kind = scan.member(BoundKind, "what the bound is about")
        if scan.accept("behind="):
            return BehindBound(kind=kind, behind=scan.name("a stream's name"))
        if scan.accept("live="):
            return LiveBound(kind=kind, live=scan.integer())
        scan.expect("ahead=", "expected 'ahead=', 'behind=' or 'live='.")
        return AheadBound(kind=kind, ahead=scan.integer())

    def _report(self) -> ReportBinding:
        quantity = self.scanner.member(Quantity, "a value that the engine reads")
        return ReportBinding(quantity=quantity, buffer=self.ops.buffer())

    def _flat(self) -> Flat:
        scan = self.scanner
        name = scan.name("a flat's name")
        scan.expect(":")
        dtype = parse_dtype(scan)
        padded_numel = self._numel()
        unit = scan.attribute("unit", scan.name)
        is_trainable = scan.accept_keyword("trainable")
        if not is_trainable and not scan.accept_keyword("frozen"):
            scan.fail("expected 'trainable' or 'frozen'.")
        scan.expect("{")
        scan.end_line()
        slots: list[Slot] = []
        while not scan.accept("}"):
            slots.append(self._slot())
            scan.end_line()
        return Flat(
            name=name,
            unit=unit,
            dtype=dtype,
            is_trainable=is_trainable,
            padded_numel=padded_numel,
            slots=tuple(slots),
        )

    def _slot(self) -> Slot:
        scan = self.scanner
        name = scan.name("a parameter's name or '}'")
        scan.expect(":")
        shape = self._shape()
        offset = scan.attribute("offset", scan.integer)
        aliases: list[str] = []
        while scan.accept("alias="):
            aliases.append(scan.name("another name of the parameter"))
        return Slot(name=name, offset=offset, shape=shape, aliases=tuple(aliases))

    def _buffer(self) -> None:
        scan = self.scanner
        name = self.ops.buffer()
        scan.expect(":")
        dtype = parse_dtype(scan)
        numel = self._numel()
        space = self.scanner.member(Space, "where the buffer lives")
        role = self.scanner.member(Role, "the buffer's role")
        offset = scan.integer() if scan.accept("offset=") else None
        holds = parse_content(self.ops) if scan.accept("=") else None
        buffer = Buffer(
            name=name,
            dtype=dtype,
            numel=numel,
            space=space,
            role=role,
            holds=holds,
            offset=offset,
        )
        self.buffers.append(buffer)
        self.numels[name] = numel

    def _operator(self) -> Operator:
        scan = self.scanner
        name = scan.name("the name of an operator")
        schema = scan.attribute("schema", scan.string)
        module = scan.name("the name of a module") if scan.accept("module=") else ""
        return Operator(name=name, schema=schema, module=module)

    def _input(self) -> InputBinding:
        scan = self.scanner
        path = scan.name("the path of a tensor in the batch")
        scan.expect(":")
        dtype = parse_dtype(scan)
        shape = self._shape()
        scan.expect("->")
        return InputBinding(path=path, buffer=self.ops.buffer(), dtype=dtype, shape=shape)

    def _output(self) -> OutputBinding:
        scan = self.scanner
        path = scan.string("the path of a tensor in the outputs, in double quotes")
        scan.expect(":")
        dtype = parse_dtype(scan)
        shape = self._shape()
        scan.expect("<-")
        return OutputBinding(path=path, buffer=self.ops.buffer(), dtype=dtype, shape=shape)

    def _module_buffer(self) -> ModuleBufferBinding:
        scan = self.scanner
        name = scan.name("the name of a module's buffer")
        scan.expect(":")
        shape = self._shape()
        scan.expect("->")
        buffer = self.ops.buffer()
        data = self._bytes() if scan.accept("data=") else None
        return ModuleBufferBinding(name=name, buffer=buffer, shape=shape, data=data)

    def _bytes(self) -> bytes:
        start = self.scanner.here()
        literal = self.scanner.string("bytes in base64, in double quotes")
        try:
            data = base64.b64decode(literal.encode("ascii"), validate=True)
        except (UnicodeEncodeError, binascii.Error):
            self.scanner.fail("expected bytes in base64.", start)
        return data

    def _group(self) -> OptimizerGroup:
        scan = self.scanner
        name = scan.name("the name of an optimizer group")
        algorithm = self.scanner.member(Algorithm, "an optimizer")
        intervals = scan.several(self._interval)
        lr = scan.attribute("lr", self.ops.buffer)
        hyper = scan.attribute("hyper", self.ops.buffer)
        return OptimizerGroup(
            name=name, algorithm=algorithm, intervals=intervals, lr=lr, hyper=hyper
        )

    def _interval(self) -> tuple[str, int, int]:
        scan = self.scanner
        flat = scan.name("a flat's name")
        scan.expect("[")
        start = scan.integer()
        scan.expect(":")
        stop = scan.integer()
        scan.expect("]")
        return flat, start, stop

    # ---------------------------------------------------------------------------------------- parts

    def _numel(self) -> int:
        self.scanner.expect("[")
        numel = self.scanner.integer()
        self.scanner.expect("]")
        return numel

    def _shape(self) -> tuple[int, ...]:
        return self.scanner.several(self.scanner.integer, "[", "]")


def _is_at_line_end(scan: Scanner) -> bool:
    position = scan.here()
    return scan.text[position : position + 1] in ("", "\n") or scan.text.startswith("//", position)
