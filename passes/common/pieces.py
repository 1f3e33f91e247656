"""Ops on large buffers in pieces: a sequence of ops on a flat runs piece by piece, all its ops on one piece at a time.

Ops that change or copy elements one by one may be split anywhere, as far as their kernels round in the same way: at
multiples of 4096 elements, which are also whole pages. Consecutive ops on the same elements, such as an optimizer step,
the moving average and the rounding of the new parameters, form a *chain*: for each piece they are together, so that one
temporary copy of the piece is enough. Allocs within a chain are moved before it, and all other ops there before or
after it, unless that would change what the ops do: then the chain ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched

PIECE_ALIGNMENT_NUMEL: Final = 4096
"""Pieces have a multiple of so many elements: whole pages of any dtype, and whole vectors of any kernel."""

Divisible = ops.Cast | ops.OptimizerStep | ops.Average | ops.ToHost | ops.ToDevice
"""Ops that process each element separately, except for optimizers that work on whole parameters."""


def in_pieces(program: Program, homes: Collection[str], piece_numel: int) -> Program:
    """Return the program with ops that use these buffers in pieces of at most ``piece_numel`` elements.

    Ops on slices, of which only the ranks together have all, are not changed.
    """
    return rewrite.map_sections(
        program,
        lambda section: replace(
            section, body=tuple(_body_in_pieces(section.body, program, homes, piece_numel))
        ),
    )


@dataclass(slots=True)
class _Chain:
    """Ops on the same elements, and the ops between them that are moved before or after all of them."""

    program: Program
    ops: list[Divisible] = field(default_factory=list)
    before: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)
    stop: int = 0
    """One past the last op of the section that belongs to the chain."""

    def elements(self) -> Mapping[str, Region]:
        """Return the region of each buffer that the ops use element by element."""
        return {region.buffer: region for op in self.ops for region in _elements(op)}

    def takes(self, op: Divisible) -> bool:
        """Return whether an op uses the elements of the chain, with the same region of each common buffer."""
        own = self.elements()
        regions = _elements(op)
        is_alike = all(own.get(region.buffer, region) == region for region in regions)
        return is_alike and any(region.buffer in own for region in regions)


def _body_in_pieces(
    body: Sequence[Op], program: Program, homes: Collection[str], piece_numel: int
) -> Iterator[Op]:
    index = 0
    while index < len(body):
        op = body[index]
        if not _is_divided(op, homes, piece_numel):
            yield op
            index += 1
            continue
        chain = _chain(body, index, program, homes, piece_numel)
        yield from chain.before
        (numel,) = {region.numel for region in chain.elements().values()}
        for start in range(0, numel, piece_numel):
            stop = min(start + piece_numel, numel)
            for member in chain.ops:
                yield _piece(member, start, stop)
        yield from chain.after
        index = chain.stop


def _chain(
    body: Sequence[Op], start: int, program: Program, homes: Collection[str], piece_numel: int
) -> _Chain:
    """Return the chain that begins with an op."""
    first = body[start]
    assert isinstance(first, Divisible)
    chain = _Chain(program, ops=[first], stop=start + 1)
    before: list[Op] = []
    after: list[Op] = []
    touched, passed = Touched(program), Touched(program)
    touched.add(first, start)
    for index in range(start + 1, len(body)):
        op = body[index]
        if _is_divided(op, homes, piece_numel):
            assert isinstance(op, Divisible)
            if not chain.takes(op) or passed.is_against(op):
                break
            chain.ops.append(op)
            chain.before += before
            chain.after += after
            before, after = [], []
            chain.stop = index + 1
            touched.add(op, index)
        elif touched.is_against(op) or passed.is_against(op):
            after.append(op)
            passed.add(op, index)
        else:
            before.append(op)
    return chain


def _is_divided(op: Op, homes: Collection[str], piece_numel: int) -> bool:
    """Return whether an op uses so many elements of one of the buffers that it must be split, and may be."""
    if not isinstance(op, Divisible):
        return False
    if isinstance(op, ops.OptimizerStep) and op.algorithm.direction_dtype is not None:
        return False
    regions = _elements(op)
    used = {r.buffer for r in (*effects(op).reads, *effects(op).writes, *effects(op).accumulates)}
    return (
        not used.isdisjoint(homes)
        and regions[0].numel > piece_numel
        and all(region.shard is None for region in regions)
        and op.event is None
    )


def _elements(op: Divisible) -> list[Region]:
    """Return the regions that an op uses element by element, all of one size."""
    regions: list[Region] = []
    for name in op.same_elements:
        value = getattr(op, name)
        regions += value if isinstance(value, tuple) else (value,)
    return regions


def _piece(op: Divisible, start: int, stop: int) -> Op:
    """Return the op on elements ``[start, stop)`` of its regions, and on the scales of their blocks."""
    regions = set(_elements(op))
    scales: set[Region] = set()
    block_numel = 1
    if isinstance(op, ops.OptimizerStep):
        scales, block_numel = set(op.scales), op.form.block_numel
    first, last = start // block_numel, -(-stop // block_numel)

    def cut(region: Region) -> Region:
        if region in regions:
            return replace(region, offset=region.offset + start, numel=stop - start)
        if region in scales:
            return replace(region, offset=region.offset + first, numel=last - first)
        return region

    return rewrite.map_regions(op, cut)
