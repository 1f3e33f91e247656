"""A step's memory in the format of ``torch.cuda.memory._snapshot``, which https://pytorch.org/memory_viz draws.

Every buffer is an allocation at the address that it has in the runtime's block of memory, with its role as category,
and with its name and the line of the model that computes it as frames. Space by space: the viewer's device 0 is the
device, and the host and the disk follow where the program keeps anything there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.program import Program
from zeroir.memory.placement import placements, rounded
from zeroir.report.origins import buffer_sources, split_source
from zeroir.report.plain_pickle import Plain
from zeroir.report.step import step_sections

_BASE: Final = 0x7F00_0000_0000
_SPACE_BYTES: Final = 1 << 44
"""Addresses of two spaces are this far apart, and all stay below 2^53, up to which JavaScript counts exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the buffers of one space stand: the persistent ones, then those that come and go."""

    resting: int
    resting_bytes: int
    arena: int
    arena_bytes: int
    addresses: dict[str, int]


def memory_snapshot(program: Program, *, source: str) -> dict[str, Plain]:
    """The allocations and frees of one step in program order, and what is live after it.

    ``source`` is the program's file, which the frames name beside the model's.
    """
    spaces = [space for space in Space if any(b.space is space for b in program.buffers)]
    traces: list[Plain] = []
    segments: list[Plain] = []
    frames = _frames(program, source)
    for device, space in enumerate(spaces):
        layout = _layout(program, space, device)
        events, live = _trace(program, layout, frames)
        traces.append(events)
        segments += _segments(layout, live, frames, device)
    return {"segments": segments, "device_traces": traces}


def _layout(program: Program, space: Space, device: int) -> _Layout:
    placed = placements(program).get(space)
    start = at = _BASE + device * _SPACE_BYTES
    addresses: dict[str, int] = {}
    for buffer in program.buffers:
        if buffer.space is space and buffer.is_persistent and buffer.size_bytes:
            addresses[buffer.name] = at
            at += rounded(buffer.size_bytes)
    if placed is not None:
        sizes = program.buffer_by_name
        addresses |= {n: at + o for n, o in placed.offsets.items() if sizes[n].size_bytes}
    return _Layout(
        resting=start,
        resting_bytes=at - start,
        arena=at,
        arena_bytes=0 if placed is None else placed.size_bytes,
        addresses=addresses,
    )


def _trace(
    program: Program, layout: _Layout, frames: dict[str, list[Plain]]
) -> tuple[list[Plain], list[Buffer]]:
    """The events of one space, and the buffers that are live after them in the order of their addresses."""
    events: list[Plain] = []
    live: dict[str, Buffer] = {}
    for address, size in (
        (layout.resting, layout.resting_bytes),
        (layout.arena, layout.arena_bytes),
    ):
        if size:
            events.append(_event("segment_alloc", address, size, []))

    def begin(buffer: Buffer) -> None:
        if buffer.name in layout.addresses and buffer.name not in live:
            live[buffer.name] = buffer
            events.append(_of("alloc", buffer, layout, frames))

    def end(buffer: Buffer) -> None:
        if live.pop(buffer.name, None) is not None:
            events.append(_of("free_requested", buffer, layout, frames))
            events.append(_of("free_completed", buffer, layout, frames))

    sections = step_sections(program)
    for buffer in program.buffers:
        if buffer.is_persistent or (sections and buffer.name in sections[0].entry.live):
            begin(buffer)
    for section in sections:
        for op in section.body:
            match op:
                case ops.Alloc():
                    begin(program.buffer_by_name[op.buffer])
                case ops.Release():
                    end(program.buffer_by_name[op.buffer])
                case _:
                    pass
    # The viewer counts what has no category as unknown, and fails where that word never occurs.
    events.append({**_event("snapshot", 0, 0, []), "category": "unknown"})
    return events, sorted(live.values(), key=lambda buffer: layout.addresses[buffer.name])


def _of(
    action: str, buffer: Buffer, layout: _Layout, frames: dict[str, list[Plain]]
) -> dict[str, Plain]:
    event = _event(action, layout.addresses[buffer.name], buffer.size_bytes, frames[buffer.name])
    return {**event, "category": buffer.role.value}


def _event(action: str, address: int, size: int, frames: Sequence[Plain]) -> dict[str, Plain]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}


def _segments(
    layout: _Layout, live: Sequence[Buffer], frames: dict[str, list[Plain]], device: int
) -> Iterator[Plain]:
    """The block of the persistent buffers and that of the others, each with what is live in it after the step."""
    for start, size in ((layout.resting, layout.resting_bytes), (layout.arena, layout.arena_bytes)):
        inside = [b for b in live if start <= layout.addresses[b.name] < start + size]
        active = sum(buffer.size_bytes for buffer in inside)
        if size:
            yield {
                "device": device,
                "address": start,
                "total_size": size,
                "allocated_size": active,
                "active_size": active,
                "requested_size": active,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": list(_blocks(layout, inside, frames, start, size)),
            }


def _blocks(
    layout: _Layout,
    inside: Sequence[Buffer],
    frames: dict[str, list[Plain]],
    start: int,
    size: int,
) -> Iterator[Plain]:
    """Blocks that cover a segment: live ones, and the gaps between them."""
    at = start
    for buffer in inside:
        address = layout.addresses[buffer.name]
        if address > at:
            yield _block(at, address - at, "inactive", [])
        yield _block(address, buffer.size_bytes, "active_allocated", frames[buffer.name])
        at = address + buffer.size_bytes
    if at < start + size:
        yield _block(at, start + size - at, "inactive", [])


def _block(address: int, size: int, state: str, frames: Sequence[Plain]) -> Plain:
    requested = size if state == "active_allocated" else 0
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def _frames(program: Program, source: str) -> dict[str, list[Plain]]:
    """For every buffer its name and role in the program, and the line of the model that computes it."""
    lines = buffer_sources(program)
    found: dict[str, list[Plain]] = {}
    for number, buffer in enumerate(program.buffers):
        frame: Plain = {
            "name": f"{buffer.role} %{buffer.name}",
            "filename": Path(source).name,
            "line": number,
        }
        found[buffer.name] = [frame]
        if buffer.name in lines:
            name, line = split_source(lines[buffer.name])
            found[buffer.name].append({"name": "computed", "filename": name, "line": line})
    return found
