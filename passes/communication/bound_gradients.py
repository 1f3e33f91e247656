"""State the bound that at most ``live`` units' full gradients are live at once, which makes the backward wait.

From stage 2 on a unit's full gradient lives only until it is reduced, but nothing makes the compute stream wait for the
reductions: on a slow network it would run ahead and allocate one full gradient after another, until all of them are
live. With the bound ``full_gradients ahead=N``, N being ``live`` - 1, compute waits before a unit's full gradient is
allocated for the release of the one ``live`` units before. With ``live=2`` a unit computes its gradient while its
predecessor's is reduced. Gradients that live across other units, like that of a tied weight, are not counted. Gradients
that one launch reduces count as one unit. The bound holds after every later pass; where there is one, it is replaced.

What ``bound-gradients{live=1}`` changes::

    + bound full_gradients ahead=0
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
from zeroir.ir.bounds import AheadBound, BoundKind, with_bound
from zeroir.ir.program import Program
from zeroir.passes.base import NO_FACTS, Fact, Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundGradients(Pass):
    """Let at most ``live`` units' full gradients be live at once."""

    name: ClassVar[str] = "bound-gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_SHARDED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    live: int = 2

    def __post_init__(self) -> None:
        if self.live < 1:
            raise UserError(
                f"The option `live` of `{self.name}` is a number of units, at least 1, not {self.live}."
            )

    def __call__(self, program: Program) -> Program:
        """Return the program with the bound, which replaces an earlier one."""
        bound = AheadBound(kind=BoundKind.FULL_GRADIENTS, ahead=self.live - 1)
        return replace(program, bounds=with_bound(program.bounds, bound))
