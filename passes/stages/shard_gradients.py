"""ZeRO stage 2: gradients live as shards; a full gradient buffer lives only while its unit's backward fills it.

Each flat's gradient is computed into a temporary buffer, reduce-scattered into this rank's shard as soon as it is
complete, and released. With several micro-steps, each of them reduce-scatters, and the shards are added in FP32. So the
sum over ranks comes before the sum over micro-steps; in stages 0 and 1 it comes after. Where one section runs all
micro-batches of a step (``order-by-layer``), it also comes after: the temporary buffer then has their FP32 sum.

What ``shard-gradients`` changes::

    - buffer %a.grad : f32[512] device grad = grad a micro=stale
    + buffer %a.grad : f32[256] device grad = grad a @dp micro=stale
    + buffer %a.grad_full : f32[512] device grad
    + alloc %a.grad_full  stream=compute
    + fill %a.grad_full[128:512] = 0.0  stream=compute
    - !1 = compute @a.backward(%dh, %x, w: %a.param[0:128]) -> (grad w: %a.grad[0:128])  unit=a stream=compute
    + !1 = compute @a.backward(%dh, %x, w: %a.param[0:128]) -> (grad w: %a.grad_full[0:128])  unit=a stream=compute
      wait !1  on=reduce
    - reduce_scatter %a.grad -> %a.grad[0:512]@dp  comm=reduce stream=reduce
    + reduce_scatter %a.grad_full -> %a.grad  comm=reduce stream=reduce
    + release %a.grad_full  stream=reduce
    - exit %a.grad[0:512]@dp = grad a @dp reduced=(dp) micro=all
    + exit %a.grad = grad a @dp reduced=(dp) micro=all
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.mesh import COMPUTE, REDUCE
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import LAST_MICRO_STEP, Flat, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.stages.all_reduce_gradients import AXIS, REDUCE_COMM


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGradients(Pass):
    """Reduce-scatter each gradient out of a temporary buffer."""

    name: ClassVar[str] = "shard-gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.OPTIMIZER_SHARDED, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_SHARDED})
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with its gradients sharded over the data-parallel axis."""
        return _Sharder(program).run()


class _Sharder:
    """One run of the pass.

    ``full`` maps each buffer that is reduced to the temporary buffer that replaces it; compute ops write gradients to
    it, or casts add them. ``resting`` are the persistent gradient buffers that become shards. Where gradients
    accumulate over micro-steps the two differ: `%f.grad` is computed and reduced, and `%f.grad_sum` is at rest.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.size = program.mesh.size(AXIS)
        self.resting = rewrite.complete_gradients(program.section_by_name[LAST_MICRO_STEP])
        contributed = rewrite.contributed_buffers(program)
        self.flats: Mapping[str, Flat] = {
            name: program.flat_by_name[content.flat]
            for name, content in self.resting.items()
            if name not in contributed and _is_sum_of_a_section(program.buffer_by_name[name])
        } or contributed
        self.full: dict[str, Buffer] = {}
        micro_batches: Counter[str] = Counter()
        for name, flat in self.flats.items():
            number = micro_batches[flat.name]
            micro_batches[flat.name] += 1
            self.full[name] = Buffer(
                name=f"{flat.name}.grad_full" + (f".micro{number}" if number else ""),
                dtype=program.buffer_by_name[name].dtype,
                numel=flat.padded_numel,
                space=Space.DEVICE,
                role=Role.GRAD,
            )

    def run(self) -> Program:
        program = rewrite.map_sections(self.program, self._section)
        changed: dict[str, tuple[Buffer, ...]] = {}
        for name in {**self.flats, **self.resting}:
            buffer = self.program.buffer_by_name[name]
            holds = buffer.holds
            accumulates = isinstance(holds, FlatContent) and holds.micro is Micro.PAST
            shard = rewrite.sharded(buffer, AXIS, self.size, reduced=(AXIS,) if accumulates else ())
            changed[name] = (shard, self.full[name]) if name in self.full else (shard,)
        return rewrite.replace_buffers(program, changed)

    def _section(self, section: Section) -> Section:
        begun: set[str] = set()
        body: list[Op] = []
        for op in section.body:
            body += self._begin(op, begun)
            body += self._op(op)
        return replace(
            section,
            entry=rewrite.map_state(section.entry, self._at_rest),
            body=tuple(body),
            exit=rewrite.map_state(section.exit, self._at_rest),
        )

    def _begin(self, op: Op, begun: set[str]) -> Iterator[Op]:
        """Allocate a gradient that was persistent until now, and fill its padding, before the first contribution."""
        if not isinstance(op, ops.Compute | ops.Fill):
            return
        filled = op.destination if isinstance(op, ops.Fill) else None
        for name in sorted(rewrite.used_buffers(op)):
            if name in self.full and name in self.resting and name not in begun:
                begun.add(name)
                full = self.full[name].name
                yield ops.Alloc(buffer=full, stream=COMPUTE)
                if filled != whole(self.program.buffer_by_name[name]):
                    yield from rewrite.gap_fills(self.flats[name], full, COMPUTE)

    def _op(self, op: Op) -> Iterator[Op]:
        match op:
            case ops.Alloc() if op.buffer in self.full:
                yield replace(op, buffer=self.full[op.buffer].name)
            case ops.Release() if op.buffer in self.full:
                return  # It is released where it is reduced.
            case ops.Compute():
                yield rewrite.map_regions(op, self._into_full)
            case ops.Fill() | ops.Cast() if op.destination.buffer in self.full:
                yield rewrite.map_regions(op, self._into_full)
            case ops.Cast() if (
                op.mode is Mode.ACCUMULATE
                and op.source.buffer in self.full
                and op.destination.buffer in self.resting
            ):
                yield from self._accumulate(op)
            case ops.ReduceScatter() if op.comm == REDUCE_COMM:
                yield from self._scatter(op)
            case _:
                yield rewrite.map_regions(op, self._at_rest)

    def _accumulate(self, op: ops.Cast) -> Iterator[Op]:
        """Reduce the gradient of a micro-step over the ranks, then add the shard to the sum."""
        full, shard = self.full[op.source.buffer], rewrite.as_shard(op.source, self.size)
        pair = ops.Pair(source=whole(full), destination=shard)
        yield ops.Alloc(buffer=shard.buffer, stream=REDUCE)
        yield ops.ReduceScatter(pairs=(pair,), comm=REDUCE_COMM, stream=REDUCE)
        yield ops.Release(buffer=full.name, stream=REDUCE)
        total = rewrite.as_shard(op.destination, self.size)
        yield replace(op, source=shard, destination=total, stream=REDUCE)
        yield ops.Release(buffer=shard.buffer, stream=REDUCE)

    def _scatter(self, op: ops.ReduceScatter) -> Iterator[Op]:
        """Reduce a gradient that does not accumulate from the temporary buffer into the shard."""
        pairs = tuple(
            ops.Pair(
                source=whole(self.full[pair.source.buffer]),
                destination=rewrite.as_shard(pair.source, self.size),
            )
            for pair in op.pairs
            if pair.source.buffer in self.full
        )
        if pairs:
            yield replace(op, pairs=pairs)
        for pair in pairs:
            yield ops.Release(buffer=pair.source.buffer, stream=op.stream)

    def _into_full(self, region: Region) -> Region:
        full = self.full.get(region.buffer)
        return region if full is None else replace(region, buffer=full.name)

    def _at_rest(self, region: Region) -> Region:
        """Return the shard that replaces a slice of a gradient, or all of it."""
        if region.buffer not in self.resting:
            return region
        return rewrite.as_shard(region, self.size)


def _is_sum_of_a_section(buffer: Buffer) -> bool:
    """Return whether a gradient is summed over the micro-batches of one section, and not passed on to the next."""
    return isinstance(buffer.holds, FlatContent) and buffer.holds.micro is Micro.STALE
