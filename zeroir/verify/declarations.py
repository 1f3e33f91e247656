"""The header by itself: names are declared once, flats are laid out, contents and states speak of what exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from zeroir.ir.allowlist import refusal
from zeroir.ir.bounds import AheadBound, BehindBound
from zeroir.ir.buffers import Buffer, Region, whole
from zeroir.ir.contents import GRAD, MASTER, Content, FlatContent
from zeroir.ir.mesh import HOST
from zeroir.ir.program import (
    PARAMETER_ALIGNMENT_NUMEL,
    SECTION_NAMES,
    Program,
    State,
)
from zeroir.ir.segment import Segment
from zeroir.ir.views import mistyped
from zeroir.verify.context import Findings, spell
from zeroir.verify.crossing import JOINTS
from zeroir.verify.provenance import check_provenance

PLACE_ALIGNMENT_BYTES: Final = 64
"""Of places in planned memory: what vector instructions on a CPU take at once. NCCL and kernels on a GPU ask for 16."""


def check_declarations(program: Program, findings: Findings) -> None:
    """Check the header, the flats, the segments, the states and the joints."""
    _check_names(program, findings)
    _check_mesh(program, findings)
    _check_flats(program, findings)
    for buffer in program.buffers:
        _check_buffer(program, buffer, findings)
    _check_plan(program, findings)
    for segment in program.segments:
        _check_segment(segment, findings)
    _check_bindings(program, findings)
    check_provenance(program, findings)
    for section in program.sections:
        for state in (section.entry, section.exit):
            _check_state(program, section.name, state, findings)
    _check_joints(program, findings)


def _duplicates(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    found: list[str] = []
    for name in names:
        if name in seen:
            found.append(name)
        seen.add(name)
    return found


def _check_names(program: Program, findings: Findings) -> None:
    kinds: tuple[tuple[str, list[str]], ...] = (
        ("axis", [axis.name for axis in program.mesh.axes]),
        ("stream", [stream.name for stream in program.streams]),
        ("communicator", [comm.name for comm in program.comms]),
        ("flat", [flat.name for flat in program.flats]),
        ("buffer", [buffer.name for buffer in program.buffers]),
        ("segment", [segment.name for segment in program.segments]),
        ("section", [section.name for section in program.sections]),
        ("bound on", [bound.kind.value for bound in program.bounds]),
        (
            "parameter",
            [n for flat in program.flats for s in flat.slots for n in (s.name, *s.aliases)],
        ),
    )
    for kind, names in kinds:
        for name in _duplicates(names):
            findings.add("Z002", f"{kind} {name} is declared twice")
    streams = {stream.name for stream in program.streams}
    for bound in program.bounds:
        if isinstance(bound, BehindBound) and bound.behind not in streams:
            findings.add(
                "Z001",
                f"the bound on {bound.kind.value} names the undeclared stream {bound.behind}",
            )
        if isinstance(bound, AheadBound) and bound.ahead < 0:
            findings.add("Z008", f"the bound on {bound.kind.value} lets {bound.ahead} run ahead")
    for section in program.sections:
        if section.name not in SECTION_NAMES:
            known = ", ".join(SECTION_NAMES)
            findings.add("Z001", f"section {section.name} is none of {known}")


def _check_mesh(program: Program, findings: Findings) -> None:
    for axis in program.mesh.axes:
        if axis.size < 1:
            findings.add("Z008", f"mesh axis {axis.name} has size {axis.size}")
    for comm in program.comms:
        if not program.mesh.has_axis(comm.axis):
            findings.add(
                "Z001", f"communicator {comm.name} runs over the undeclared axis {comm.axis}"
            )
    if any(stream.name == HOST for stream in program.streams):
        findings.add(
            "Z008", "a stream cannot be called host: that is the thread that issues the ops"
        )


def _check_flats(program: Program, findings: Findings) -> None:
    for flat in program.flats:
        stop = 0
        for slot in sorted(flat.slots, key=lambda slot: slot.offset):
            if slot.offset % PARAMETER_ALIGNMENT_NUMEL:
                findings.add(
                    "Z008",
                    f"parameter {slot.name} begins at element {slot.offset} of flat {flat.name}, which is not a "
                    f"multiple of {PARAMETER_ALIGNMENT_NUMEL}",
                )
            if slot.offset < stop:
                findings.add(
                    "Z008", f"parameter {slot.name} overlaps its neighbour in flat {flat.name}"
                )
            stop = max(stop, slot.offset + slot.numel)
        if stop > flat.padded_numel:
            findings.add(
                "Z008",
                f"flat {flat.name} has {flat.padded_numel} elements, its parameters need {stop}",
            )


def _check_buffer(program: Program, buffer: Buffer, findings: Findings) -> None:
    if buffer.numel < 0:
        findings.add("Z003", f"buffer %{buffer.name} has {buffer.numel} elements")
    if buffer.offset is not None:
        _check_offset(buffer, buffer.offset, findings)
    if buffer.holds is None:
        return
    sentence = _content_problem(program, buffer.holds, buffer.numel)
    if sentence is not None:
        findings.add("Z008", f"buffer %{buffer.name} {sentence}", buffers=(buffer.name,))


def _check_offset(buffer: Buffer, offset: int, findings: Findings) -> None:
    if buffer.is_persistent:
        sentence = "outlives the sections, and only temporary buffers have an offset"
    elif offset < 0 or offset % PLACE_ALIGNMENT_BYTES:
        sentence = f"stands at byte {offset}, which is not a multiple of {PLACE_ALIGNMENT_BYTES}"
    else:
        return
    findings.add("Z008", f"buffer %{buffer.name} {sentence}", buffers=(buffer.name,))


def _check_plan(program: Program, findings: Findings) -> None:
    """A plan has a place for every temporary buffer."""
    temporary = [buffer for buffer in program.buffers if not buffer.is_persistent]
    missing = [buffer.name for buffer in temporary if buffer.offset is None]
    if missing and len(missing) < len(temporary):
        findings.add(
            "Z008",
            f"buffer %{missing[0]} has no offset, though other temporary buffers have one",
            buffers=(missing[0],),
        )


def _content_problem(program: Program, content: Content, numel: int) -> str | None:
    """Why a region of that many local elements cannot hold the content."""
    if not isinstance(content, FlatContent):
        return None
    flat = program.flat_by_name.get(content.flat)
    if flat is None:
        return f"holds elements of the undeclared flat {content.flat}"
    count = 1
    if content.shard is not None:
        if not program.mesh.has_axis(content.shard):
            return f"is cut along the undeclared axis {content.shard}"
        count = program.mesh.size(content.shard)
    stop = content.offset + numel * count
    if content.offset < 0 or stop > flat.padded_numel:
        return (
            f"holds elements [{content.offset}:{stop}] of flat {flat.name}, "
            f"which has {flat.padded_numel}"
        )
    if content.quantity == GRAD and content.micro is None:
        return "holds a gradient without saying of which micro-steps"
    if content.quantity != GRAD and (content.micro is not None or content.reduced):
        return f"says of {content.quantity} what only a gradient can be"
    if any(not program.mesh.has_axis(axis) for axis in content.reduced):
        return "is reduced over an undeclared axis"
    if content.quantity in (GRAD, MASTER) and not flat.is_trainable:
        return f"holds {content.quantity} of the frozen flat {flat.name}"
    return None


def _check_segment(segment: Segment, findings: Findings) -> None:
    """A segment is pure and in order, and its views are what their operators make."""
    count = len(segment.inputs)
    types = segment.types()
    for number, node in enumerate(segment.nodes):
        where = f"node {number} ({node.op}) of segment @{segment.name}"
        reason = refusal(node.op)
        if reason is not None:
            findings.add("Z008", f"{where} names an operator that {reason}")
        missing = [ref.index for ref in node.refs() if not 0 <= ref.index < count]
        for index in missing:
            findings.add("Z008", f"{where} uses value {index} before it exists")
        if not missing:
            sentence = mistyped(node, types)
            if sentence is not None:
                findings.add("Z008", f"{where} {sentence}")
        count += len(node.results)
    for index in segment.outputs:
        if not 0 <= index < count or types[index] is None:
            findings.add(
                "Z008", f"segment @{segment.name} yields value {index}, which is undefined"
            )


def _check_bindings(program: Program, findings: Findings) -> None:
    bound = [
        *(("input " + b.path, b.buffer) for b in program.inputs),
        *(("module buffer " + b.name, b.buffer) for b in program.module_buffers),
        *(("the initial value of", b.buffer) for b in program.scalars),
    ]
    if program.loss is not None:
        bound.append(("the loss", program.loss))
    for what, name in bound:
        if name not in program.buffer_by_name:
            findings.add("Z001", f"{what} is bound to the undeclared buffer %{name}")
    for binding in program.scalars:
        buffer = program.buffer_by_name.get(binding.buffer)
        if buffer is not None and len(binding.values) != buffer.numel:
            findings.add(
                "Z008",
                f"%{buffer.name} has {buffer.numel} elements and {len(binding.values)} initial values",
            )
    for group in program.groups:
        for name, start, stop in group.intervals:
            flat = program.flat_by_name.get(name)
            if flat is None:
                findings.add("Z001", f"group {group.name} speaks of the undeclared flat {name}")
            elif not 0 <= start <= stop <= flat.padded_numel:
                findings.add("Z003", f"group {group.name} goes beyond flat {name}")


def region_problem(program: Program, region: Region) -> tuple[str, str] | None:
    """Code and sentence for a region that does not exist."""
    buffer = program.buffer_by_name.get(region.buffer)
    if buffer is None:
        return "Z001", f"buffer %{region.buffer} is not declared"
    where = spell(region, program)
    if region.offset < 0 or region.numel < 0 or region.stop > buffer.numel:
        return "Z003", f"{where} is not inside %{buffer.name}, which has {buffer.numel} elements"
    if region.shard is None:
        return None
    if not program.mesh.has_axis(region.shard):
        return "Z001", f"{where} is cut along the undeclared axis {region.shard}"
    size = program.mesh.size(region.shard)
    if region.numel % size:
        return (
            "Z003",
            f"{where} has {region.numel} elements, which {size} ranks cannot share equally",
        )
    return None


def _check_state(program: Program, section: str, state: State, findings: Findings) -> None:
    for name in state.live:
        buffer = program.buffer_by_name.get(name)
        if buffer is None:
            findings.add("Z001", f"a state of {section} speaks of the undeclared buffer %{name}")
        elif buffer.is_persistent:
            findings.add("Z008", f"a state of {section} calls the persistent buffer %{name} live")
    streams = {stream.name for stream in program.streams}
    events = {pending.event for pending in state.pending}
    for pending in state.pending:
        if pending.stream not in streams:
            findings.add(
                "Z001", f"!{pending.event} is pending on the undeclared stream {pending.stream}"
            )
    covered: list[Region] = []
    for holding in state.holdings:
        region = holding.region
        problem = region_problem(program, region)
        if problem is not None:
            findings.add(problem[0], f"in a state of {section}: {problem[1]}")
            continue
        where = spell(region, program)
        sentence = _content_problem(program, holding.content, region.local_numel(program.mesh))
        if sentence is not None:
            findings.add("Z008", f"in a state of {section} {where} {sentence}")
        if holding.after is not None and holding.after not in events:
            findings.add(
                "Z001",
                f"in a state of {section} {where} waits for !{holding.after}, which is not pending",
            )
        is_live = program.buffer_by_name[region.buffer].is_persistent or region.buffer in state.live
        if not is_live:
            findings.add(
                "Z008", f"a state of {section} says what {where} holds, but it is not live"
            )
        covered.append(region)
    for region in _told_twice(covered):
        where = spell(region, program)
        findings.add("Z008", f"a state of {section} speaks twice of elements of {where}")


def _told_twice(regions: list[Region]) -> Iterator[Region]:
    """Regions that overlap another; an own slice may follow the whole, which then speaks of the rest."""
    stop, buffer = 0, None
    whole_one: Region | None = None
    for region in sorted(regions, key=lambda region: (region.buffer, region.offset, region.stop)):
        if region.buffer != buffer:
            stop, buffer, whole_one = region.offset, region.buffer, None
        if region.offset >= stop:
            whole_one = region if region.shard is None else None
        elif (
            whole_one is not None
            and region.shard is not None
            and (whole_one.offset, whole_one.stop) == (region.offset, region.stop)
        ):
            whole_one = None
        else:
            yield region
        stop = max(stop, region.stop)


def _check_joints(program: Program, findings: Findings) -> None:
    sections = program.section_by_name
    for first, second in JOINTS:
        if first not in sections or second not in sections:
            continue
        before, after = sections[first].exit, sections[second].entry
        if not _equal(program, before, after):
            findings.add(
                "Z009",
                f"the exit state of {first} is not the entry state of {second}: "
                f"{_difference(program, before, after)}",
            )


def _normal(
    program: Program, state: State
) -> tuple[frozenset[str], frozenset[object], tuple[object, ...]]:
    """A state whose order and redundant holdings do not matter."""
    holdings: set[object] = set()
    for holding in state.holdings:
        buffer = program.buffer_by_name.get(holding.region.buffer)
        is_resting = (
            buffer is not None
            and holding.after is None
            and holding.region == whole(buffer)
            and holding.content == buffer.holds
        )
        if not is_resting:
            holdings.add(holding)
    return frozenset(state.live), frozenset(holdings), state.pending


def _equal(program: Program, a: State, b: State) -> bool:
    return _normal(program, a) == _normal(program, b)


def _difference(program: Program, a: State, b: State) -> str:
    live_a, holdings_a, pending_a = _normal(program, a)
    live_b, holdings_b, pending_b = _normal(program, b)
    if live_a != live_b:
        return f"%{min(live_a ^ live_b)} is live in one only"
    if pending_a != pending_b:
        return "their pending events differ"
    differing = {
        h.region.buffer
        for h in (*a.holdings, *b.holdings)
        if (h in holdings_a) != (h in holdings_b)
    }
    return f"what %{min(differing)} holds differs" if differing else "their holdings differ"
