"""The text of regions and views, printed and parsed, without information that buffers and segments declare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from zeroir.ir.buffers import Region, View
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment, TensorType
from zeroir.ir.size_text import SIZE_TEXT
from zeroir.ir.text.lexical import BARE_NAME, STRING, name
from zeroir.ir.text.scanner import Scanner
from zeroir.ir.text.segments import parse_strided, strided

_REGION: Final = re.compile(
    rf"[ \t]*%(?:({BARE_NAME})|({STRING}))"
    rf"(?:\[({SIZE_TEXT}):({SIZE_TEXT})\](?:@(?:({BARE_NAME})|({STRING})))?"
    rf"(?:\[(-?[0-9]{{1,30}}):(-?[0-9]{{1,30}})\])?)?"
)


@dataclass(frozen=True, kw_only=True)
class Names:
    """The text of regions and views in one program."""

    program: Program

    @cached_property
    def _whole_numel(self) -> dict[str, int]:
        return {buffer.name: buffer.numel for buffer in self.program.buffers}

    @cached_property
    def _input_types(self) -> dict[str, tuple[TensorType | None, ...]]:
        return {segment.name: segment.inputs for segment in self.program.segments}

    @cached_property
    def _output_types(self) -> dict[str, tuple[TensorType | None, ...]]:
        return {segment.name: declared_outputs(segment) for segment in self.program.segments}

    def inputs(self, segment: str) -> tuple[TensorType | None, ...]:
        """Return the declared types of a segment's inputs, none for an unknown segment."""
        return self._input_types.get(segment, ())

    def outputs(self, segment: str) -> tuple[TensorType | None, ...]:
        """Return the declared types of a segment's outputs, none for an unknown segment."""
        return self._output_types.get(segment, ())

    def region(self, region: Region) -> str:
        """Return ``%b``, ``%b[0:64]``, ``%b[0:64]@dp`` or ``%b[0:64]@dp[8:16]``."""
        text = "%" + name(region.buffer)
        if region.shard is not None or region.part is not None:
            shard = "" if region.shard is None else f"@{name(region.shard)}"
            part = "" if region.part is None else f"[{region.part[0]}:{region.part[1]}]"
            return f"{text}[{region.offset}:{region.stop}]{shard}{part}"
        if region.offset == 0 and self._whole_numel.get(region.buffer) == region.numel:
            return text
        return f"{text}[{region.offset}:{region.stop}]"

    def view(self, view: View, declared: TensorType | None) -> str:
        """Return a region, and its shape where the segment does not declare the same."""
        text = self.region(view.region)
        if declared is not None and (declared.shape, declared.stride) == (view.shape, view.stride):
            return text
        return text + "{" + strided(view.shape, view.stride) + "}"


def declared_outputs(segment: Segment) -> tuple[TensorType | None, ...]:
    """Return the type of every output, None for one that is undefined or does not exist."""
    types = segment.types()
    return tuple(types[i] if 0 <= i < len(types) else None for i in segment.outputs)


class TextReader:
    """The cursor, and the declarations so far: ``numels`` of buffers, ``inputs`` and ``outputs`` of segments.

    ``called`` is the segment that was named last.
    """

    def __init__(self, text: str) -> None:
        self.scanner = Scanner(text)
        self.numels: dict[str, int] = {}
        self.inputs: dict[str, tuple[TensorType | None, ...]] = {}
        self.outputs: dict[str, tuple[TensorType | None, ...]] = {}
        self.called = ""

    def called_segment(self) -> str:
        """Read the segment of a call, whose operands follow."""
        self.called = self.scanner.sigil_name("@", "a segment such as '@block.forward'")
        return self.called

    def region(self, what: str = "a region such as '%b' or '%b[0:64]'") -> Region:
        """Read ``%b``, ``%b[0:64]``, ``%b[0:64]@dp`` or ``%b[0:64]@dp[8:16]``."""
        scan = self.scanner
        match = _REGION.match(scan.text, scan.position)
        if match is None:
            scan.fail(f"expected {what}.")
        buffer = match[1] or scan.unquote(match[2], match.start(2))
        position = scan.here()
        scan.position = match.end()
        if match[3] is not None:
            shard = match[5] or (scan.unquote(match[6], match.start(6)) if match[6] else None)
            if shard is None and scan.text.startswith("@", match.end()):
                scan.fail("expected a mesh axis right after '@'.", match.end() + 1)
            start = scan.size_of(match[3], match.start(3))
            part = None if match[7] is None else (int(match[7]), int(match[8]))
            numel = scan.size_of(match[4], match.start(4)) - start
            return Region(buffer=buffer, offset=start, numel=numel, shard=shard, part=part)
        if scan.text.startswith("[", match.end()):
            scan.fail("expected a range such as '[0:64]', without spaces.", match.end())
        if buffer not in self.numels:
            scan.fail(
                f"expected a 'buffer %{buffer}' line above, since the whole of it is named here.",
                position,
            )
        return Region(buffer=buffer, offset=0, numel=self.numels[buffer])

    def view(self, declared: TensorType | None) -> View:
        """Read a region and its shape; the declared shape where none is given."""
        region = self.region()
        scan = self.scanner
        if scan.text.startswith("{", scan.position):
            shape, stride = parse_strided(scan, "{", "}")
        elif declared is not None:
            shape, stride = declared.shape, declared.stride
        else:
            is_known = self.called in self.inputs
            what = "declares no such operand" if is_known else "is declared nowhere above"
            scan.fail(f"expected a shape such as '{{2,3}}', since @{self.called} {what}.")
        return View(region=region, shape=shape, stride=stride)
