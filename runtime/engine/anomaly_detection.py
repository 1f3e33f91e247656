"""The part of an engine that lets steps find the first NaN, and says on all ranks what one of them found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroir.errors import UserError
from zeroir.runtime.comm.job import exchanged_texts
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.execution.anomalies import Anomalies


class AnomalyDetection:
    """Looks at the values of steps within a block of ``detected``."""

    def __init__(self, rank_program: RankProgram) -> None:
        self._rank_program = rank_program

    @contextmanager
    def detected(self) -> Iterator[None]:
        """Look at the values of the steps of the block. All ranks call this together."""
        before = self._rank_program.anomalies
        self._rank_program.look_for(Anomalies())
        try:
            yield
        finally:
            if not self._rank_program.executor.has_failed:
                self._rank_program.look_for(before)

    def require_none(self) -> None:
        """Raise UserError on all ranks where a step of one of them has made a NaN. All ranks call this together."""
        anomalies, job = self._rank_program.anomalies, self._rank_program.job
        if anomalies is None:
            return
        texts = [anomalies.first or ""]
        if not job.is_alone:
            texts = exchanged_texts(texts[0], job.device)
        for rank, text in enumerate(texts):
            if text:
                raise UserError(text if job.is_alone else f"Rank {rank}: {text}")
