"""ZeRO stage 3, second part: gather a flat before every run of its uses, and free its memory in between.

A *run* is a maximal sequence of consecutive compute ops that all read the flat. So there is no gather that no op reads
(of an embedding in its backward), and none directly after its own release (of the last unit, between its forward and
its backward). With ``elide=false``, every flat is gathered exactly once in the forward and once in the backward of its
unit, read or not. With the reduce-scatter, this is exactly 3Ψ on the wire.

What ``insert-gathers{elide=true}`` changes::

      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
    + !3 = release %a.full  stream=compute
    + wait !3  on=gather
    + alloc %a.full  stream=gather
    + !4 = all_gather %a.param -> %a.full  comm=gather stream=gather
    + wait !4  on=compute
    - !3 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
    + !5 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.buffers import Role
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.stages.all_reduce_gradients import AXIS
from zeroir.passes.stages.shard_parameters import gather


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertGathers(Pass):
    """Gather before every run of uses, or exactly twice."""

    name: ClassVar[str] = "insert-gathers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMETERS_SHARDED, Fact.ONE_AXIS})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_PER_RUN})
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    elide: bool = True

    def __call__(self, program: Program) -> Program:
        """Return the program with its gathers placed anew."""
        return rewrite.map_sections(program, lambda section: self._rewrite(section, program))

    def _rewrite(self, section: Section, program: Program) -> Section:
        if section.name == UPDATE:
            return section
        params = rewrite.param_buffers(program)
        sources = _gathered_from(program)
        body = [op for op in section.body if not _is_of(op, sources)]
        computes = _Computes(body, program)
        before: dict[int, list[Op]] = {}
        for full, shard in sources.items():
            starts = (
                computes.runs(full) if self.elide else computes.visits(full, params[shard].unit)
            )
            buffer, size = program.buffer_by_name[full], program.mesh.size(AXIS)
            for number, start in enumerate(starts):
                placed = before.setdefault(start, [])
                if number > 0:
                    placed.append(ops.Release(buffer=full, stream=COMPUTE))
                placed.extend(gather(shard, buffer, size))
            if starts:
                before.setdefault(len(body), []).append(ops.Release(buffer=full, stream=COMPUTE))
        return replace(section, body=rewrite.insert(body, before=before))


def _gathered_from(program: Program) -> Mapping[str, str]:
    """Return the shard from which each gathered buffer is gathered, in the order of the buffers."""
    shards = {
        pair.destination.buffer: pair.source.buffer
        for op in program.ops()
        if isinstance(op, ops.AllGather)
        for pair in op.pairs
    }
    return {
        buffer.name: shards[buffer.name]
        for buffer in program.buffers
        if buffer.role is Role.GATHERED and buffer.name in shards
    }


def _is_of(op: Op, sources: Mapping[str, str]) -> bool:
    """Return whether the op allocates, gathers or releases a gathered buffer."""
    match op:
        case ops.Memory():
            return op.buffer in sources
        case ops.AllGather():
            return all(pair.destination.buffer in sources for pair in op.pairs)
        case _:
            return False


class _Computes:
    """The compute ops of a section: the readers of each buffer, and the forward and the backward."""

    def __init__(self, body: Sequence[Op], program: Program) -> None:
        view = SectionView(program, body)
        self.readers = {
            name: [index for index in readers if index in view.computes]
            for name, readers in view.readers.items()
        }
        self.of_unit: dict[str, list[int]] = {}
        self.previous: dict[int, int] = {}
        """The previous compute op of each."""
        previous, has_gradients = -1, False
        for index, op in view.computes.items():
            self.previous[index], previous = previous, index
            self.of_unit.setdefault(op.unit, []).append(index)
            has_gradients |= any(d is not None and d.gradient is not None for d in op.destinations)
        last_forward = -1 if view.loss is None else view.loss
        forward = range(last_forward + 1)
        backward = range(last_forward + 1, len(body))
        self.phases = (forward, backward) if has_gradients else (range(len(body)),)

    def runs(self, buffer: str) -> list[int]:
        """Return the first op of each run of uses."""
        readers = self.readers.get(buffer, [])
        reading = set(readers)
        return [index for index in readers if self.previous[index] not in reading]

    def visits(self, buffer: str, unit: str) -> list[int]:
        """Return the ops before which to gather, one per phase: the first use, or the unit's first op, or the end."""
        candidates = (*self.readers.get(buffer, ()), *self.of_unit.get(unit, ()))
        return [
            next((index for index in candidates if index in phase), phase.stop)
            for phase in self.phases
        ]
