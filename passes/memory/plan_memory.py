"""Assign every temporary buffer an offset in the memory block that all temporary buffers of its space share.

Buffers share bytes only if one ends before the other begins in every run, as determined by streams and events, not by
the order of the text (``zeroir.memory.placement``); the verifier proves this independently (Z106). The runtime
allocates the block once, so memory does not fragment, and its size is known before a rank starts. The plan is valid for
these ops only: a later pass gets the program without it.

What ``plan-memory`` changes::

    - buffer %a.full : f32[512] device gathered
    + buffer %a.full : f32[512] device gathered offset=0
    - buffer %a.grad_full : f32[512] device grad
    + buffer %a.grad_full : f32[512] device grad offset=2048
    - buffer %b.full : f32[512] device gathered
    + buffer %b.full : f32[512] device gathered offset=2048
    - buffer %h : f32[32] device saved
    + buffer %h : f32[32] device saved offset=6144
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir.program import Program
from zeroir.memory.placement import place_all
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common.order import derive_waits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory(Pass):
    """Assign every temporary buffer an offset in the memory of its space."""

    name: ClassVar[str] = "plan-memory"
    requires: ClassVar[frozenset[Fact]] = NO_FACTS
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with a place for every temporary buffer."""
        offsets: Mapping[str, int] = {
            name: offset
            for placement in place_all(derive_waits(program)).values()
            for name, offset in placement.offsets.items()
        }
        buffers = tuple(
            buffer if buffer.is_persistent else replace(buffer, offset=offsets[buffer.name])
            for buffer in program.buffers
        )
        return replace(program, buffers=buffers)
