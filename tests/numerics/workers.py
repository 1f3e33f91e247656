"""One rank that carries out some trainings: ``python -m tests.numerics.workers BACKEND NAME [ARGUMENT ...]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.numerics.trainings import TRAININGS
from tests.runtime.support import begun, join, write_run
from zeroir.ir.text import parse
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.distributed import rendezvous
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank of a job that a test starts, and the folder of the test."""

    number: int
    world_size: int
    folder: Path

    @staticmethod
    def joined() -> Rank:
        """This process, once all ranks have met."""
        join(timeout_s=600)
        number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Rank(number=number, world_size=world_size, folder=Path(os.environ["TEST_FOLDER"]))

    def finish(self, engine: Engine, losses: Sequence[float], name: str) -> None:
        """End a training: rank 0 writes the losses and the state of all ranks."""
        write_run(engine, losses, name)
        engine.close()


def main(backend: str, name: str, *more: str) -> None:
    """Carry out one training after the other."""
    rank = Rank.joined()
    for training in TRAININGS[name](*more):
        program = parse(training.text_file(rank.folder).read_text())
        engine = begun(Engine(program, EngineSettings(backend=Backend(backend))))
        losses = [engine.step(step[rank.number]).loss for step in training.batches()]
        rank.finish(engine, losses, training.name)
    rendezvous.leave_job()


if __name__ == "__main__":
    main(*sys.argv[1:])
