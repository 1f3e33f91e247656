"""Release every temporary buffer right after its last use, on the stream of that use.

A release is not moved across another allocation of its buffer; of several releases after one op, the order stays.

Before ``insert-releases``::

    section last_micro_step {
      alloc %a.full  stream=gather
      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
      wait !0  on=compute
      alloc %h  stream=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
      alloc %b.full  stream=gather
      !1 = all_gather %b.param -> %b.full  comm=gather stream=gather
      wait !1  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
      alloc %dh  stream=compute
      !2 = compute @b.backward(%loss_scale[0:1], %h, v: %b.full[0:8]) -> (%dh, grad v: %b.grad_full[0:8])  unit=b stream=compute
      wait !2  on=reduce
      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
      release %b.grad_full  stream=reduce
      release %h  stream=compute
      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
      !3 = release %a.full  stream=compute
      wait !3  on=gather
      alloc %a.full  stream=gather
      !4 = all_gather %a.param -> %a.full  comm=gather stream=gather
      wait !4  on=compute
      !5 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
      wait !5  on=reduce
      reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
      release %a.grad_full  stream=reduce
      release %dh  stream=compute
      release %a.full  stream=compute
      release %b.full  stream=compute
      exit %a.grad = grad a @dp reduced=(dp) micro=all
      exit %b.grad = grad b @dp reduced=(dp) micro=all
    }

After::

    section last_micro_step {
      alloc %a.full  stream=gather
      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
      wait !0  on=compute
      alloc %h  stream=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
      !1 = release %a.full  stream=compute
      alloc %b.full  stream=gather
      !2 = all_gather %b.param -> %b.full  comm=gather stream=gather
      wait !2  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
      alloc %dh  stream=compute
      !3 = compute @b.backward(%loss_scale[0:1], %h, v: %b.full[0:8]) -> (%dh, grad v: %b.grad_full[0:8])  unit=b stream=compute
      release %h  stream=compute
      release %b.full  stream=compute
      wait !3  on=reduce
      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
      release %b.grad_full  stream=reduce
      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
      wait !1  on=gather
      alloc %a.full  stream=gather
      !4 = all_gather %a.param -> %a.full  comm=gather stream=gather
      wait !4  on=compute
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

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.base import Fact, format_spec
from zeroir.passes.common import rewrite
from zeroir.passes.common.order import synchronise, unordered


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertReleases:
    """Move each release up to just after the last use."""

    name: ClassVar[str] = "insert-releases"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_PER_RUN})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED_AFTER_LAST_USE})

    def spec(self) -> str:
        """The pass as text."""
        return format_spec(self.name, {})

    def __call__(self, program: Program) -> Program:
        """The program with its releases as early as they may be."""
        return synchronise(rewrite.map_sections(unordered(program), _rewrite))


def _rewrite(section: Section) -> Section:
    last_use: dict[str, int] = dict.fromkeys(section.entry.live, -1)
    before: dict[int, list[Op]] = {}
    after: dict[int, list[Op]] = {}
    for index, op in enumerate(section.body):
        match op:
            case ops.Alloc():
                last_use[op.buffer] = index
            case ops.Release():
                use = last_use.pop(op.buffer)
                if use < 0:
                    before.setdefault(0, []).append(op)
                else:
                    stream = effects(section.body[use]).stream
                    after.setdefault(use, []).append(replace(op, stream=stream))
            case _:
                last_use.update(
                    (name, index) for name in rewrite.used_buffers(op) & last_use.keys()
                )
    kept: list[Op] = list(before.get(0, ()))
    for index, op in enumerate(section.body):
        if not isinstance(op, ops.Release):
            kept.append(op)
        kept.extend(after.get(index, ()))
    return replace(section, body=tuple(kept))
