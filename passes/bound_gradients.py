"""Hold the backward back so that never more than ``live`` units' full gradients exist at once.

From stage 2 on a unit's full gradient lives only until it is reduced, but nothing makes the compute stream wait for
the reductions: on a slow network it would run ahead and allocate one full gradient after another, until all of them
are there at once. Before a unit's full gradient is allocated, compute therefore waits for the release of the one
``live`` units before. With ``live=2`` a unit computes its gradient while its predecessor's is reduced. What a unit
keeps across others, like the gradient of a tied weight, comes on top. What one launch reduces counts as one unit.

What ``bound-gradients{live=1}`` changes::

      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
    - release %b.grad_full  stream=reduce
    + !5 = release %b.grad_full  stream=reduce
    + wait !5  on=compute
      alloc %a.grad_full  stream=compute
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.ir.section_view import SectionView
from zeroir.passes.base import Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.order import synchronise


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundGradients(Pass):
    """Let at most ``live`` units' full gradients exist at once."""

    name: ClassVar[str] = "bound-gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_SHARDED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_BOUNDED})

    live: int = 2

    def __post_init__(self) -> None:
        if self.live < 1:
            raise UserError(
                f"The option `live` of `{self.name}` is a number of units, at least 1, not {self.live}."
            )

    def __call__(self, program: Program) -> Program:
        """The program with a wait before each full gradient that would be one too many."""
        return synchronise(
            rewrite.map_sections(program, lambda section: self._rewrite(section, program))
        )

    def _rewrite(self, section: Section, program: Program) -> Section:
        # Gradients that one op completes belong to one unit, and so do those that one launch reduces.
        writers = SectionView(program, section.body).writers
        completed_by: dict[str, int] = {}
        for op in section.body:
            if isinstance(op, ops.ReduceScatter):
                names = [pair.source.buffer for pair in op.pairs]
                completed_by.update(dict.fromkeys(names, max(writers[name][-1] for name in names)))
        full = {name for name in completed_by if not program.buffer_by_name[name].is_persistent}
        body = list(section.body)
        released: dict[int, list[int]] = {}
        before: dict[int, list[Op]] = {}
        for index, op in enumerate(section.body):
            if isinstance(op, ops.Alloc) and op.buffer in full and len(released) >= self.live:
                for release in list(released.values())[-self.live]:
                    body[release], event = rewrite.signalling(body[release], release)
                    before.setdefault(index, []).append(ops.Wait(waited=event, on=op.stream))
            elif isinstance(op, ops.Release) and op.buffer in full:
                released.setdefault(completed_by[op.buffer], []).append(index)
        return replace(section, body=rewrite.insert(tuple(body), before=before))
