"""The differences of two programs, as lines of the canonical text.

Four things would hide the changes, so they are removed first: the numbers of ops; the names of events, which are
replaced by those of the ops that signal them, so that an inserted op renames none; the nodes of segments that are equal
in both programs, by their digest; and the placement of buffers in memory, unless nothing else differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.traffic import collective_bytes, on_the_wire
from zeroir.ir.program import Program, Section, State
from zeroir.ir.text.lexical import name
from zeroir.ir.text.names import Names
from zeroir.ir.text.op_lines import op_text
from zeroir.ir.text.printer import header_lines, state_lines
from zeroir.ir.text.segments import segment_lines
from zeroir.memory.placement import unplanned
from zeroir.memory.states import model_state_bytes


def diff(
    old: Program,
    new: Program,
    *,
    context: int = 3,
    old_name: str = "old",
    new_name: str = "new",
) -> str:
    """Return a unified diff with ``context`` lines around each change, empty if the programs are equal.

    Each hunk names its section, or ``header`` or ``segments``.
    """
    old, new = _without_noise(old, new)
    old_blocks, new_blocks = _blocks(old, new), _blocks(new, old)
    lines: list[str] = []
    old_start = new_start = 0
    for title, old_lines, new_lines in _paired(old_blocks, new_blocks):
        lines += _hunks(old_lines, new_lines, old_start, new_start, title, context)
        old_start += len(old_lines)
        new_start += len(new_lines)
    if not lines:
        return ""
    return "\n".join([f"--- {old_name}", f"+++ {new_name}", *lines]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedOp:
    """An op of one program and its counterpart in the other; ``is_equal`` if their lines are equal.

    Indices are those within the section in each program; None if the program has no such op.
    """

    old: int | None
    new: int | None
    is_equal: bool


def aligned_ops(old: Program, new: Program, section: str) -> list[AlignedOp]:
    """Align the ops of a section of both programs, in an order consistent with both.

    Two ops are counterparts if both write the same buffer first, or, as computes, call the same segment of the same
    unit. :func:`diff` shows such a pair as one line removed and one added, unless it is equal.
    """
    old, new = _without_noise(old, new)
    names = Names(program=old), Names(program=new)
    bodies = [
        next((s.body for s in _relabelled_sections(program) if s.name == section), ())
        for program in (old, new)
    ]
    old_keys, new_keys = ([_key(op) for op in body] for body in bodies)
    old_texts, new_texts = (
        [op_text(op, own) for op in body] for body, own in zip(bodies, names, strict=True)
    )
    pairs: list[AlignedOp] = []
    for tag, a, b, c, d in SequenceMatcher(None, old_keys, new_keys, autojunk=False).get_opcodes():
        if tag == "equal":
            for i, j in zip(range(a, b), range(c, d), strict=True):
                pairs.append(AlignedOp(old=i, new=j, is_equal=old_texts[i] == new_texts[j]))
            continue
        pairs += [AlignedOp(old=i, new=None, is_equal=False) for i in range(a, b)]
        pairs += [AlignedOp(old=None, new=j, is_equal=False) for j in range(c, d)]
    return pairs


def _key(op: ops.Op) -> str:
    match op:
        case ops.Compute():
            return f"{ops.op_name(type(op))} {op.segment} {op.unit}"
        case ops.Wait():
            return f"{ops.op_name(type(op))} {op.waited} {op.on}"
        case _:
            return _label(op)


def _paired(
    old: dict[str, list[str]], new: dict[str, list[str]]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the blocks of the same title in pairs, in an order consistent with both programs."""
    matcher = SequenceMatcher(None, list(old), list(new), autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            yield from ((title, old[title], new[title]) for title in list(old)[a:b])
            continue
        yield from ((title, old[title], []) for title in list(old)[a:b])
        yield from ((title, [], new[title]) for title in list(new)[c:d])


def _hunks(
    old: list[str], new: list[str], old_start: int, new_start: int, title: str, context: int
) -> Iterator[str]:
    if old == new:
        return
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(context):
        _, a, _, c, _ = group[0]
        _, _, b, _, d = group[-1]
        yield f"@@ -{_span(old_start + a, b - a)} +{_span(new_start + c, d - c)} @@ {title}"
        for tag, a, b, c, d in group:
            if tag == "equal":
                yield from (f" {line}" for line in old[a:b])
                continue
            yield from (f"-{line}" for line in old[a:b])
            yield from (f"+{line}" for line in new[c:d])


def _span(start: int, length: int) -> str:
    """Return start and length in the unified format; an empty span has the number of the line before it."""
    first = start + 1 if length else start
    return str(first) if length == 1 else f"{first},{length}"


def _without_noise(old: Program, new: Program) -> tuple[Program, Program]:
    """Return both programs without the placement of their buffers, unless nothing else differs."""
    bare = unplanned(old), unplanned(new)
    return bare if bare[0] != bare[1] else (old, new)


def _blocks(program: Program, compared: Program) -> dict[str, list[str]]:
    """Return the lines of the program by block; segments that ``compared`` also has are folded."""
    blocks = {"header": list(header_lines(program))}
    shared = {segment.digest() for segment in compared.segments}
    for segment in program.segments:
        lines = list(segment_lines(segment))
        digest = segment.digest()
        folded = f"{lines[0]} … }}  // {len(segment.nodes)} nodes, digest {digest[:12]}"
        blocks.setdefault("segments", []).extend([folded] if digest in shared else lines)
    names = Names(program=program)
    for section in _relabelled_sections(program):
        title = f"section {name(section.name)}"
        lines = [
            f"{title} {{",
            *state_lines("entry", section.entry, names),
            *(f"  {op_text(op, names)}" for op in section.body),
            *state_lines("exit", section.exit, names),
            "}",
        ]
        blocks.setdefault(title, []).extend(lines)
    return blocks


# ------------------------------------------------------------------------------------------ events


def _relabelled_sections(program: Program) -> list[Section]:
    """Return the sections with their events renamed after the ops that signal them."""
    boundaries = _boundary_labels(program)
    return [_relabelled_section(section, boundaries) for section in program.sections]


def _relabelled_section(section: Section, boundaries: Mapping[str, str]) -> Section:
    labels = _labels(section, boundaries)
    return replace(
        section,
        entry=_relabelled_state(section.entry, labels),
        body=tuple(_relabelled_op(op, labels) for op in section.body),
        exit=_relabelled_state(section.exit, labels),
    )


def _relabelled_op(op: ops.Op, labels: Mapping[str, str]) -> ops.Op:
    if isinstance(op, ops.Wait):
        return replace(op, waited=labels.get(op.waited, op.waited))
    return op if op.event is None else replace(op, event=labels[op.event])


def _relabelled_state(state: State, labels: Mapping[str, str]) -> State:
    return replace(
        state,
        holdings=tuple(
            replace(h, after=None if h.after is None else labels.get(h.after, h.after))
            for h in state.holdings
        ),
        pending=tuple(replace(p, event=labels.get(p.event, p.event)) for p in state.pending),
    )


def _boundary_labels(program: Program) -> dict[str, str]:
    """Return labels of the events that cross a boundary, the same on both of its sides."""
    labels: dict[str, str] = {}
    for section in program.sections:
        crossing = {pending.event for pending in section.exit.pending}
        for op in section.body:
            event = None if isinstance(op, ops.Wait) else op.event
            if event is not None and event in crossing and event not in labels:
                labels[event] = _unused(_label(op), labels.values())
    return labels


def _labels(section: Section, boundaries: Mapping[str, str]) -> dict[str, str]:
    """Return a label for each event of a section."""
    crossing = [pending.event for pending in (*section.entry.pending, *section.exit.pending)]
    labels = {event: boundaries.get(event, event) for event in crossing}
    used = set(labels.values())
    for op in section.body:
        if isinstance(op, ops.Wait) or op.event is None or op.event in labels:
            continue
        labels[op.event] = _unused(_label(op), used)
        used.add(labels[op.event])
    return labels


def _label(op: ops.Op) -> str:
    """Return the name of the op and the first buffer that it changes."""
    effect = effects(op)
    changed = [region.buffer for region in effect.writes + effect.accumulates]
    return ".".join([ops.op_name(type(op)), *(*changed, *effect.allocs, *effect.frees)[:1]])


def _unused(label: str, used: Collection[str]) -> str:
    if label not in used:
        return label
    number = 2
    while f"{label}.{number}" in used:
        number += 1
    return f"{label}.{number}"


# ----------------------------------------------------------------------------------------- summary


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSummary:
    """The size of a diff. Bytes are those of one rank; for collectives, of one step with one micro-step.

    ``ops_added`` and ``ops_removed`` count the ops of each name; a changed op counts in both. ``buffers_resized`` are
    names with the old and the new bytes.
    """

    ops_added: Mapping[str, int]
    ops_removed: Mapping[str, int]
    buffers_added: tuple[str, ...]
    buffers_removed: tuple[str, ...]
    buffers_resized: tuple[tuple[str, int, int], ...]
    old_collective_bytes: Mapping[str, int]
    new_collective_bytes: Mapping[str, int]
    old_model_state_bytes: Mapping[str, int]
    new_model_state_bytes: Mapping[str, int]

    def __str__(self) -> str:
        """Format the summary in four lines."""
        keys = sorted({*self.ops_added, *self.ops_removed})
        changed = [
            f"{key} +{self.ops_added.get(key, 0)} -{self.ops_removed.get(key, 0)}" for key in keys
        ]
        shrunk = sum(new < old for _, old, new in self.buffers_resized)
        grown = len(self.buffers_resized) - shrunk
        sent = _change(
            on_the_wire(self.old_collective_bytes), on_the_wire(self.new_collective_bytes)
        )
        states = _change(self.old_model_state_bytes, self.new_model_state_bytes)
        added, removed = len(self.buffers_added), len(self.buffers_removed)
        return (
            f"ops                {', '.join(changed) or 'equal'}\n"
            f"buffers            +{added} -{removed}, {shrunk} shrunk, {grown} grown\n"
            f"bytes on the wire  {sent}\n"
            f"model state bytes  {states}"
        )


def summary(old: Program, new: Program) -> DiffSummary:
    """Count the differences that :func:`diff` shows."""
    removed, added = _op_counts(old), _op_counts(new)
    old_bytes = {buffer.name: buffer.size_bytes for buffer in old.buffers}
    new_bytes = {buffer.name: buffer.size_bytes for buffer in new.buffers}
    return DiffSummary(
        ops_added=_by_op(added - removed),
        ops_removed=_by_op(removed - added),
        buffers_added=tuple(key for key in new_bytes if key not in old_bytes),
        buffers_removed=tuple(key for key in old_bytes if key not in new_bytes),
        buffers_resized=tuple(
            (key, size, new_bytes[key])
            for key, size in old_bytes.items()
            if key in new_bytes and new_bytes[key] != size
        ),
        old_collective_bytes=collective_bytes(old),
        new_collective_bytes=collective_bytes(new),
        old_model_state_bytes=model_state_bytes(old),
        new_model_state_bytes=model_state_bytes(new),
    )


def _op_counts(program: Program) -> Counter[tuple[str, str, str]]:
    """Count the ops with the same line of text in each section, by section, name and line."""
    names = Names(program=program)
    return Counter(
        (section.name, ops.op_name(type(op)), op_text(op, names))
        for section in _relabelled_sections(program)
        for op in section.body
    )


def _by_op(counts: Counter[tuple[str, str, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (_, op, _), count in counts.items():
        totals[op] += count
    return dict(sorted(totals.items()))


def _change(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key, 0) or new.get(key, 0)]
    parts = [
        f"{key} {old.get(key, 0):,}"
        if old.get(key, 0) == new.get(key, 0)
        else f"{key} {old.get(key, 0):,} → {new.get(key, 0):,}"
        for key in keys
    ]
    return f"{sum(old.values()):,} → {sum(new.values()):,} ({', '.join(parts) or 'none'})"
