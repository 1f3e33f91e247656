"""The memory of a step in the format of ``torch.cuda.memory._snapshot``, which https://pytorch.org/memory_viz draws.

Every buffer is an allocation at its address in the memory block of the runtime. Its role is the category; its name and
the line of the model that computes it are the frames. Each space is a device of the viewer: device 0 is the device,
followed by the host and the disk if the program has buffers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zeroir.cost.tasks import step_sections
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.program import Program
from zeroir.memory.placement import placements, rounded
from zeroir.report.origins import buffer_sources, split_source
from zeroir.report.plain_pickle import Plain

_BASE: Final = 0x7F00_0000_0000
_SPACE_BYTES: Final = 1 << 44
"""The distance between the addresses of two spaces. All are below 2^53, up to which JavaScript is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AddressMap:
    """The addresses of the buffers of one space, and the addresses and sizes in bytes of its two blocks.

    The first block has the persistent buffers, the second one the temporary ones; an empty block is left out.
    """

    blocks: tuple[tuple[int, int], ...]
    addresses: dict[str, int]


def memory_snapshot(program: Program, *, source: str) -> dict[str, Plain]:
    """Return the allocations and frees of one step in program order, and the live buffers after it.

    ``source`` is the file of the program; the frames name it together with the file of the model.
    """
    spaces = [space for space in Space if any(b.space is space for b in program.buffers)]
    traces: list[Plain] = []
    segments: list[Plain] = []
    frames = _frames(program, source)
    for device, space in enumerate(spaces):
        address_map = _address_map(program, space, device)
        events, live = _trace(program, address_map, frames)
        traces.append(events)
        segments += _segments(address_map, live, frames, device)
    return {"segments": segments, "device_traces": traces}


def _address_map(program: Program, space: Space, device: int) -> _AddressMap:
    placed = placements(program).get(space)
    start = address = _BASE + device * _SPACE_BYTES
    addresses: dict[str, int] = {}
    for buffer in program.buffers:
        if buffer.space is space and buffer.is_persistent and buffer.size_bytes:
            addresses[buffer.name] = address
            address += rounded(buffer.size_bytes, buffer.space)
    if placed is not None:
        buffers = program.buffer_by_name
        addresses |= {
            name: address + offset
            for name, offset in placed.offsets.items()
            if buffers[name].size_bytes
        }
    blocks = ((start, address - start), (address, 0 if placed is None else placed.size_bytes))
    return _AddressMap(blocks=tuple(block for block in blocks if block[1]), addresses=addresses)


def _trace(
    program: Program, address_map: _AddressMap, frames: dict[str, list[Plain]]
) -> tuple[list[Plain], list[Buffer]]:
    """Return the events of one space, and the buffers that are live after them, sorted by address."""
    events: list[Plain] = [
        _event("segment_alloc", address, size, []) for address, size in address_map.blocks
    ]
    live: dict[str, Buffer] = {}

    def begin(buffer: Buffer) -> None:
        if buffer.name in address_map.addresses and buffer.name not in live:
            live[buffer.name] = buffer
            events.append(_of("alloc", buffer, address_map, frames))

    def end(buffer: Buffer) -> None:
        if live.pop(buffer.name, None) is not None:
            events.append(_of("free_requested", buffer, address_map, frames))
            events.append(_of("free_completed", buffer, address_map, frames))

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
    # The viewer counts events without a category as unknown, and fails if no event has that category.
    events.append({**_event("snapshot", 0, 0, []), "category": "unknown"})
    return events, sorted(live.values(), key=lambda buffer: address_map.addresses[buffer.name])


def _of(
    action: str, buffer: Buffer, address_map: _AddressMap, frames: dict[str, list[Plain]]
) -> dict[str, Plain]:
    event = _event(
        action, address_map.addresses[buffer.name], buffer.size_bytes, frames[buffer.name]
    )
    return {**event, "category": buffer.role.value}


def _event(action: str, address: int, size: int, frames: Sequence[Plain]) -> dict[str, Plain]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}


def _segments(
    address_map: _AddressMap, live: Sequence[Buffer], frames: dict[str, list[Plain]], device: int
) -> Iterator[Plain]:
    """Yield the memory blocks, each with its live buffers after the step."""
    for start, size in address_map.blocks:
        inside = [b for b in live if start <= address_map.addresses[b.name] < start + size]
        active = sum(buffer.size_bytes for buffer in inside)
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
            "blocks": list(_blocks(address_map, inside, frames, start, size)),
        }


def _blocks(
    address_map: _AddressMap,
    inside: Sequence[Buffer],
    frames: dict[str, list[Plain]],
    start: int,
    size: int,
) -> Iterator[Plain]:
    """Yield blocks that cover a segment: live ones, and the gaps between them."""
    at = start
    for buffer in inside:
        address = address_map.addresses[buffer.name]
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
    """Return the frames of each buffer: its name and role, and the line of the model that computes it."""
    lines = buffer_sources(program)
    frames: dict[str, list[Plain]] = {}
    for number, buffer in enumerate(program.buffers):
        frame: Plain = {
            "name": f"{buffer.role} %{buffer.name}",
            "filename": Path(source).name,
            "line": number,
        }
        frames[buffer.name] = [frame]
        if buffer.name in lines:
            name, line = split_source(lines[buffer.name])
            frames[buffer.name].append({"name": "computed", "filename": name, "line": line})
    return frames
