"""ZeRO stage 3, first part: parameters live as shards and are gathered into a temporary buffer where they are read.

Every flat is gathered before its first use in a section and released at the end of the section. This is correct, but
the peak memory stays the same; `insert-gathers` and `insert-releases` then shorten the life of the full flat to the
runs of its uses. The update works on shards, so its final all-gather disappears.

What ``shard-parameters`` changes::

    - buffer %a.param : f32[512] device param = param a
    + buffer %a.param : f32[256] device param = param a @dp
    + buffer %a.full : f32[512] device gathered
      section last_micro_step {
    + alloc %a.full  stream=gather
    + !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
    + wait !0  on=compute
    - compute @a.forward(%x, w: %a.param[0:128]) -> (%h)  unit=a stream=compute
    + compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
    + release %a.full  stream=compute
    - !0 = optimizer_step momentum param=%a.param[0:512]@dp grad=%a.grad states=(%a.momentum_buffer) …
    + optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
    - wait !0  on=gather
    - all_gather %a.param[0:512]@dp -> %a.param  comm=gather stream=gather
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.mesh import COMPUTE, GATHER
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.stages.all_reduce_gradients import AXIS
from zeroir.passes.stages.shard_optimizer import GATHER_COMM


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParameters(Pass):
    """Keep parameters as shards."""

    name: ClassVar[str] = "shard-parameters"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.OPTIMIZER_SHARDED, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMETERS_SHARDED})
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with its parameters sharded over the data-parallel axis."""
        size = program.mesh.size(AXIS)
        full = {
            name: Buffer(
                name=f"{flat.name}.full",
                dtype=program.buffer_by_name[name].dtype,
                numel=flat.padded_numel,
                space=Space.DEVICE,
                role=Role.GATHERED,
            )
            for name, flat in rewrite.param_buffers(program).items()
        }

        def shard(region: Region) -> Region:
            if region.buffer not in full:
                return region
            return rewrite.as_shard(region, size)

        def rewritten(section: Section) -> Section:
            if section.name != UPDATE:
                return _gather_once(section, full, size)
            body = (
                rewrite.map_regions(op, shard)
                for op in section.body
                if not (
                    isinstance(op, ops.AllGather)
                    and all(pair.destination.buffer in full for pair in op.pairs)
                )
            )
            return replace(section, body=tuple(body))

        program = rewrite.map_sections(program, rewritten)
        changed = {
            name: (rewrite.sharded(program.buffer_by_name[name], AXIS, size), buffer)
            for name, buffer in full.items()
        }
        return rewrite.replace_buffers(program, changed)


def _gather_once(section: Section, full: dict[str, Buffer], size: int) -> Section:
    gathered: dict[str, Buffer] = {}
    body: list[Op] = []

    def into_full(region: Region) -> Region:
        buffer = full.get(region.buffer)
        return region if buffer is None else replace(region, buffer=buffer.name)

    for op in section.body:
        if isinstance(op, ops.Compute):
            for name in dict.fromkeys(a.view.region.buffer for a in op.arguments):
                if name in full and name not in gathered:
                    gathered[name] = full[name]
                    body += gather(name, full[name], size)
        body.append(rewrite.map_regions(op, into_full))
    body += [ops.Release(buffer=buffer.name, stream=COMPUTE) for buffer in gathered.values()]
    return replace(section, body=tuple(body))


def gather(shard: str, full: Buffer, size: int) -> tuple[Op, Op]:
    """Allocate the full buffer and gather it from the shards, both on the gather stream."""
    source = Region(buffer=shard, offset=0, numel=full.numel // size)
    pair = ops.Pair(source=source, destination=whole(full))
    return (
        ops.Alloc(buffer=full.name, stream=GATHER),
        ops.AllGather(pairs=(pair,), comm=GATHER_COMM, stream=GATHER),
    )
