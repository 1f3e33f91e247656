"""The state of training outside its engine: data, random generators, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroir.errors import UserError
from zeroir.runtime.checkpoint.loading import LoadedState
from zeroir.runtime.data.training_data import Resumption, TrainingData
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.seeds import drawn
from zeroir.runtime.training.lr_schedule import Scheduler
from zeroir.runtime.training.random_states import random_states, seed_generators, set_random_states

_DATA = "data"
_RANDOM = "random"
_SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How training continues: how its data does, after how many batches of the rank, and the schedule that was saved.

    ``schedule`` is its text, and ``steps`` the total that it was for; both are None where none was saved.
    """

    resumption: Resumption
    batches: int
    schedule: str | None
    steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The parts of a training run that change from step to step. ``seed`` is that of the data."""

    engine: Engine
    data: TrainingData
    scheduler: Scheduler | None
    seed: int

    def begin(self) -> None:
        """Seed the global generators for a run that does not resume; each rank draws other numbers."""
        self._seed_generators(0)

    def of_rank(self) -> dict[str, object]:
        """Return the state that differs between ranks: the position in the data, and the global random generators."""
        return {
            _DATA: self.data.state_dict(),
            _RANDOM: random_states(self.engine.device),
        }

    def shared(self) -> dict[str, object]:
        """Return the state that is the same on all ranks."""
        return {_SCHEDULER: None if self.scheduler is None else self.scheduler.state_dict()}

    def restore(self, loaded: LoadedState) -> Resumed:
        """Continue after a load of the engine. All ranks call this together.

        A rank that did not exist when the checkpoint was saved continues with the data of rank 0 and with new random
        numbers.

        Raises:
            UserError: where the checkpoint was trained with another seed, or its data cannot continue here.
        """
        manifest = loaded.manifest
        if manifest.seed is not None and manifest.seed != self.seed:
            raise UserError(
                f"'{loaded.path}' was trained with the seed {manifest.seed}, not {self.seed}: resume it with --seed "
                f"{manifest.seed}."
            )
        if loaded.micro_steps:
            raise UserError(
                f"'{loaded.path}' was saved within a step (micro-steps taken: {loaded.micro_steps}): go on with it in "
                "the script that saved it, or resume another one."
            )
        own = loaded.state if loaded.state is not None else loaded.state_of(0)
        schedule, steps = self._restore_scheduler(loaded.shared, loaded.step)
        saved_world_size = manifest.origin.world_size
        resumption: Resumption = "new"
        if isinstance(own, Mapping) and isinstance(own.get(_DATA), Mapping):
            resumption = self.data.load_state_dict(own[_DATA], saved_world_size)
            # Last, because opening the data may draw random numbers.
            if loaded.state is None:
                self._seed_generators(loaded.step)
            else:
                states = own.get(_RANDOM)
                set_random_states(states if isinstance(states, Mapping) else {}, self.engine.device)
        return Resumed(
            resumption=resumption, batches=self.data.batches_taken, schedule=schedule, steps=steps
        )

    def _seed_generators(self, step: int) -> None:
        seed_generators(drawn(self.seed, step, self.engine.rank) >> 1)

    def _restore_scheduler(self, shared: object, steps_done: int) -> tuple[str | None, int | None]:
        if self.scheduler is None:
            return None, None
        state = shared.get(_SCHEDULER) if isinstance(shared, Mapping) else None
        if not isinstance(state, Mapping):
            # It is unknown how many of the steps were skipped.
            self.scheduler.go_to(steps_done)
            return None, None
        self.scheduler.load_state_dict(state)
        schedule, steps = state.get("schedule"), state.get("steps")
        return (
            schedule if isinstance(schedule, str) else None,
            steps if isinstance(steps, int) else None,
        )
