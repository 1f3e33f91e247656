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
from zeroir.ir.program import InputBinding, Program
from zeroir.ir.sizes import Dim, Size
from zeroir.runtime.comm.job import Job, exchanged_texts
from zeroir.runtime.engine.followed import CompiledAgain
from zeroir.runtime.execution.batch import Shape, shape_of
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
    """The programs that were compiled from one state of the user's code, one of which runs at a time.

    ``running`` is the one that runs. Without ``splits`` it is the only one.
    """

    def __init__(self, running: CompiledAgain, splits: Splits | None = None) -> None:
        self.running = running
        self._splits = splits
        self._known = [running]
        if splits is not None:
            self._whole = replace(running.program, dims=splits.dims, inputs=splits.inputs)

    @property
    def are_several(self) -> bool:
        """Whether batches may need another program."""
        return self._splits is not None

    def for_several(self, known: CompiledAgain) -> CompiledAgain:
        """Return one of these programs for steps of several batches, which stands in its place from now on."""
        if known.accumulating is None:
            return known
        several = replace(known, program=known.accumulating(), accumulating=None)
        self._known[self._known.index(known)] = several
        return several

    def fitting(self, batches: Sequence[Batch], job: Job) -> CompiledAgain:
        """Return a program that takes these batches of each rank, which is compiled if there is none.

        All ranks call this together.

        Raises:
            UserError: where a batch is none that the shapes allow, no program takes all of them, or there are too many
                programs already.
        """
        if self._splits is None:
            return self.running
        own = [shape_of(self._whole, batch) for batch in batches]
        fitting = self._known_for(own, job)
        if fitting is None:
            self._compile_for(_of_all_ranks(own, job), self._splits, job.rank)
            fitting = self._known_for(own, job)
        if fitting is None:
            raise UserError(
                f"{self._splits.reason}: the batches of this step need several programs, on several ranks or in "
                "several micro-batches, and a step runs one. Let all batches of a step be of sizes with the same "
                "decision."
            )
        return fitting

    def _known_for(self, own: Sequence[Shape], job: Job) -> CompiledAgain | None:
        """Return a known program that takes the batches of all ranks, that which runs if it does."""
        known = sorted(self._known, key=lambda each: each is not self.running)
        taken = [float(all(self._takes(each.program, shape) for shape in own)) for each in known]
        rows = job.exchange(taken)
        return next((each for each, *flags in zip(known, *rows, strict=True) if all(flags)), None)

    def _compile_for(self, shapes: Sequence[Shape], splits: Splits, rank: int) -> None:
        """Compile programs until each batch is taken by one."""
        for shape in shapes:
            if any(self._takes(each.program, shape) for each in self._known):
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
            self._known.append(compiled)
            if rank == 0:
                LOGGER.warning(
                    "%s: a program for batches such as %s was compiled in %.1f s.",
                    splits.reason,
                    of_sizes,
                    time.perf_counter() - begun,
                )

    def _takes(self, program: Program, shape: Shape) -> bool:
        """Return whether a program takes batches whose dims have these values."""
        values = dict(zip((dim.name for dim in self._whole.dims), shape, strict=True))
        if not all(dim.minimum <= values[dim.name] <= dim.maximum for dim in program.dims):
            return False
        # A dim may have one size in a program.
        return all(
            isinstance(size, Size) or not isinstance(whole, Size) or whole.at(values) == size
            for own, of_all in zip(program.inputs, self._whole.inputs, strict=True)
            for size, whole in zip(own.shape, of_all.shape, strict=True)
        )


def _of_all_ranks(own: Sequence[Shape], job: Job) -> list[Shape]:
    """Return the shapes of the batches of all ranks, in rank order."""
    texts = [json.dumps(own)]
    if not job.is_alone:
        texts = exchanged_texts(texts[0], job.device)
    return [tuple(shape) for text in texts for shape in cast("list[list[int]]", json.loads(text))]


def _trained(program: Program) -> frozenset[str]:
    """Return the names of the parameters that a program trains."""
    flats = (flat for flat in program.flats if flat.is_trainable)
    return frozenset(slot.name for flat in flats for slot in flat.slots)
