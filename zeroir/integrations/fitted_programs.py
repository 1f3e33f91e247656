"""The programs with which an engine runs the batches of a data loader.

One program takes batches of many sizes. Where the ranks meet a batch that it does not take, they compile another one
together, before the batch runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import torch

from zeroir.api.running.signatures import signatures_of
from zeroir.api.sentences import LOGGER
from zeroir.config.shapes import BatchShapes, shapes_text
from zeroir.errors import ShapesError, UserError, ZeroirError
from zeroir.frontend.source.given_shapes import given_shapes
from zeroir.frontend.source.source import Earlier
from zeroir.integrations.batch_ranges import BatchRanges, RangeLimits, Sizes, sizes_of, tokens_of
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, exchanged_texts
from zeroir.runtime.distributed.rendezvous import join_job
from zeroir.torch_ops.batches import Batch, flatten, with_tensors

if TYPE_CHECKING:
    from zeroir.api import CompiledProgram
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.signatures import Signatures

Compile = Callable[[Batch, str | None, Earlier], "CompiledProgram"]
"""Compiles a program from an example batch, the option ``shapes``, and what it goes on with."""

SET_BY_SAVING: Final = ("*config.architectures", "*config.dtype")
"""What ``save_pretrained`` of transformers sets in a model's configuration, and no step depends on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedProgram:
    """A program, the sizes of batches that it is for, and the example and shapes that it was compiled with.

    Where the model's code lets sizes decide, the engine itself compiles other programs for some of these sizes.
    """

    compiled: CompiledProgram
    ranges: BatchRanges
    example: Batch
    shapes: str | None


def shapes_below(name: str, given: object, batch: Batch) -> BatchShapes | None:
    """Return the shapes that a user gives for a batch, which stands at ``name`` in the batch of a program."""
    if given is None:
        return None
    is_tensor = isinstance(batch, torch.Tensor)
    return {
        name if is_tensor else f"{name}.{path}": shape
        for path, shape in given_shapes(given, batch).items()
    }


class FittedPrograms:
    """The programs of a model, one of which runs at a time, the same on every rank.

    ``compile_program`` compiles one. Evaluations run with the program for training where it takes their batches.
    Otherwise they have programs of their own, so that training does not need their memory. With ``given`` shapes there
    is one program, for batches of these shapes. Each method is collective over all ranks.
    """

    def __init__(
        self,
        compile_program: Compile,
        batch: Batch,
        *,
        given: BatchShapes | None = None,
        multiple: int = 1,
        most_positions: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._compile = compile_program
        self._limits = RangeLimits(
            tokens=frozenset(), multiple=multiple, most_positions=most_positions
        )
        self._job = join_job(timeout or DEFAULT_TIMEOUT)
        self._training: list[FittedProgram] = []
        self._evaluation: list[FittedProgram] = []
        self._signatures: dict[FittedProgram, Signatures] = {}
        self._reasons: list[str] = []
        self._earlier = Earlier()
        self._is_given = given is not None
        if given is None:
            self.present = self._added(batch, [sizes_of(batch)], is_evaluation=False)
            return
        ranges = BatchRanges.given(given, sizes_of(batch))
        self.present = self._compiled(ranges, _example(batch, ranges), shapes_text(given) or None)
        self._training.append(self.present)

    @property
    def most_rows(self) -> int:
        """The most rows of a batch for training."""
        return max(each.ranges.most_rows for each in self._training)

    def fit(self, engine: Engine, batches: Sequence[Batch], *, is_evaluation: bool) -> None:
        """Make the engine go on with a program that takes these batches of each rank.

        Raises:
            UserError: if the batches of two ranks have different tensors, or different sizes where the model's code
                lets these decide.
        """
        if self._is_given:
            return
        seen = [sizes_of(batch) for batch in batches]
        known = [*self._training, *self._evaluation] if is_evaluation else [*self._training]
        known.sort(key=lambda each: each is not self.present)  # so that it stays if it can
        own = [float(all(each.ranges.takes(sizes) for sizes in seen)) for each in known]
        rows = engine.job.exchange(own)
        fitting = next(
            (each for each, *flags in zip(known, *rows, strict=True) if all(flags)), None
        )
        if fitting is None:
            fitting = self._added(batches[0], seen, is_evaluation=is_evaluation)
        if fitting is not self.present:
            self._signatures[self.present] = engine.signatures
            self.present = fitting
            self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        """Make the engine go on with the present program."""
        compiled = self.present.compiled
        assert compiled.watch is not None
        known = self._signatures.get(self.present)
        engine.go_on_among(known or signatures_of(compiled, engine, compiled.watch))

    def drive(self, engine: Engine) -> None:
        """Let an engine go on with the program that fits, and with another one after a change of the user's code."""
        engine.fit_batches_with(self.fit)
        engine.compile_changes_with(partial(self._after_change, engine))

    def _after_change(
        self, engine: Engine, numbers: frozenset[str], step_counts: Mapping[str, int]
    ) -> Signatures:
        flats = self.present.compiled.logical.flats
        self._earlier = Earlier(flats=flats, numbers=numbers, step_counts=step_counts)
        self._compile_anew()
        compiled = self.present.compiled
        assert compiled.watch is not None
        return signatures_of(compiled, engine, compiled.watch, step_counts)

    def compile_again(self, engine: Engine) -> None:
        """Compile the program for training anew, and forget the others; the engine goes on with it."""
        self._compile_anew()
        self._go_on(engine)

    def _compile_anew(self) -> None:
        old = _widest(self._training)
        assert old is not None
        self.present = self._compiled(old.ranges, old.example, old.shapes)
        self._training, self._evaluation = [self.present], []
        self._signatures.clear()

    def _added(self, batch: Batch, own: Sequence[Sizes], *, is_evaluation: bool) -> FittedProgram:
        """Compile a program for the batches of all ranks, and remember it."""
        seen = self._of_all_ranks(own)
        self._limits.tokens |= tokens_of(batch)
        programs = self._evaluation if is_evaluation else self._training
        known = [*self._training, *programs]
        base = _widest([each for each in known if each.ranges.has_tensors_of(seen[0])])
        added: FittedProgram | None = None
        while added is None:
            ranges = (
                BatchRanges.proposed(seen, self._limits)
                if base is None
                else base.ranges.grown(seen, self._limits)
            )
            added = self._of_evaluations(ranges) or self._compiled_if_possible(batch, ranges, seen)
        if base in programs and added.ranges.covers(base.ranges):
            programs.remove(base)
        programs.append(added)
        for reason in self._reasons if self._job.rank == 0 else ():
            LOGGER.warning(reason)
        self._reasons.clear()
        if base is not None and self._job.rank == 0:
            LOGGER.info("Batches of other sizes have another program: %s.", added.ranges)
        return added

    def _of_evaluations(self, ranges: BatchRanges) -> FittedProgram | None:
        """Return the program of evaluations with these ranges, which are those of training from now on."""
        same = next((each for each in self._evaluation if each.ranges.is_same(ranges)), None)
        if same is not None:
            self._evaluation.remove(same)
        return same

    def _compiled_if_possible(
        self, batch: Batch, ranges: BatchRanges, seen: Sequence[Sizes]
    ) -> FittedProgram | None:
        """Return a program; None where the model's code does not take such ranges, which limits the next ones."""
        try:
            return self._compiled(ranges, _example(batch, ranges), ranges.text() or None)
        except ZeroirError as error:
            if not ranges.dims:
                raise
            self._limit(ranges, seen, error)
            return None

    def _of_all_ranks(self, own: Sequence[Sizes]) -> list[Sizes]:
        """Return the sizes of the batches of all ranks, in rank order.

        Raises:
            UserError: if two of them have different tensors.
        """
        texts = [json.dumps([{path: list(shape) for path, shape in each.items()} for each in own])]
        if self._job.world_size > 1:
            texts = exchanged_texts(texts[0], self._job.device)
        seen: list[Sizes] = [
            {path: tuple(shape) for path, shape in each.items()}
            for text in texts
            for each in cast("list[dict[str, list[int]]]", json.loads(text))
        ]
        tensors = [{path: len(shape) for path, shape in each.items()} for each in seen]
        if any(each != tensors[0] for each in tensors):
            raise UserError(
                "The batches of a step have different tensors on two ranks, or in two micro-batches: let the data "
                "collator give the same ones in every batch."
            )
        return seen

    def _compiled(self, ranges: BatchRanges, example: Batch, shapes: str | None) -> FittedProgram:
        compiled = self._compile(example, shapes, self._earlier)
        return FittedProgram(compiled=compiled, ranges=ranges, example=example, shapes=shapes)

    def _limit(self, ranges: BatchRanges, seen: Sequence[Sizes], error: ZeroirError) -> None:
        """Limit the sizes that programs take, after one with these ranges was refused."""
        names: frozenset[str] = error.dims if isinstance(error, ShapesError) else frozenset()
        limits, axes = self._limits, ranges.axes_of(names)
        # A model may have a table of fewer positions.
        rounded = {
            (path, index)
            for (path, index), each in axes
            if each.most * each.factor > max(batch[path][index] for batch in seen) and index
        }
        if names and rounded - limits.exact:
            limits.exact |= rounded
            return
        limits.fixed |= {axis: str(error) for axis, _ in axes}
        tensors = ", ".join(f"dimension {index} of '{path}'" for (path, index), _ in axes)
        self._reasons.append(
            f"Batches of other sizes get programs of their own, where they differ in {tensors}. {error}"
        )


def _widest(programs: Sequence[FittedProgram]) -> FittedProgram | None:
    """Return the last one of the programs with the most dims."""
    return max(reversed(programs), key=lambda each: len(each.ranges.dims), default=None)


def _example(batch: Batch, ranges: BatchRanges) -> Batch:
    """Return a batch with the structure of another one, which is the same on every rank."""
    sizes = ranges.example()
    paths = iter(flatten(batch).tensors)
    return with_tensors(batch, lambda tensor: torch.zeros(sizes[next(paths)], dtype=tensor.dtype))
