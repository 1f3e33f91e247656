"""Keep the values that the forward saves for the backward in host memory in between.

A saved value is copied to the host once the forward of its unit has written it, and back before the first backward that
reads it. Its device memory is free in the meantime. The section is divided into turns: runs of compute ops of one unit,
in the forward and in the backward.

* ``to_host`` stands at the end of the turn that writes the value and runs on ``copy_out`` beside the next turn. At the
  end of that next turn, or of a later one that still reads the value, stands the release, so one turn's values travel
  while the next turn's are made.
* ``to_device`` stands at the beginning of the turn before the first backward that reads the value, and runs on
  ``copy_in`` beside that turn. It fills a second device buffer, which the backward reads in the place of the first.
* The bound ``activations ahead=0`` holds the streams to that: no activation begins before all those released above it
  have ended. However slow the link to the host is, no more activations are live than the text of the program shows.

A value stays on the device where fewer than two turns are between its release and its copy back, as with those of the
last unit, which its backward needs immediately. So does a value of fewer than ``smallest`` bytes: at the 25 GB/s of a
PCIe 4.0 link, 64 KiB take 3 µs, less than the fixed time of a transfer, and they free almost nothing. Parameters,
gradients, inputs and other persistent buffers are not saved values.

By default all possible values are offloaded, with ``units`` those that the backwards of these units are the first to
read. With ``bytes`` only as many are offloaded as reduce the device's memory by that much: first those that are away
for the most turns, and of these the largest. ``zeroir.memory.footprint`` computes the device's memory.

What ``offload-activations{units=a, smallest=0}`` changes::

    + bound activations ahead=0
    + buffer %m.host : f32[32] host saved
    + buffer %m.again : f32[32] device saved
    + alloc %m.host  stream=copy_out
    + to_host %m -> %m.host  stream=copy_out
    + !1 = release %m  stream=copy_out
    + wait !1  on=compute
    + alloc %m.again  stream=copy_in
    + !3 = to_device %m.host -> %m.again  stream=copy_in
    + release %m.host  stream=copy_in
    + wait !3  on=compute
    - compute @a.backward(%dh, %m, %x) -> (grad w: %a.grad[0:128])  unit=a stream=compute
    + compute @a.backward(%dh, %m.again, %x) -> (grad w: %a.grad[0:128])  unit=a stream=compute
    - release %m  stream=compute
    + release %m.again  stream=compute
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count
from typing import ClassVar, Final

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.bounds import AheadBound, BoundKind, with_bound
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.mesh import COPY_IN, COPY_OUT
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.memory.footprint import footprint
from zeroir.memory.placement import rounded
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.order import derive_waits
from zeroir.passes.common.units import check_patterns, matching

_SMALLEST_BYTES: Final = 64 * 1024
_FEWEST_TURNS: Final = 2
"""A value that is away only for the last turn of the forward would be back when the backward starts to need memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadActivations(Pass):
    """Offload the values that the backwards of these ``units`` read, or as many as save the device ``bytes``.

    Values of fewer than ``smallest`` bytes are not offloaded.
    """

    name: ClassVar[str] = "offload-activations"
    requires: ClassVar[frozenset[Fact]] = NO_FACTS
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    # A later pass that moves values between segments would not find their readers.
    destroys: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})

    units: tuple[str, ...] | None = None
    bytes: int | None = None
    smallest: int = _SMALLEST_BYTES

    def __post_init__(self) -> None:
        if self.units is not None:
            check_patterns(self.units, self.name)
        for option in ("bytes", "smallest"):
            value = getattr(self, option)
            if value is not None and value < 0:
                raise UserError(
                    f"The option `{option}` of `{self.name}` is a number of bytes, at least 0, not {value}."
                )

    def __call__(self, program: Program) -> Program:
        """Return the program with the copies of the chosen values, and the bound that keeps the streams in order.

        Raises:
            UserError: if a pattern names no unit, or the values do not save the device ``bytes``.
        """
        units = None if self.units is None else matching(self.units, program, self.spec())
        by_section = {
            section.name: {
                value.buffer.name: value
                for value in _saved_values(program, section)
                if value.buffer.size_bytes >= max(self.smallest, 1)
                and (units is None or value.unit in units)
            }
            for section in program.sections
        }
        candidates = _longest_away_first(by_section.values())
        if self.bytes is not None:
            candidates = _fewest(program, by_section, candidates, self.bytes)
        return _offloaded(program, by_section, candidates)


# ---------------------------------------------------------------------------------------------------- saved values


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedValue:
    """A value that the forward of a section saves, and the indices of the ops around which its copies are placed.

    The first backward that reads it is that of ``unit``, at the index ``read_at``. The value is away for ``turns``
    turns.
    """

    buffer: Buffer
    unit: str
    copied_after: int
    released_after: int
    reloaded_before: int
    read_at: int
    turns: int


@dataclass(frozen=True, slots=True)
class _Turns:
    """Runs of compute ops of one unit: the indices of the first op and of the last one of each."""

    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, view: SectionView, loss: int) -> _Turns:
        """Return the turns of a section; the op that computes the loss ends one."""
        turns = cls()
        before: tuple[str, bool] | None = None
        for index, op in view.computes.items():
            turn = op.unit, index > loss
            if turn == before:
                turns.lasts[-1] = index
            else:
                turns.firsts.append(index)
                turns.lasts.append(index)
            before = turn
        return turns

    def number(self, index: int) -> int:
        """Return the number of the turn of an op: the last one that begins at it or before it."""
        return max(bisect_right(self.firsts, index) - 1, 0)


def _saved_values(program: Program, section: Section) -> Iterator[_SavedValue]:
    """Yield the values of a section that can be away for long enough, in the order of their allocs."""
    view = SectionView(program, section.body)
    loss = view.loss
    if loss is None:
        return
    turns = _Turns.of(view, loss)
    for name, allocs in view.allocs.items():
        buffer = program.buffer_by_name[name]
        writers, readers = view.writers.get(name, ()), view.readers.get(name, ())
        early_readers = [reader for reader in readers if reader <= loss]
        late_readers = [reader for reader in readers if reader > loss]
        is_one_life = len(allocs) == len(view.releases.get(name, ())) == 1
        if buffer.role is not Role.SAVED or buffer.space is not Space.DEVICE or not is_one_life:
            continue
        if not writers or not late_readers or writers[-1] > loss:
            continue
        written = turns.number(writers[-1])
        released = max([written + 1, *map(turns.number, early_readers)])
        reloaded = turns.number(late_readers[0]) - 1
        if reloaded - released <= _FEWEST_TURNS:
            continue
        yield _SavedValue(
            buffer=buffer,
            unit=view.computes[turns.firsts[reloaded + 1]].unit,
            copied_after=max(turns.lasts[written], writers[-1]),
            released_after=max(turns.lasts[released], *early_readers, 0),
            reloaded_before=turns.firsts[reloaded],
            read_at=late_readers[0],
            turns=reloaded - released - 1,
        )


# --------------------------------------------------------------------------------------------------------- choice

_BySection = Mapping[str, Mapping[str, _SavedValue]]


def _longest_away_first(sections: Collection[Mapping[str, _SavedValue]]) -> Sequence[str]:
    """Return the buffers of saved values: first those that are away for the most turns, and of these the largest."""
    keys: dict[str, tuple[int, int]] = {}
    for values in sections:
        for name, value in values.items():
            key = -value.turns, -value.buffer.size_bytes
            keys[name] = min(key, keys.get(name, key))
    return sorted(keys, key=lambda name: keys[name])


def _fewest(
    program: Program, by_section: _BySection, candidates: Sequence[str], wanted_bytes: int
) -> Sequence[str]:
    """Return the fewest of the first candidates that reduce the device's bytes by ``wanted_bytes``.

    Raises:
        UserError: if all of them are not enough.
    """
    before_bytes = _needed_bytes(program)

    def saved_bytes(number: int) -> int:
        return before_bytes - _needed_bytes(_offloaded(program, by_section, candidates[:number]))

    # A byte that leaves the device saves at most one byte.
    sizes = (rounded(program.buffer_by_name[name].size_bytes, Space.DEVICE) for name in candidates)
    enough = bisect_left([0, *accumulate(sizes)], wanted_bytes)
    too_few, step = enough - 1, 1
    while enough < len(candidates) and saved_bytes(enough) < wanted_bytes:
        too_few, enough, step = enough, enough + step, 2 * step
    if enough >= len(candidates):
        enough = len(candidates)
        most_bytes = saved_bytes(enough)
        if most_bytes < wanted_bytes:
            raise UserError(
                f"Offloading activations saves the device at most {most_bytes:,} bytes, and not {wanted_bytes:,}; "
                "offload something else, too, or ask for less."
            )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if saved_bytes(middle) < wanted_bytes:
            too_few = middle
        else:
            enough = middle
    return candidates[:enough]


def _needed_bytes(program: Program) -> int:
    """Return the bytes that the device must have."""
    return footprint(derive_waits(program)).total_bytes


# --------------------------------------------------------------------------------------------------------- rewrite


def _offloaded(program: Program, by_section: _BySection, names: Sequence[str]) -> Program:
    """Return the program with the values in these buffers offloaded, in each section where this is possible."""
    if not names:
        return program
    taken = set(program.buffer_by_name)
    chosen = set(names)
    copies = {b.name: _Copies.of(b, taken) for b in program.buffers if b.name in chosen}
    sections = tuple(
        _rewritten(
            section,
            [value for name, value in by_section[section.name].items() if name in chosen],
            copies,
        )
        for section in program.sections
    )
    added = {
        name: (program.buffer_by_name[name], copied.on_host, copied.again)
        for name, copied in copies.items()
    }
    program = rewrite.replace_buffers(program, added)
    return replace(
        program,
        streams=rewrite.with_streams(program.streams, (COPY_IN, COPY_OUT)),
        bounds=with_bound(program.bounds, AheadBound(kind=BoundKind.ACTIVATIONS, ahead=0)),
        sections=sections,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The copy of a saved value on the host, and the one that returns to the device."""

    on_host: Buffer
    again: Buffer

    @classmethod
    def of(cls, buffer: Buffer, taken: set[str]) -> _Copies:
        """Return the copies of a value, with names that are not taken, and add these to ``taken``."""

        def named(suffix: str) -> str:
            stem = f"{buffer.name}.{suffix}"
            name = next(
                n for n in chain((stem,), (f"{stem}.{i}" for i in count(1))) if n not in taken
            )
            taken.add(name)
            return name

        return cls(
            on_host=replace(buffer, name=named("host"), space=Space.HOST),
            again=replace(buffer, name=named("again")),
        )


def _rewritten(
    section: Section, values: Sequence[_SavedValue], copies: Mapping[str, _Copies]
) -> Section:
    away = {value.buffer.name: value for value in values}
    before: dict[int, list[Op]] = {}
    after: dict[int, list[Op]] = {}
    # A release after the copies of the next turn would wait for these as well.
    for value in values:
        release = ops.Release(buffer=value.buffer.name, stream=COPY_OUT)
        after.setdefault(value.released_after, []).append(release)
    for value in values:
        copied = copies[value.buffer.name]
        after.setdefault(value.copied_after, []).extend(
            (
                ops.Alloc(buffer=copied.on_host.name, stream=COPY_OUT),
                ops.ToHost(
                    source=whole(value.buffer), destination=whole(copied.on_host), stream=COPY_OUT
                ),
            )
        )
    for value in sorted(values, key=lambda value: value.read_at):
        copied = copies[value.buffer.name]
        before.setdefault(value.reloaded_before, []).extend(
            (
                ops.Alloc(buffer=copied.again.name, stream=COPY_IN),
                ops.ToDevice(
                    source=whole(copied.on_host), destination=whole(copied.again), stream=COPY_IN
                ),
                ops.Release(buffer=copied.on_host.name, stream=COPY_IN),
            )
        )

    def redirected(index: int, op: Op) -> Op:
        if isinstance(op, ops.Release) and op.buffer in away:
            return replace(op, buffer=copies[op.buffer].again.name)

        def moved(region: Region) -> Region:
            value = away.get(region.buffer)
            if value is None or index < value.reloaded_before:
                return region
            return replace(region, buffer=copies[region.buffer].again.name)

        return rewrite.map_regions(op, moved)

    body = [redirected(index, op) for index, op in enumerate(section.body)]
    return replace(section, body=rewrite.insert(body, before=before, after=after))
