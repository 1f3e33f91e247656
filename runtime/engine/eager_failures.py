"""The part of an engine that discards an eager step in which the user's code failed on one of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeroir.errors import UserError
from zeroir.ir.contents import Content, FlatContent, Micro, WeightContent
from zeroir.ir.program import Program
from zeroir.runtime.comm.job import exchanged_texts
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.torch_ops.opaque import taken_failure


class EagerFailures:
    """Looks for failures of the user's code within a block of ``expected``; ``discard`` forgets the present step."""

    def __init__(self, rank_program: RankProgram, discard: Callable[[], object]) -> None:
        self._rank_program = rank_program
        self._discard = discard
        self.are_expected = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Look for failures within the block."""
        self.are_expected = True
        try:
            yield
        finally:
            self.are_expected = False

    def require_none(self) -> None:
        """Discard the step, and raise UserError, on all ranks where the code of one of them failed.

        All ranks call this together, between two sections, before the update.
        """
        if not self.are_expected:
            return
        program, job = self._rank_program.program, self._rank_program.job
        own = taken_failure(program.segments)
        texts = [str(own or "")]
        if not job.is_alone:
            with self._rank_program.between_sections():
                texts = exchanged_texts(texts[0], job.device)
        failed = [f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if not failed:
            return
        self._rank_program.executor.discard_step()
        with self._rank_program.between_sections():
            for name in _sums(program):
                self._rank_program.memory.clear_elements(name)
        self._discard()
        raise own or UserError(failed[0])


def _sums(program: Program) -> list[str]:
    """Return the persistent buffers to which the micro-steps of a step add."""
    return [
        buffer.name
        for buffer in program.buffers
        if buffer.is_persistent
        and (buffer.name == program.loss or _micro(buffer.holds) is Micro.PAST)
    ]


def _micro(content: Content | None) -> Micro | None:
    return content.micro if isinstance(content, FlatContent | WeightContent) else None
