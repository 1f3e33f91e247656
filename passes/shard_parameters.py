"""ZeRO stage 3, first part: parameters live as shards and are gathered into a temporary buffer where they are read.

Every flat is gathered before its first use in a section and released at the section's end: right, but as much memory
as before at the peak. `insert-gathers` and `insert-releases` then shorten its life to the runs of its uses. The
update works on shards, so that its final all-gather goes away.

Before ``shard-parameters``::

    buffer %a.param : f32[512] device param = param a
    buffer %b.param : f32[512] device param = param b
    section last_micro_step {
      alloc %h  stream=compute
      compute @a.forward(%x, w: %a.param[0:128]) -> (%h)  unit=a stream=compute
      compute @b.forward(%h, v: %b.param[0:8]) -> (%loss)  unit=b stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
      alloc %dh  stream=compute
      !0 = compute @b.backward(%loss_scale[0:1], %h, v: %b.param[0:8]) -> (%dh, grad v: %b.grad_full[0:8])  unit=b stream=compute
      wait !0  on=reduce
      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
      release %b.grad_full  stream=reduce
      release %h  stream=compute
      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
      !1 = compute @a.backward(%dh, %x, w: %a.param[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
      wait !1  on=reduce
      reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
      release %a.grad_full  stream=reduce
      release %dh  stream=compute
      exit %a.grad = grad a @dp reduced=(dp) micro=all
      exit %b.grad = grad b @dp reduced=(dp) micro=all
    }
    section update {
      entry %a.grad = grad a @dp reduced=(dp) micro=all
      entry %b.grad = grad b @dp reduced=(dp) micro=all
      all_reduce %loss -> %loss  comm=reduce stream=reduce
      decide step=%step gradient_divisor=%divisor divisor=2  stream=compute
      !0 = optimizer_step momentum param=%a.param[0:512]@dp grad=%a.grad states=(%a.momentum_buffer) step=%step lr=%lr hyper=%hyper gradient_divisor=%divisor  group=default stream=compute
      wait !0  on=gather
      all_gather %a.param[0:512]@dp -> %a.param  comm=gather stream=gather
      !1 = optimizer_step momentum param=%b.param[0:512]@dp grad=%b.grad states=(%b.momentum_buffer) step=%step lr=%lr hyper=%hyper gradient_divisor=%divisor  group=default stream=compute
      wait !1  on=gather
      all_gather %b.param[0:512]@dp -> %b.param  comm=gather stream=gather
    }

After::

    buffer %a.param : f32[256] device param = param a @dp
    buffer %a.full : f32[512] device gathered
    buffer %b.param : f32[256] device param = param b @dp
    buffer %b.full : f32[512] device gathered
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
      !3 = compute @a.backward(%dh, %x, w: %a.full[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
      wait !3  on=reduce
      reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
      release %a.grad_full  stream=reduce
      release %dh  stream=compute
      release %a.full  stream=compute
      release %b.full  stream=compute
      exit %a.grad = grad a @dp reduced=(dp) micro=all
      exit %b.grad = grad b @dp reduced=(dp) micro=all
    }
    section update {
      entry %a.grad = grad a @dp reduced=(dp) micro=all
      entry %b.grad = grad b @dp reduced=(dp) micro=all
      all_reduce %loss -> %loss  comm=reduce stream=reduce
      decide step=%step gradient_divisor=%divisor divisor=2  stream=compute
      optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) step=%step lr=%lr hyper=%hyper gradient_divisor=%divisor  group=default stream=compute
      optimizer_step momentum param=%b.param grad=%b.grad states=(%b.momentum_buffer) step=%step lr=%lr hyper=%hyper gradient_divisor=%divisor  group=default stream=compute
    }
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.mesh import COMPUTE, GATHER
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Program, Section
from zeroir.passes.all_reduce_gradients import AXIS
from zeroir.passes.base import Fact, format_spec
from zeroir.passes.common import rewrite
from zeroir.passes.common.order import synchronise, unordered
from zeroir.passes.shard_optimizer import GATHER_COMM


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParameters:
    """Keep parameters as shards."""

    name: ClassVar[str] = "shard-parameters"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_SHARDED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMETERS_SHARDED})

    def spec(self) -> str:
        """The pass as text."""
        return format_spec(self.name, {})

    def __call__(self, program: Program) -> Program:
        """The program with its parameters sharded over the data-parallel axis."""
        program = unordered(program)
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
        return synchronise(rewrite.replace_buffers(program, changed))


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
