"""What ranks do together in a program: its collectives, and what is done with what ranks reduce.

Two programs with the same schedule may run at the same time, each on some of the ranks. No rank waits for ever, because
all start the same collectives in the same order. And the values are right: what a rank gathers comes from parameters,
which have the same places in both programs, or is what the model's code gathers, from equal sizes in the same order, as
in eager PyTorch; what ranks reduce goes by the same ops to the same elements of gradients
and other sums. By the proof of each program these get the contributions of all ranks, so in both programs the
contributions to one gradient are at the same place of a collective.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Role
from zeroir.ir.contents import GRAD, FlatContent
from zeroir.ir.program import Holding, Program, Section

_OWN: Final = frozenset(
    (Role.INPUT, Role.OUTPUT, Role.RNG, Role.CONSTANT, Role.SNAPSHOT, Role.MODULE_BUFFER)
)
"""Roles of persistent buffers with which each rank does what it does alone."""

Schedule = tuple[tuple[object, ...], ...]
"""Ops by section, in order, the communicators, and the buffers of these ops."""


def shared_schedule(program: Program, sections: Collection[str]) -> Schedule | None:
    """Return what ranks do together in these sections; None where they communicate before the first of them, too."""
    chosen = [section for section in program.sections if section.name in sections]
    if any(
        _is_gathered(holding, section) for section in chosen for holding in section.entry.holdings
    ):
        return None
    shared = {b.name for b in program.buffers if b.is_persistent and b.role not in _OWN}
    for op in program.ops():
        if isinstance(op, ops.Collective) and not isinstance(op, ops.Gather):
            shared.update(region.buffer for region in _regions(op))
    names: dict[str, None] = {}
    bodies: list[tuple[object, ...]] = []
    for section in chosen:
        body: list[object] = []
        for op in section.body:
            match op:
                case ops.Collective():
                    body.append(replace(op, event=None, staging=None))
                case ops.Compute() | ops.Memory() | ops.Wait():
                    continue
                case _ if shared.intersection(region.buffer for region in _regions(op)):
                    body.append(replace(op, event=None))
                case _:
                    continue
            names.update(dict.fromkeys(region.buffer for region in _regions(op)))
        bodies.append((section.name, *body))
    buffers = [program.buffer_by_name[name] for name in names]
    return (*bodies, program.comms, *((b.name, b.space, b.dtype, b.numel) for b in buffers))


def _is_gathered(holding: Holding, section: Section) -> bool:
    """Return whether ranks gather what a section's entry holds, where a program begins with that section."""
    content = holding.content
    is_of_flat = isinstance(content, FlatContent) and content.quantity != GRAD
    return is_of_flat and holding.region.buffer in section.entry.live


def _regions(op: ops.Op) -> tuple[Region, ...]:
    effect = effects(op)
    return (*effect.reads, *effect.writes, *effect.accumulates)
