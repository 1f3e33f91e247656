"""The slices of micro-batches, which ``zeroir.ir.analysis.micro_batches`` describes, and the ops that work on each.

The pass that lays them out and the engine that fills them have their own functions: one that forgets a kind of buffer
omits it from the schedule and from the run, and must not omit it from the proof as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Role
from zeroir.ir.contents import Micro, WeightContent
from zeroir.ir.program import Program, Section
from zeroir.ir.sizes import Size

_Life = tuple[str, int]
"""The name of a buffer, and how many allocs of it there were."""


def is_sliced(program: Program, buffer: Buffer) -> bool:
    """Return whether a buffer has a slice for each micro-batch of a section."""
    match buffer:
        case Buffer(role=Role.INPUT | Role.RNG) | Buffer(holds=WeightContent(micro=Micro.CURRENT)):
            return True
        case _:
            return buffer.name == program.batch_loss


def slice_numel(program: Program, name: str) -> int:
    """Return the number of elements of a slice of a buffer."""
    return program.buffer_by_name[name].numel // program.interleaved


def slice_region(program: Program, name: str, micro_batch: int, numel: int) -> Region:
    """Return the first ``numel`` elements of a micro-batch's slice of a buffer."""
    return Region(buffer=name, offset=slice_numel(program, name) * micro_batch, numel=numel)


def micro_batches_of_lines(program: Program, section: Section) -> Sequence[Set[int]]:
    """Return for each op of a section, by its line, the micro-batches whose values it uses.

    These are the slices, and what is reached from them, from op to op: the lives of activations, and of temporary
    buffers whose size depends on a dim. A *life* is what a buffer holds from an ``alloc`` to the next one.
    """
    sliced = {buffer.name for buffer in program.buffers if is_sliced(program, buffer)}
    temporary = {buffer.name for buffer in program.buffers if _is_value(buffer)}
    lives_of_lines: list[set[_Life]] = []
    lines_of_lives: dict[_Life, list[int]] = {}
    lines_of_slices: dict[int, set[int]] = {}
    allocs: Counter[str] = Counter()
    for line, op in enumerate(section.body):
        effect = effects(op)
        allocs.update(effect.allocs)
        regions = (*effect.reads, *effect.writes, *effect.accumulates)
        names = {*effect.allocs, *effect.frees, *(region.buffer for region in regions)}
        lives = {(name, allocs[name]) for name in names & temporary}
        lives_of_lines.append(lives)
        for life in lives:
            lines_of_lives.setdefault(life, []).append(line)
        for region in regions:
            if region.buffer in sliced:
                for micro_batch in _ends(region, slice_numel(program, region.buffer)):
                    lines_of_slices.setdefault(micro_batch, set()).add(line)
    micro_batches: list[set[int]] = [set() for _ in section.body]
    for micro_batch, lines in lines_of_slices.items():
        reached: set[_Life] = set()
        while lines:
            line = lines.pop()
            micro_batches[line].add(micro_batch)
            beside = lives_of_lines[line] - reached
            reached |= beside
            lines.update(*(lines_of_lives[life] for life in beside))
    return micro_batches


def _is_value(buffer: Buffer) -> bool:
    match buffer:
        case (
            Buffer(holds=None, role=Role.ACTIVATION | Role.SAVED) | Buffer(holds=None, numel=Size())
        ):
            return True
        case _:
            return False


def _ends(region: Region, numel: int) -> tuple[int, int]:
    """Return the slices, each of ``numel`` elements, of the first and the last element of a region."""
    first, count = int(region.offset), int(region.numel)
    return first // max(numel, 1), max(first, first + count - 1) // max(numel, 1)
