"""Shared by all checks: the findings so far, and the names of ops and regions in messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Role
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.verify.report import Finding

FINDINGS_LIMIT = 100
"""The most findings of one stage; further ones are dropped."""


@dataclass
class Findings:
    """Collects findings about one program, with the op's text, its neighbours and the buffers' history."""

    program: Program
    items: list[Finding] = field(default_factory=list)
    _seen: set[tuple[str, str | None, int | None, tuple[str, ...]]] = field(default_factory=set)
    _histories: dict[str, Mapping[str, list[str]]] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether further findings are dropped."""
        return len(self.items) >= FINDINGS_LIMIT

    def add(
        self,
        code: str,
        sentence: str,
        *,
        section: Section | None = None,
        line: int | None = None,
        buffers: Iterable[str] = (),
        advice: str = "",
        is_of_exit: bool = False,
    ) -> None:
        """Add a finding, unless there is one with this code at the same op, or without an op with the same sentence.

        With ``is_of_exit`` the finding is about the section's exit and only points to an op: then one finding is kept
        for each set of buffers.
        """
        buffers = tuple(buffers)
        what = (sentence,) if line is None else buffers if is_of_exit else ()
        key = (code, None if section is None else section.name, line, what)
        if key in self._seen:
            return
        self._seen.add(key)
        if self.is_full:
            return
        names = tuple(dict.fromkeys(buffers))
        op_text = ""
        window: tuple[str, ...] = ()
        sources: tuple[str, ...] = ()
        if section is not None and line is not None:
            op_text, window = around(self.program, section, line)
            sources = model_sources(self.program, section.body[line])
        history = () if section is None else tuple(self._history(section, names[:4]))
        self.items.append(
            Finding(
                code=code,
                sentence=sentence,
                section=None if section is None else section.name,
                line=line,
                op=op_text,
                window=window,
                history=history,
                sources=sources,
                advice=advice,
            )
        )

    def _history(self, section: Section, names: Iterable[str]) -> Iterator[str]:
        """Yield for each buffer a line such as ``%b: allocated @12, gathered @14``, with at most eight events."""
        if section.name not in self._histories:
            self._histories[section.name] = _events(section)
        for name in names:
            events = self._histories[section.name].get(name, ["not touched in this section"])
            if len(events) > 8:
                events = [*events[:4], "...", *events[-3:]]
            yield f"%{name}: {', '.join(events)}"


def around(program: Program, section: Section, line: int) -> tuple[str, tuple[str, ...]]:
    """Return the op's text, and a window of five ops around it in which it is marked.

    The text is the ``repr`` where the program's names cannot be printed.
    """
    from zeroir.ir.text.names import Names
    from zeroir.ir.text.op_lines import op_text

    names = Names(program=program)
    low = max(0, min(line - 2, len(section.body) - 5))
    texts: dict[int, str] = {}
    for i, op in enumerate(section.body[low : low + 5], low):
        try:
            texts[i] = op_text(op, names)
        except (KeyError, ValueError, IndexError):
            texts[i] = repr(op)
    window = tuple(f"{'>' if i == line else ' '}{i:5d}: {text}" for i, text in texts.items())
    return texts[line], window


def model_sources(program: Program, op: Op) -> tuple[str, ...]:
    """Return the lines of the model that a compute op came from, at most three."""
    if not isinstance(op, ops.Compute) or op.segment not in program.segment_by_name:
        return ()
    nodes = program.segment_by_name[op.segment].nodes
    return tuple(dict.fromkeys(node.source for node in nodes if node.source))[:3]


def _events(section: Section) -> Mapping[str, list[str]]:
    """Return the history of each buffer in a section: its uses by ops, in order."""
    events: dict[str, list[str]] = {}
    for i, op in enumerate(section.body):
        op_effects = effects(op)
        events_here = dict.fromkeys((region.buffer for region in op_effects.reads), f"read @{i}")
        written = (region.buffer for region in (*op_effects.writes, *op_effects.accumulates))
        events_here |= dict.fromkeys(written, f"{op.participle} @{i}")
        events_here |= dict.fromkeys(op_effects.frees, f"released @{i}")
        events_here |= dict.fromkeys(op_effects.allocs, f"allocated @{i}")
        for name, event in events_here.items():
            events.setdefault(name, []).append(event)
    return events


def last_touch(section: Section, name: str, *, is_write: bool) -> int | None:
    """Return the line of the section's last op that uses (or writes) a buffer."""
    last: int | None = None
    for line, op in enumerate(section.body):
        op_effects = effects(op)
        regions = (*op_effects.writes, *op_effects.accumulates)
        if not is_write:
            regions = (*regions, *op_effects.reads)
        if name in (*op_effects.allocs, *(region.buffer for region in regions)):
            last = line
    return last


def title(op: Op) -> str:
    """Return the name of an op for messages."""
    name = ops.op_name(type(op))
    return f"{name} @{op.segment}" if isinstance(op, ops.Compute) else name


def spell(region: Region, program: Program) -> str:
    """Return the region in the program's text format."""
    buffer = program.buffer_by_name.get(region.buffer)
    is_whole = buffer is not None and (region.offset, region.numel) == (0, buffer.numel)
    if is_whole and region.shard is None and region.part is None:
        return f"%{region.buffer}"
    suffix = "" if region.shard is None else f"@{region.shard}"
    suffix += "" if region.part is None else f"[{region.part[0]}:{region.part[1]}]"
    return f"%{region.buffer}[{region.offset}:{region.stop}]{suffix}"


def page_names(program: Program) -> frozenset[str]:
    """Return the buffers that are pages."""
    return frozenset(buffer.name for buffer in program.buffers if buffer.role is Role.PAGE)
