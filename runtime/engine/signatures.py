"""The programs of a model whose code lets the sizes of batches decide: each takes some sizes.

All ranks together compile one where a rank meets the first batch that no other one takes, before that batch runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from zeroir.errors import UserError
from zeroir.ir.analysis.schedules import Schedule, shared_schedule
from zeroir.ir.program import EVALUATE, STEP_SECTIONS, InputBinding, Program
from zeroir.ir.sizes import Dim, Size
from zeroir.runtime.comm.job import Job, exchanged_texts, require_same_program
from zeroir.runtime.engine.watched_code import CompiledAgain, WatchedCode, is_current
from zeroir.runtime.execution.batch import Shape, has_other_sizes, shape_of
from zeroir.torch_ops.batches import Batch

LOGGER: Final = logging.getLogger("zeroir")

MOST_SIGNATURES: Final = 8
"""Programs that one engine compiles for batches of other sizes: code may let each size decide something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """What is known where the model's code lets sizes decide.

    ``reason`` names its lines. ``dims`` have the ranges of all batches, and ``inputs`` the shapes that depend on these.
    ``compile_at`` compiles a program for batches whose dims have some values, and for as many others as it can.
    """

    reason: str
    dims: tuple[Dim, ...]
    inputs: tuple[InputBinding, ...]
    compile_at: Callable[[Mapping[str, int]], CompiledAgain]


class Signatures:
    """The programs that were compiled from one state of the user's code, one of which runs at a time on a rank.

    ``running`` is the one that runs on this rank. Without ``splits`` it is the only one. ``base`` is the first one,
    from whose code the engine learns of changes. Another one may be right for some values of numbers alone that the
    base follows; it is then taken for these only.
    """

    def __init__(self, running: CompiledAgain, splits: Splits | None = None) -> None:
        self.running = running
        self._splits = splits
        self._known = [running]
        self._is_current = [True]
        self._common = 0
        self._schedules: dict[tuple[CompiledAgain, frozenset[str]], Schedule | None] = {}
        if splits is not None:
            self._whole = replace(running.program, dims=splits.dims, inputs=splits.inputs)

    @property
    def base(self) -> CompiledAgain:
        """The program that was compiled first."""
        return self._known[0]

    @property
    def programs(self) -> list[Program]:
        """The programs among which a rank changes by itself."""
        return [] if self._splits is None else [each.program for each in self._known]

    @property
    def codes(self) -> list[WatchedCode]:
        """What these programs follow."""
        return [each.code for each in self._known if each.code is not None]

    @property
    def are_several(self) -> bool:
        """Whether batches may need another program."""
        return self._splits is not None

    def takes(self, batch: Batch) -> bool:
        """Return whether a program takes the sizes of a batch, or one can be compiled that does."""
        whole = self.running.program if self._splits is None else self._whole
        return not has_other_sizes(whole, batch)

    def for_several(self, known: CompiledAgain) -> CompiledAgain:
        """Return one of these programs for steps of several batches, which stands in its place from now on."""
        if known.accumulating is None:
            return known
        several = replace(known, program=known.accumulating(), accumulating=None)
        self._known[self._known.index(known)] = several
        return several

    def fitting(
        self, batches: Sequence[Batch], job: Job, *, accumulates: bool, is_evaluation: bool
    ) -> list[CompiledAgain]:
        """Return a program for each of these batches of this rank; those that no other takes are compiled.

        It is one program for all batches of all ranks, if there is one, or else one for each micro-step, or else one
        for each micro-step of each rank. ``accumulates`` says that they are micro-batches of a step, of which there may
        be more. All ranks call this together.

        Raises:
            UserError: where a batch is none that the shapes allow, there are too many programs already, no program
                takes the batches of a group that runs unit by unit, or ranks would run programs at the same time that
                communicate differently.
        """
        if self._splits is None:
            return [self.running] * len(batches)
        own = [shape_of(self._whole, batch) for batch in batches]
        is_step = not is_evaluation
        others = [is_current(each.code, is_step=is_step) for each in self._known[1:]]
        self._is_current = [True, *others]
        sections = frozenset((EVALUATE,) if is_evaluation else STEP_SECTIONS)
        return self._fitting(own, job, self._splits, accumulates, sections)

    def _fitting(
        self,
        own: Sequence[Shape],
        job: Job,
        splits: Splits,
        accumulates: bool,
        sections: frozenset[str],
    ) -> list[CompiledAgain]:
        takes = self._all_that_take(own)
        rows = job.exchange([float(flag) for flag in (*takes, *self._is_current)])
        flags = [all(of_ranks) for of_ranks in zip(*rows, strict=True)]
        # What a rank knows alone must decide nothing from here on.
        takes, self._is_current = flags[: len(takes)], flags[len(takes) :]
        common = self._first(takes)
        if common is not None:
            return self._for_all(common, own)
        of_ranks = _of_all_ranks(own, job)
        shapes = [shape for each in of_ranks for shape in each]
        self._compile_for(shapes, splits, job)
        common = self._taking(shapes)
        if common is not None:
            return self._for_all(common, own)
        if len(set(map(len, of_ranks))) > 1:
            raise UserError(
                "The ranks have different numbers of batches in this step: give all of them equally many."
            )
        chosen: list[int] = []
        group = self._whole.interleaved
        for start in range(0, len(own), group):
            groups = [each[start : start + group] for each in of_ranks]
            together = [shape for each in groups for shape in each]
            one = self._taking(together)
            if one is None:
                used = {self._known.index(self._of(each, splits)) for each in groups}
                self._require_same_schedule(sorted(used), splits, accumulates, sections)
                one = self._of(own[start : start + group], splits)
            chosen += [self._known.index(one)] * len(groups[0])
        # A program that is chosen first may be replaced by one for steps of several batches afterwards.
        return [self._known[index] for index in chosen]

    def _for_all(self, common: CompiledAgain, own: Sequence[Shape]) -> list[CompiledAgain]:
        self._common = self._known.index(common)
        return [common] * len(own)

    def _require_same_schedule(
        self, used: Sequence[int], splits: Splits, accumulates: bool, sections: frozenset[str]
    ) -> None:
        """Raise UserError unless ranks may run these of the programs at the same time.

        With ``accumulates`` they become programs for steps of several batches first.
        """
        schedules: list[Schedule | None] = []
        numbers: set[frozenset[str]] = set()
        for index in used:
            known = self.for_several(self._known[index]) if accumulates else self._known[index]
            key = known, sections
            if key not in self._schedules:
                self._schedules[key] = shared_schedule(known.program, sections)
            schedules.append(self._schedules[key])
            numbers.add(frozenset() if known.code is None else known.code.numbers)
        if len(numbers) > 1:  # a rank alone would compile after a change
            raise UserError(
                f"{splits.reason}: the ranks have batches on both sides of the decision, and the program of one side "
                "does not follow the same numbers of the script. Let all ranks have batches of one side at a time."
            )
        if schedules[0] is None or any(each != schedules[0] for each in schedules):
            raise UserError(
                f"{splits.reason}: the ranks have batches on both sides of the decision, whose programs communicate in "
                "different orders. Let all ranks have batches of one side at a time, or let the code use parameters in "
                "one order."
            )

    def _of(self, group: Sequence[Shape], splits: Splits) -> CompiledAgain:
        """Return a program that takes the batches of a group of micro-batches of one rank."""
        one = self._taking(group)
        if one is None:
            raise UserError(
                f"{splits.reason}: a group of micro-batches that run unit by unit needs several programs. Let the "
                "batches of a group be of one side of the decision, or leave out --order layer."
            )
        return one

    def _taking(self, shapes: Sequence[Shape]) -> CompiledAgain | None:
        """Return a program that takes batches of all these shapes, if there is one."""
        return self._first(self._all_that_take(shapes))

    def _all_that_take(self, shapes: Sequence[Shape]) -> list[bool]:
        """Return for each known program whether it takes batches of all these shapes at present."""
        return [
            current and all(self._takes(each.program, shape) for shape in shapes)
            for each, current in zip(self._known, self._is_current, strict=True)
        ]

    def _first(self, flags: Sequence[bool]) -> CompiledAgain | None:
        """Return the common program if its flag is set, else the first one whose flag is, if there is one."""
        index = self._common if flags[self._common] else flags.index(True) if any(flags) else None
        return None if index is None else self._known[index]

    def _compile_for(self, shapes: Sequence[Shape], splits: Splits, job: Job) -> None:
        """Compile programs until each batch is taken by one."""
        for shape in shapes:
            if self._taking([shape]) is not None:
                continue
            if len(self._known) > MOST_SIGNATURES:
                raise UserError(
                    f"{splits.reason}: {MOST_SIGNATURES} more programs were compiled for batches of other sizes, and "
                    "this one needs another. Let batches have fewer sizes, or express the code without a decision."
                )
            begun = time.perf_counter()
            values = dict(zip((dim.name for dim in splits.dims), shape, strict=True))
            of_sizes = ", ".join(f"{name} {value:,}" for name, value in values.items())
            compiled = splits.compile_at(values)
            alone = _trained(compiled.program) ^ _trained(self.running.program)
            if alone:
                raise UserError(
                    f"{splits.reason}, and not for batches such as {of_sizes}, because the parameter {min(alone)} "
                    "has a gradient on one side of the decision alone: freeze it, let every loss depend on it, or "
                    "narrow the dims."
                )
            if not job.is_alone:
                require_same_program(compiled.program, job.device)
            if compiled.code is not None and self.base.code is not None:
                compiled.code.ignore(self.base.code.ignored)
            self._known.append(compiled)
            self._is_current.append(True)
            if job.rank == 0:
                LOGGER.warning(
                    "%s: a program for batches such as %s was compiled in %.1f s.",
                    splits.reason,
                    of_sizes,
                    time.perf_counter() - begun,
                )

    def _takes(self, program: Program, shape: Shape) -> bool:
        """Return whether a program takes batches whose dims have these values."""
        values = dict(zip((dim.name for dim in self._whole.dims), shape, strict=True))
        own_values: dict[str, int] = {}
        for own, of_all in zip(program.inputs, self._whole.inputs, strict=True):
            for size, whole in zip(own.shape, of_all.shape, strict=True):
                if not isinstance(whole, Size):
                    continue
                linear = size.linear if isinstance(size, Size) else None
                if linear is None:
                    # A dim may have one size in a program.
                    if whole.at(values) != size:
                        return False
                    continue
                # A dim of a program may stand for some values of another one, as for those that are even.
                value = linear.value_of_dim(whole.at(values))
                if value is None or own_values.setdefault(linear.dim.name, value) != value:
                    return False
        return True


def _of_all_ranks(own: Sequence[Shape], job: Job) -> list[list[Shape]]:
    """Return the shapes of the batches of each rank, in rank order."""
    texts = [json.dumps(own)]
    if not job.is_alone:
        texts = exchanged_texts(texts[0], job.device)
    return [[tuple(shape) for shape in cast("list[list[int]]", json.loads(text))] for text in texts]


def _trained(program: Program) -> frozenset[str]:
    """Return the names of the parameters that a program trains."""
    flats = (flat for flat in program.flats if flat.is_trainable)
    return frozenset(slot.name for flat in flats for slot in flat.slots)
