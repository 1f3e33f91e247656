"""Run several micro-batches unit by unit, so that the parameters of a unit are gathered or copied once for all of them.

A logical program runs one micro-batch in each micro-step. Here a section runs ``micro_batches`` of them: the forward of
the first unit for each, then that of the second, and so on, and likewise the backward. Where the backward of a unit
directly follows its forward, as for the last unit, a micro-batch runs both before the next one starts. Later passes
gather parameters, or copy them to the device, for a run of uses; so they do it once for all these micro-batches. The
saved values of all of them are live at once.

Inputs, seeds and weights of micro-batches are in slices (``zeroir/ir/analysis/micro_batches.py``). A temporary buffer
that is live from one unit's turn to another's gets a copy for each micro-batch.

With ``whole_step`` these are all micro-batches of a step. Then there is no section ``micro_step``, and a sum of
gradients is no longer passed from one section to the next: it starts with its unit's backward, and is complete when
that ends. Contributions are added as before, whole on each rank, in FP32 and in the order of the micro-batches.

What ``order-by-layer{micro_batches=2, whole_step=true}`` changes::

    + interleaved 2
    - buffer %x : f32[64] device input = value x
    + buffer %x : f32[128] device input = value x
    - buffer %a.grad_sum : f32[256] device grad = grad a micro=past
    + buffer %a.grad_sum : f32[256] device grad = grad a micro=stale
    + buffer %h.micro1 : f32[32] device saved
    - section micro_step {
    + section last_micro_step {
    - compute @a.forward(%x, w: %a.param[0:128]) -> (%h)  unit=a stream=compute
    + compute @a.forward(%x[0:64], w: %a.param[0:128]) -> (%h)  unit=a stream=compute
    + alloc %h.micro1  stream=compute
    + compute @a.forward(%x[64:128], w: %a.param[0:128]) -> (%h.micro1)  unit=a stream=compute
    + fill %a.grad_sum = 0.0  stream=compute
      cast %a.grad -> += %a.grad_sum  stream=compute
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.micro_batches import aligned_slice_numel, is_sliced
from zeroir.ir.buffers import Buffer, Region, Role, whole
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.limits import MOST_ITEMS
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program, Section
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderByLayer(Pass):
    """Run ``micro_batches`` unit by unit; with ``whole_step`` these are all of a step."""

    name: ClassVar[str] = "order-by-layer"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE, Fact.ONE_MICRO_BATCH})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_MICRO_BATCH})

    micro_batches: int
    whole_step: bool = False

    def __post_init__(self) -> None:
        if self.micro_batches < 2:
            raise UserError(
                f"The option `micro_batches` of `{self.name}` is at least 2, not {self.micro_batches}."
            )

    def __call__(self, program: Program) -> Program:
        """Return the program with several micro-batches in each of its micro-step sections."""
        if MICRO_STEP not in program.section_by_name:
            raise UserError(
                f"`{self.name}` needs a program for steps of several micro-batches: compile it with --micro-steps 2 "
                "or more."
            )
        ops_of_one = len(program.section_by_name[LAST_MICRO_STEP].body)
        if self.micro_batches * ops_of_one > MOST_ITEMS:
            raise UserError(
                f"--order layer makes {self.micro_batches * ops_of_one:,} ops of {self.micro_batches:,} micro-batches, "
                f"more than {MOST_ITEMS:,}: compile with smaller groups, such as --order layer=8."
            )
        orders = {
            section.name: _LayerOrder(program, section.body, self.micro_batches)
            for section in program.sections
            if section.name in (MICRO_STEP, LAST_MICRO_STEP)
        }
        buffers: dict[str, tuple[Buffer, ...]] = {}
        for buffer in program.buffers:
            if is_sliced(program, buffer):
                numel = self.micro_batches * aligned_slice_numel(buffer)
                buffers[buffer.name] = (replace(buffer, numel=numel),)
                continue
            copies = dict.fromkeys(
                copy for order in orders.values() for copy in order.copies.get(buffer.name, ())
            )
            if copies:
                buffers[buffer.name] = tuple(replace(buffer, name=copy) for copy in copies)
        scalars = tuple(
            replace(bound, values=bound.values * self.micro_batches)
            if is_sliced(program, program.buffer_by_name[bound.buffer])
            else bound
            for bound in program.scalars
        )
        ordered = rewrite.map_sections(
            program,
            lambda section: (
                replace(section, body=tuple(orders[section.name].body()))
                if section.name in orders
                else section
            ),
        )
        ordered = replace(
            rewrite.replace_buffers(ordered, buffers),
            scalars=scalars,
            interleaved=self.micro_batches,
        )
        return _with_sums_of_one_section(ordered) if self.whole_step else ordered


class _LayerOrder:
    """The order by layers of the ops of one micro-batch, repeated for ``count`` micro-batches.

    ``copies`` are the names of the buffers, one for each micro-batch, that replace a temporary one.
    """

    def __init__(self, program: Program, body: Sequence[Op], count: int) -> None:
        self._program = program
        self._count = count
        self._turns = _turns(body)
        self._require_independent()
        taken = set(program.buffer_by_name)
        self.copies: Mapping[str, tuple[str, ...]] = {
            name: (
                name,
                *(rewrite.claimed_name(f"{name}.micro{i}", taken) for i in range(1, count)),
            )
            for name in self._carried()
        }

    def body(self) -> Iterator[Op]:
        """Yield the ops of all micro-batches."""
        for turn in self._turns:
            for index in range(self._count):
                for op in turn:
                    yield self._of_micro_batch(op, index)

    def _of_micro_batch(self, op: Op, index: int) -> Op:
        def change(region: Region) -> Region:
            buffer = self._program.buffer_by_name[region.buffer]
            if is_sliced(self._program, buffer):
                return replace(region, offset=region.offset + index * aligned_slice_numel(buffer))
            copies = self.copies.get(region.buffer)
            return region if copies is None else replace(region, buffer=copies[index])

        if isinstance(op, ops.Memory):
            copies = self.copies.get(op.buffer)
            return op if copies is None else replace(op, buffer=copies[index])
        return rewrite.map_regions(op, change)

    def _carried(self) -> Iterator[str]:
        """Yield the temporary buffers that are live from one turn to another.

        They include gradients of a micro-batch, which may be reduced while the next one is computed.
        """
        turns: dict[str, set[int]] = {}
        for number, turn in enumerate(self._turns):
            for op in turn:
                for name in _touched(op):
                    turns.setdefault(name, set()).add(number)
        for name, own in turns.items():
            buffer = self._program.buffer_by_name[name]
            if not buffer.is_persistent and (len(own) > 1 or buffer.role is Role.GRAD):
                yield name

    def _require_independent(self) -> None:
        """Raise a UserError if a micro-batch needs a buffer that the previous one changes in a later turn."""
        users: dict[str, dict[int, str]] = {}
        changed: set[str] = set()
        for number, turn in enumerate(self._turns):
            unit = next((op.unit for op in turn if isinstance(op, ops.Compute)), "")
            for op in turn:
                effect = effects(op)
                for name in _touched(op):
                    users.setdefault(name, {})[number] = unit
                changed |= {region.buffer for region in (*effect.writes, *effect.accumulates)}
        for name in sorted(changed):
            buffer = self._program.buffer_by_name[name]
            if (
                not buffer.is_persistent
                or is_sliced(self._program, buffer)
                or len(users[name]) == 1
            ):
                continue
            units = " and ".join(dict.fromkeys(users[name].values()))
            raise UserError(
                f"--order layer cannot run several micro-batches unit by unit: %{name}, which changes from one "
                f"micro-batch to the next, is used in several places, in {units}. Compile with --order step."
            )


def _turns(body: Sequence[Op]) -> list[Sequence[Op]]:
    """Return the ops of one micro-batch, split where another unit's turn begins with the allocs of its first op."""
    starts = [0]
    unit: str | None = None
    first_alloc: int | None = None
    for index, op in enumerate(body):
        if isinstance(op, ops.Alloc) and first_alloc is None:
            first_alloc = index
        if not isinstance(op, ops.Compute):
            continue
        if unit not in (None, op.unit):
            starts.append(index if first_alloc is None else first_alloc)
        unit, first_alloc = op.unit, None
    return [body[start:stop] for start, stop in zip(starts, [*starts[1:], len(body)], strict=True)]


def _touched(op: Op) -> Collection[str]:
    if isinstance(op, ops.Memory):
        return (op.buffer,)
    return rewrite.used_buffers(op)


def _with_sums_of_one_section(program: Program) -> Program:
    """Return the program without ``micro_step``, whose sums of gradients start anew in each step."""
    last = program.section_by_name[LAST_MICRO_STEP]
    sums = {
        name: (replace(buffer, holds=replace(buffer.holds, micro=Micro.STALE)),)
        for name in rewrite.complete_gradients(last)
        if isinstance((buffer := program.buffer_by_name[name]).holds, FlatContent)
        and buffer.holds.micro is Micro.PAST
    }

    def rewritten(section: Section) -> Section:
        if section.name == LAST_MICRO_STEP:
            return replace(section, body=tuple(_begun_with_zeros(section.body, sums, program)))
        if section.name == UPDATE:
            body = tuple(op for op in section.body if not _clears(op, sums))
            return replace(section, body=body)
        return section

    program = replace(program, sections=tuple(s for s in program.sections if s.name != MICRO_STEP))
    return rewrite.replace_buffers(rewrite.map_sections(program, rewritten), sums)


def _begun_with_zeros(body: Sequence[Op], sums: Collection[str], program: Program) -> Iterator[Op]:
    begun: set[str] = set()
    for op in body:
        for name in sorted(rewrite.used_buffers(op) & set(sums) - begun):
            begun.add(name)
            destination = whole(program.buffer_by_name[name])
            yield ops.Fill(destination=destination, value=0.0, stream=COMPUTE)
        yield op


def _clears(op: Op, sums: Collection[str]) -> bool:
    return isinstance(op, ops.Fill) and op.destination.buffer in sums
