"""The text of a segment, printed and parsed: its nodes, their arguments and their types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Constant
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, Symbol, TensorType
from zeroir.ir.segments.size_numbers import FUNCTION_TEXT, FUNCTIONS, SizeNumber
from zeroir.ir.size_text import SIZE_TEXT
from zeroir.ir.sizes import RESERVED_NAMES
from zeroir.ir.text.lexical import BARE_NAME, STRING, name, number, quote
from zeroir.ir.text.scanner import Scanner

_DTYPES: Final = {dtype.value: dtype for dtype in DType}
_KEYWORDS: Final[dict[str, bool | DType | None]] = {
    "none": None,
    "true": True,
    "false": False,
    **_DTYPES,
}
_KEYWORD: Final = re.compile(r"[ \t]*([a-z][a-z0-9_]*)(?![A-Za-z0-9_.])")
_KEY: Final = re.compile(rf"[ \t]*(?:({BARE_NAME})|({STRING}))[ \t]*=")
_INTEGER: Final = re.compile(r"[ \t]*(-?[0-9]{1,1000})(?![A-Za-z0-9_.])")
_REF: Final = re.compile(r"[ \t]*\$(-?[0-9]{1,30})(?![A-Za-z0-9_.])")
_SHAPE: Final = re.compile(
    rf"((?:{SIZE_TEXT}(?:,{SIZE_TEXT})*)?)(?:;((?:{SIZE_TEXT}(?:,{SIZE_TEXT})*)?))?"
)
_SIZE_START: Final = re.compile(r"-?(?:\(|([A-Za-z_][A-Za-z0-9_]*))")
_OPERATORS: Final = ("*", "+", "-")
_MAX_DEPTH: Final = 64
"""The largest depth of lists in arguments; torch's own schemas need 2."""


def parse_segment(scan: Scanner) -> Segment:
    """Read a segment; the cursor is right after its keyword."""
    name = scan.sigil_name("@", "a segment such as '@block.forward'")
    inputs: list[TensorType] = []
    scan.expect("(")
    while not scan.accept(")"):
        if inputs:
            scan.expect(",", "expected ',' or ')'.")
        _defined(scan, len(inputs))
        scan.expect(":")
        inputs.append(parse_type(scan))
    workspace: list[tuple[str, int]] = []
    if scan.accept_keyword("workspace"):
        while not scan.accept("{"):
            backend = scan.name("a kernel backend or '{'")
            scan.expect("=", f"expected '=' after the backend '{backend}'.")
            workspace.append((backend, scan.integer()))
    else:
        scan.expect("{")
    scan.end_line()
    nodes: list[Node] = []
    number_of_values = len(inputs)
    while not scan.accept_keyword("return"):
        node = _node(scan, number_of_values)
        nodes.append(node)
        number_of_values += len(node.results)
        scan.end_line()
    outputs = scan.several(lambda: _ref(scan))
    scan.end_line()
    scan.expect("}")
    return Segment(
        name=name,
        inputs=tuple(inputs),
        nodes=tuple(nodes),
        outputs=outputs,
        workspace_bytes=tuple(workspace),
    )


def parse_dtype(scan: Scanner) -> DType:
    """Read an element type."""
    position = scan.here()
    match = _KEYWORD.match(scan.text, scan.position)
    dtype = None if match is None else _DTYPES.get(match[1])
    if match is None or dtype is None:
        scan.fail(f"expected an element type, one of {', '.join(_DTYPES)}.", position)
    scan.position = match.end()
    return dtype


def parse_type(scan: Scanner) -> TensorType:
    """Read ``f32[2,3]``, or ``f32[2,3;1,2]`` where the strides are not row-major."""
    dtype = parse_dtype(scan)
    shape, stride = parse_strided(scan, "[", "]")
    return TensorType(dtype=dtype, shape=shape, stride=stride)


def parse_strided(
    scan: Scanner, opening: str, closing: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read a shape and its strides between brackets; without strides it is row-major."""
    scan.expect(opening)
    match = _SHAPE.match(scan.text, scan.position)
    if match is None or not scan.text.startswith(closing, match.end()):
        scan.fail(f"expected a shape such as '2,3' or '2,3;3,1', without spaces, and '{closing}'.")
    scan.position = match.end() + len(closing)
    shape = _sizes(scan, match[1], match.start(1))
    if match[2] is None:
        return shape, contiguous_stride(shape)
    return shape, _sizes(scan, match[2], match.start(2))


def _sizes(scan: Scanner, text: str, position: int) -> tuple[int, ...]:
    if not text:
        return ()
    if scan.dims or not text.replace(",", "").replace("-", "").isdecimal():
        return tuple([scan.size_of(size, position) for size in text.split(",")])
    return tuple(map(int, text.split(",")))


def _ref(scan: Scanner) -> int:
    match = _REF.match(scan.text, scan.position)
    if match is None:
        scan.fail("expected a value such as '$0'.")
    scan.position = match.end()
    return int(match[1])


def _defined(scan: Scanner, number: int) -> None:
    position = scan.here()
    if _ref(scan) != number:
        scan.fail(f"expected ${number}: values are numbered in order, inputs first.", position)


def _node(scan: Scanner, first: int) -> Node:
    count = 0
    while scan.text.startswith("$", scan.here()):
        _defined(scan, first + count)
        count += 1
        if not scan.accept(","):
            scan.expect("=", "expected ',' or '='.")
            break
    op = scan.name("an op such as 'aten.mm.default', or 'return'")
    args: list[NodeArg] = []
    kwargs: list[tuple[str, NodeArg]] = []
    scan.expect("(")
    is_first = True
    while not scan.accept(")"):
        if not is_first:
            scan.expect(",", "expected ',' or ')'.")
        is_first = False
        position = scan.here()
        key = _KEY.match(scan.text, scan.position)
        if key is not None:
            scan.position = key.end()
            text = key[1] or scan.unquote(key[2], key.start(2))
            kwargs.append((text, _arg(scan, 0)))
        elif kwargs:
            scan.fail("expected 'name=value': positional arguments stand first.", position)
        else:
            args.append(_arg(scan, 0))
    scan.expect(":")
    position = scan.here()
    if count == 1:
        results: tuple[TensorType | None, ...] = (_result(scan),)
    else:
        results = scan.several(lambda: _result(scan))
    if len(results) != count:
        scan.fail(
            f"expected {count} types, one for each result, but found {len(results)}.", position
        )
    flops = scan.optional("flops", scan.size, 0)
    workspace_bytes: int | None = scan.optional("workspace", scan.integer, None)
    source = scan.string("the line of the model, as a string") if scan.accept_keyword("at") else ""
    return Node(
        op=op,
        args=tuple(args),
        kwargs=tuple(kwargs),
        results=results,
        flops=flops,
        workspace_bytes=workspace_bytes,
        source=source,
    )


def _result(scan: Scanner) -> TensorType | None:
    return None if scan.accept_keyword("none") else parse_type(scan)


def _arg(scan: Scanner, depth: int) -> NodeArg:
    position = scan.here()
    match scan.text[position : position + 1]:
        case "$":
            return Ref(_ref(scan))
        case '"':
            return scan.string()
        case "#":
            return Symbol(scan.sigil_name("#", "a symbol"))
        case "[":
            if depth == _MAX_DEPTH:
                scan.fail(f"expected lists to nest at most {_MAX_DEPTH} deep.", position)
            return scan.several(lambda: _arg(scan, depth + 1), "[", "]")
        case _:
            function = FUNCTION_TEXT.match(scan.text, position)
            return _constant(scan) if function is None else _size_number(scan, function, depth)


def _size_number(scan: Scanner, function: re.Match[str], depth: int) -> SizeNumber:
    """Read ``sqrt(length)``, or another function of numbers."""
    position = scan.here()
    scan.position = function.end() - 1
    count, _ = FUNCTIONS[function[1]]
    if depth == _MAX_DEPTH:
        scan.fail(f"expected numbers to nest at most {_MAX_DEPTH} deep.", position)
    operands = scan.several(lambda: _arg(scan, depth + 1))
    numbers = tuple(
        each for each in operands if isinstance(each, int | float) and not isinstance(each, bool)
    )
    if len(numbers) < len(operands) or len(operands) != count:
        scan.fail(f"expected {count} numbers in '{function[1]}(...)'.", position)
    return SizeNumber(function[1], numbers)


def parse_constant(scan: Scanner) -> Constant:
    """Read ``none``, ``true``, ``false``, a number or a string."""
    position = scan.here()
    value = scan.string() if scan.text[position : position + 1] == '"' else _constant(scan)
    if isinstance(value, DType):
        scan.fail("expected none, true, false, a number or a string.", position)
    return value


def _constant(scan: Scanner) -> Constant | DType:
    match = _INTEGER.match(scan.text, scan.position)
    if match is not None and scan.text[match.end() : match.end() + 1] not in _OPERATORS:
        scan.position = match.end()
        return int(match[1])
    match = _KEYWORD.match(scan.text, scan.position)
    if match is not None and match[1] in _KEYWORDS:
        scan.position = match.end()
        return _KEYWORDS[match[1]]
    position = scan.here()
    size = _SIZE_START.match(scan.text, position)
    if size is not None and scan.dims and size[1] in {None, *scan.dims} - RESERVED_NAMES:
        return scan.size()
    if scan.text[position : position + 1] not in "-0123456789in" or position == len(scan.text):
        scan.fail(
            "expected an argument: a value such as '$0', a number, true, false, none, "
            "an element type, a string, a #symbol or a [list]."
        )
    return scan.float()


# --------------------------------------------------------------------------------------- printing


def segment_lines(segment: Segment) -> Iterator[str]:
    """Yield a segment: its inputs, one node a line with its results' types, and the values that it returns."""
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
    args = [argument_text(arg) for arg in node.args]
    args += [f"{name(key)}={argument_text(arg)}" for key, arg in node.kwargs]
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


def _type_text(kind: TensorType) -> str:
    return kind.dtype.value + "[" + strided(kind.shape, kind.stride) + "]"


def argument_text(arg: NodeArg) -> str:
    """Return an argument of a node, or a constant of the batch."""
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
        case SizeNumber():
            return f"{arg.function}({', '.join(map(argument_text, arg.operands))})"
        case float():
            return number(arg)
        case str():
            return quote(arg)
        case _:
            return "[" + ", ".join([argument_text(item) for item in arg]) + "]"


def strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Return ``2,3``, or ``2,3;1,2`` where the strides are not row-major."""
    text = ",".join(map(str, shape))
    if stride == contiguous_stride(shape):
        return text
    return text + ";" + ",".join(map(str, stride))
