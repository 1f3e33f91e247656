"""Give every temporary buffer its place in memory: an offset in the one block that those of its space share.

First every buffer is made to begin as late as nobody can tell (see ``zeroir.passes.late``): then it meets fewer others.
Buffers share bytes where one surely ends before the other begins, by streams and events and not by the program's text
(see ``zeroir.ir.memory.placement``); the verifier proves it anew (Z106). The runtime allocates the block once, so
nothing is fragmented and what a rank takes is known before it starts. The plan is for the ops as they stand: whatever
pass runs afterwards is handed the program without it.

Before ``plan-memory``::

    buffer %a.full : f32[512] device gathered
    buffer %a.grad_full : f32[512] device grad
    buffer %b.full : f32[512] device gathered
    buffer %b.grad_full : f32[512] device grad
    buffer %h : f32[32] device saved
    buffer %dh : f32[32] device activation
    section last_micro_step {
      alloc %h  stream=compute
      alloc %a.full  stream=gather
      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
      alloc %b.full  stream=gather
      !1 = prefetch %b.param -> %b.full  comm=gather stream=gather
      wait !0  on=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
      !2 = release %a.full  stream=compute
      wait !2  on=gather
      alloc %a.full  stream=gather
      !3 = prefetch %a.param -> %a.full  comm=gather stream=gather
      wait !1  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
      alloc %dh  stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
      !4 = compute @b.backward(%loss_scale[0:1], %h, v: %b.full[0:8]) -> (%dh, grad v: %b.grad_full[0:8])  unit=b stream=compute
      release %h  stream=compute
      release %b.full  stream=compute
      wait !4  on=reduce
      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
      release %b.grad_full  stream=reduce
      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
      wait !3  on=compute
      !5 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
      release %dh  stream=compute
      release %a.full  stream=compute
      wait !5  on=reduce
      reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
      release %a.grad_full  stream=reduce
      exit %a.grad = grad a @dp reduced=(dp) micro=all
      exit %b.grad = grad b @dp reduced=(dp) micro=all
    }

After::

    buffer %a.full : f32[512] device gathered offset=0
    buffer %a.grad_full : f32[512] device grad offset=2048
    buffer %b.full : f32[512] device gathered offset=2048
    buffer %b.grad_full : f32[512] device grad offset=4096
    buffer %h : f32[32] device saved offset=6144
    buffer %dh : f32[32] device activation offset=6656
    section last_micro_step {
      alloc %a.full  stream=gather
      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
      alloc %b.full  stream=gather
      !1 = prefetch %b.param -> %b.full  comm=gather stream=gather
      wait !0  on=compute
      alloc %h  stream=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
      !2 = release %a.full  stream=compute
      wait !2  on=gather
      alloc %a.full  stream=gather
      !3 = prefetch %a.param -> %a.full  comm=gather stream=gather
      wait !1  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
      alloc %dh  stream=compute
      !4 = compute @b.backward(%loss_scale[0:1], %h, v: %b.full[0:8]) -> (%dh, grad v: %b.grad_full[0:8])  unit=b stream=compute
      release %h  stream=compute
      release %b.full  stream=compute
      wait !4  on=reduce
      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
      release %b.grad_full  stream=reduce
      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
      wait !3  on=compute
      !5 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
      release %dh  stream=compute
      release %a.full  stream=compute
      wait !5  on=reduce
      reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
      release %a.grad_full  stream=reduce
      exit %a.grad = grad a @dp reduced=(dp) micro=all
      exit %b.grad = grad b @dp reduced=(dp) micro=all
    }
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir.memory.placement import place_all
from zeroir.ir.program import Program
from zeroir.passes.base import Fact, format_spec
from zeroir.passes.late import allocate_late


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory:
    """See the module."""

    name: ClassVar[str] = "plan-memory"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    establishes: ClassVar[frozenset[Fact]] = frozenset()

    def spec(self) -> str:
        """The pass as text."""
        return format_spec(self.name, {})

    def __call__(self, program: Program) -> Program:
        """The program with a place for every temporary buffer, none of which begins earlier than it need."""
        program = allocate_late(program)
        offsets: Mapping[str, int] = {
            name: offset
            for placement in place_all(program).values()
            for name, offset in placement.offsets.items()
        }
        buffers = tuple(
            buffer if buffer.is_persistent else replace(buffer, offset=offsets[buffer.name])
            for buffer in program.buffers
        )
        return replace(program, buffers=buffers)
