"""The device memory that buffers take, in program order."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.program import Program


def peak_bytes(program: Program) -> tuple[int, str, int]:
    """The most device memory that buffers take in program order, and where: ``(bytes, section, line)``."""
    by_name = program.buffer_by_name
    device = {b.name: b.size_bytes for b in program.buffers if b.space is Space.DEVICE}
    resting = sum(device.get(b.name, 0) for b in program.buffers if b.is_persistent)
    peak = (resting, "", 0)
    for section in program.sections:
        live = resting + sum(device.get(name, 0) for name in section.entry.live if name in by_name)
        for line, op in enumerate(section.body):
            match op:
                case ops.Alloc():
                    live += device.get(op.buffer, 0)
                case ops.Release():
                    live -= device.get(op.buffer, 0)
                case _:
                    continue
            if live > peak[0]:
                peak = (live, section.name, line)
    return peak
