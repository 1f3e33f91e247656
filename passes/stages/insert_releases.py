"""Release every temporary buffer right after its last use, on the stream of that use.

A release never moves across another allocation of its buffer, and several releases after one op keep their order.

What ``insert-releases`` changes::

      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
    + !1 = release %a.full  stream=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
    + !3 = compute @b.backward(%loss_scale[0:1], %h, v: %b.full[0:8]) -> (%dh, …
    + release %h  stream=compute
    + release %b.full  stream=compute
    - release %h  stream=compute
    - !3 = release %a.full  stream=compute
    - wait !3  on=gather
    + wait !1  on=gather
      alloc %a.full  stream=gather
      !4 = all_gather %a.param -> %a.full  comm=gather stream=gather
    - release %b.full  stream=compute
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertReleases(Pass):
    """Move each release up to just after the last use."""

    name: ClassVar[str] = "insert-releases"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_PER_RUN})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED_AFTER_LAST_USE})
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with its releases as early as possible."""
        return rewrite.map_sections(program, _rewrite)


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
    releases = {i for i, op in enumerate(section.body) if isinstance(op, ops.Release)}
    body = rewrite.insert(section.body, before=before, after=after, without=releases)
    return replace(section, body=body)
