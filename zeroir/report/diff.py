"""What changes from one program to another, in the words of the canonical text.

Four things would drown a change in noise, so they are taken out first: ops lose their numbers;
events are named after the op that signals them, so that an inserted op renames none; segments
that compute the same in both programs, by their digest, show their first line only; and where
buffers stand in memory shows only where nothing else differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from zeroir.ir import ops
from zeroir.ir.effects import effects
from zeroir.ir.program import Holding, Pending, Program, Section, State
from zeroir.ir.text.lexical import name
from zeroir.ir.text.names import Names
from zeroir.ir.text.print_ops import op_text
from zeroir.ir.text.printer import header_lines, segment_lines, state_lines
from zeroir.ir.traffic import collective_bytes, on_the_wire
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
    """A unified diff with ``context`` lines around each change, empty where nothing differs.

    Each hunk names the section, or the part of the header, that it stands in.
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


def _paired(
    old: dict[str, list[str]], new: dict[str, list[str]]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Blocks of one title side by side, in an order that both programs agree with."""
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
    """Start and length as the unified format has them; an empty span names the line before it."""
    first = start + 1 if length else start
    return str(first) if length == 1 else f"{first},{length}"


def normalised_lines(program: Program, other: Program) -> list[str]:
    """The lines that :func:`diff` compares with those of ``other``."""
    program, other = _without_noise(program, other)
    return [line for lines in _blocks(program, other).values() for line in lines]


def _without_noise(old: Program, new: Program) -> tuple[Program, Program]:
    """Both without the places of their buffers, unless they differ in nothing else."""
    bare = unplanned(old), unplanned(new)
    return bare if bare[0] != bare[1] else (old, new)


def _blocks(program: Program, other: Program) -> dict[str, list[str]]:
    """The program's lines by where they stand; ``other`` says which segments can be folded."""
    blocks: dict[str, list[str]] = {}
    blocks["header"] = list(header_lines(program))
    known = {segment.digest() for segment in other.segments}
    for segment in program.segments:
        lines = list(segment_lines(segment))
        digest = segment.digest()
        folded = f"{lines[0]} … }}  // {len(segment.nodes)} nodes, digest {digest[:12]}"
        blocks.setdefault("segments", []).extend([folded] if digest in known else lines)
    names = Names(program=program)
    for section, lines in zip(program.sections, section_op_lines(program), strict=True):
        body = [f"section {name(section.name)} {{"]
        relabelled = _relabelled_states(program, section)
        body += state_lines("entry", relabelled[0], names)
        body += [f"  {line}" for line in lines]
        body += state_lines("exit", relabelled[1], names)
        blocks.setdefault(f"section {name(section.name)}", []).extend([*body, "}"])
    return blocks


# ------------------------------------------------------------------------------------------ events


def section_op_lines(program: Program) -> list[list[str]]:
    """For each section the lines of its ops, their events named after the ops that signal them."""
    names = Names(program=program)
    joints = _joint_labels(program)
    found: list[list[str]] = []
    for section in program.sections:
        labels = _labels(section, joints)
        found.append([op_text(_relabelled(op, labels), names) for op in section.body])
    return found


def _relabelled(op: ops.Op, labels: Mapping[str, str]) -> ops.Op:
    if isinstance(op, ops.Wait):
        return replace(op, waited=labels.get(op.waited, op.waited))
    return op if op.event is None else replace(op, event=labels[op.event])


def _relabelled_states(program: Program, section: Section) -> tuple[State, State]:
    labels = _labels(section, _joint_labels(program))
    return _relabelled_state(section.entry, labels), _relabelled_state(section.exit, labels)


def _relabelled_state(state: State, labels: Mapping[str, str]) -> State:
    return State(
        live=state.live,
        holdings=tuple(
            Holding(
                region=holding.region,
                content=holding.content,
                after=None if holding.after is None else labels.get(holding.after, holding.after),
            )
            for holding in state.holdings
        ),
        pending=tuple(
            Pending(event=labels.get(p.event, p.event), stream=p.stream) for p in state.pending
        ),
    )


def _joint_labels(program: Program) -> dict[str, str]:
    """Labels of the events that cross a joint, alike on both of its sides."""
    found: dict[str, str] = {}
    for section in program.sections:
        crossing = {pending.event for pending in section.exit.pending}
        for op in section.body:
            event = None if isinstance(op, ops.Wait) else op.event
            if event is not None and event in crossing and event not in found:
                found[event] = _unused(_label(op), set(found.values()))
    return found


def _labels(section: Section, joints: Mapping[str, str]) -> dict[str, str]:
    crossing = [pending.event for pending in (*section.entry.pending, *section.exit.pending)]
    found = {event: joints.get(event, event) for event in crossing}
    used = set(found.values())
    for op in section.body:
        if isinstance(op, ops.Wait) or op.event is None or op.event in found:
            continue
        found[op.event] = _unused(_label(op), used)
        used.add(found[op.event])
    return found


def _label(op: ops.Op) -> str:
    """What the op is and which buffer it changes first."""
    effect = effects(op)
    changed = [region.buffer for region in effect.writes + effect.accumulates]
    return ".".join([ops.op_name(type(op)), *(*changed, *effect.allocs, *effect.frees)[:1]])


def _unused(label: str, used: set[str]) -> str:
    if label not in used:
        return label
    number = 2
    while f"{label}.{number}" in used:
        number += 1
    return f"{label}.{number}"


# ----------------------------------------------------------------------------------------- summary


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSummary:
    """What a diff amounts to. Bytes are one rank's; collectives those of one step with one micro-step.

    ``ops_added`` and ``ops_removed`` count by op; a changed op is removed and added.
    ``buffers_resized`` are names with old and new bytes.
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
        """Four lines for a person."""
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

    def to_json(self) -> dict[str, object]:
        """The same as plain data."""
        return {
            "ops_added": dict(self.ops_added),
            "ops_removed": dict(self.ops_removed),
            "buffers_added": list(self.buffers_added),
            "buffers_removed": list(self.buffers_removed),
            "buffers_resized": [list(resized) for resized in self.buffers_resized],
            "old_collective_bytes": dict(self.old_collective_bytes),
            "new_collective_bytes": dict(self.new_collective_bytes),
            "old_model_state_bytes": dict(self.old_model_state_bytes),
            "new_model_state_bytes": dict(self.new_model_state_bytes),
        }


def summary(old: Program, new: Program) -> DiffSummary:
    """Count what :func:`diff` shows."""
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
    """How often each op stands in each section: (section, op, line)."""
    return Counter(
        (section.name, ops.op_name(type(op)), line)
        for section, lines in zip(program.sections, section_op_lines(program), strict=True)
        for op, line in zip(section.body, lines, strict=True)
    )


def _by_op(counts: Counter[tuple[str, str, str]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, key, _), count in counts.items():
        found[key] += count
    return {key: found[key] for key in sorted(found)}


def _change(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key, 0) or new.get(key, 0)]
    parts = [
        f"{key} {old.get(key, 0):,}"
        if old.get(key, 0) == new.get(key, 0)
        else f"{key} {old.get(key, 0):,} → {new.get(key, 0):,}"
        for key in keys
    ]
    return f"{sum(old.values()):,} → {sum(new.values()):,} ({', '.join(parts) or 'none'})"
