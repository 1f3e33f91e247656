"""Issue each gather ``distance`` units ahead of its use, and never further, in the forward and in the backward.

What one compute op is the first to read is gathered together: a *wave*. Before the first op of wave w runs, wave
w + distance is gathered, under the name ``prefetch``, while w computes. That gather first waits for the release of
wave w − 1, so that however slow the compute stream is, at most distance + 1 waves are live. ``distance=0`` gathers
nothing ahead and still holds the gather stream back. A bucket belongs to the wave of what is first read of it.

Before ``prefetch{distance=1}``::

    section last_micro_step {
      alloc %h  stream=compute
      alloc %a.full  stream=gather
      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
      wait !0  on=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
      !1 = release %a.full  stream=compute
      alloc %b.full  stream=gather
      !2 = all_gather %b.param -> %b.full  comm=gather stream=gather
      wait !2  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
      alloc %dh  stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
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

After::

    section last_micro_step {
      alloc %h  stream=compute
      alloc %a.full  stream=gather
      !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
      alloc %b.full  stream=gather
      !1 = prefetch %b.param -> %b.full  comm=gather stream=gather
      wait !0  on=compute
      compute @a.forward(%x, w: %a.full[0:128]) -> (%h)  unit=a stream=compute
      !2 = release %a.full  stream=compute
      wait !2  on=gather
      alloc %a.full  stream=gather
      !3 = prefetch %a.param -> %a.full  comm=gather stream=gather
      wait !1  on=compute
      compute @b.forward(%h, v: %b.full[0:8]) -> (%loss)  unit=b stream=compute
      alloc %dh  stream=compute
      alloc %b.grad_full  stream=compute
      fill %b.grad_full[8:512] = 0.0  stream=compute
      !4 = compute @b.backward(%loss_scale[0:1], %h, v: %b.full[0:8]) -> (%dh, grad v: %b.grad_full[0:8])  unit=b stream=compute
      release %h  stream=compute
      release %b.full  stream=compute
      wait !4  on=reduce
      reduce_scatter %b.grad_full -> %b.grad  comm=reduce stream=reduce
      release %b.grad_full  stream=reduce
      alloc %a.grad_full  stream=compute
      fill %a.grad_full[128:512] = 0.0  stream=compute
      wait !3  on=compute
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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes import rewrite
from zeroir.passes.base import Fact, format_spec
from zeroir.passes.order import synchronise, unordered


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Gather ``distance`` waves ahead."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED_AFTER_LAST_USE})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED_AHEAD})

    distance: int = 1

    def __post_init__(self) -> None:
        if self.distance < 0:
            raise UserError(
                f"The option `distance` of `{self.name}` is a number of units, at least 0, not {self.distance}."
            )

    def spec(self) -> str:
        """The pass as text."""
        return format_spec(self.name, {"distance": self.distance})

    def __call__(self, program: Program) -> Program:
        """The program with its gathers issued ahead."""
        program = unordered(program)
        return synchronise(
            rewrite.map_sections(program, lambda section: self._rewrite(section, program))
        )

    def _rewrite(self, section: Section, program: Program) -> Section:
        body = list(section.body)
        waves = _waves(body, program)
        before: dict[int, list[Op]] = {}
        at = 0
        for number, wave in enumerate(waves):
            target = waves[max(number - self.distance, 0)].first_use
            # Never before an earlier life of the same buffer has ended, and always in the order of use.
            at = max(at, target, *(gather.earliest for gather in wave.gathers))
            found = before.setdefault(at, [])
            if number > self.distance:
                for release in waves[number - self.distance - 1].releases:
                    if release < at:
                        body[release], event = rewrite.signalling(body[release], release)
                        found.append(ops.Wait(waited=event, on=wave.stream))
            for gather in wave.gathers:
                found.extend(body[alloc] for alloc in gather.allocs)
                found.append(gather.op if at == wave.first_use else _ahead(gather.op))
        moved = {i for wave in waves for g in wave.gathers for i in (*g.allocs, g.index)}
        found = []
        for index, op in enumerate(body):
            found.extend(before.get(index, ()))
            if index not in moved:
                found.append(op)
        return replace(section, body=tuple(found))


@dataclass(slots=True, kw_only=True)
class _Gather:
    """A gather into one buffer or a bucket of them, and where it and the buffers' lives stand in the body.

    ``earliest`` is one past the last release that ended a previous life of a buffer. ``first_use`` is None until it
    is met; it stays so where nobody reads what is gathered. ``releases`` lack a buffer that outlives the section.
    """

    op: ops.AllGather
    allocs: tuple[int, ...]
    index: int
    earliest: int
    first_use: int | None = None
    releases: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wave:
    """The gathers whose buffers the compute op at ``first_use`` is the first to read."""

    first_use: int
    gathers: tuple[_Gather, ...]

    @property
    def releases(self) -> tuple[int, ...]:
        return tuple(sorted(release for gather in self.gathers for release in gather.releases))

    @property
    def stream(self) -> str:
        return self.gathers[0].op.stream


def _waves(body: Sequence[Op], program: Program) -> tuple[_Wave, ...]:
    """The waves of a section in order of use. A gather that nobody reads stays where it is."""
    found: dict[int, list[_Gather]] = {}
    for gather in _gathers(body, program):
        if gather.first_use is not None:
            found.setdefault(gather.first_use, []).append(gather)
    return tuple(_Wave(first_use=use, gathers=tuple(found[use])) for use in sorted(found))


def _gathers(body: Sequence[Op], program: Program) -> list[_Gather]:
    """The gathers of a section into temporary buffers, in program order."""
    found: list[_Gather] = []
    live: dict[str, _Gather] = {}
    allocs: dict[str, int] = {}
    releases: dict[str, int] = {}
    for index, op in enumerate(body):
        match op:
            case ops.Alloc():
                allocs[op.buffer] = index
            case ops.Release():
                releases[op.buffer] = index
                if op.buffer in live:
                    live.pop(op.buffer).releases.append(index)
            case ops.AllGather():
                names = [pair.destination.buffer for pair in op.pairs]
                if any(
                    name not in allocs or program.buffer_by_name[name].role is not Role.GATHERED
                    for name in names
                ):
                    continue
                gather = _Gather(
                    op=op,
                    allocs=tuple(allocs[name] for name in names),
                    index=index,
                    earliest=max(releases.get(name, -1) for name in names) + 1,
                )
                live.update(dict.fromkeys(names, gather))
                found.append(gather)
            case _:
                for name in rewrite.used_buffers(op) & live.keys():
                    if live[name].first_use is None:
                        live[name].first_use = index
    return found


def _ahead(op: ops.AllGather) -> ops.Prefetch:
    return ops.Prefetch(
        pairs=op.pairs,
        comm=op.comm,
        stream=op.stream,
        event=op.event,
        wire_dtype=op.wire_dtype,
        staging=op.staging,
    )
