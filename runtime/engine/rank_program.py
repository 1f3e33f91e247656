"""A program on one rank, ready to run; another program of the same model may replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.runtime.checkpoint.snapshots import open_buffers
from zeroir.runtime.comm.job import open_job
from zeroir.runtime.distributed.section_comparison import SectionsOfRanks
from zeroir.runtime.distributed.section_history import BATCHES, OTHER_PROGRAM
from zeroir.runtime.engine.live_optimizer import LiveOptimizer, SettingsOfRanks
from zeroir.runtime.engine.opened_program import EngineSettings, OpenedProgram, open_program
from zeroir.runtime.execution.anomalies import Anomalies
from zeroir.runtime.execution.executor import Keep, StepExecutor
from zeroir.runtime.memory.malloc import keep_freed_memory
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.carried_values import CarriedValues, carried_values
from zeroir.runtime.state.waiting_states import WaitingStates


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenOver:
    """What a program takes over from the one before it, besides persistent buffers.

    ``micro_steps`` are those done of the present step, ``weight_sums`` and ``sums`` their weights and temporary sums.
    """

    step_count: int
    seed: int
    earlier_micro_steps: int
    micro_steps: int
    weight_sums: Sequence[float]
    sums: Mapping[str, Tensor]


class RankProgram:
    """The program, its memory, and its executor; ``job`` connects it with the other ranks.

    ``update`` updates the parameters, for an optimizer whose ``step`` does so. ``keep`` takes the tensors that the
    user's code would store, after each micro-step and evaluation. ``anomalies`` looks at the values of steps.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        settings: EngineSettings,
        update: Callable[[], object],
        keep: Keep,
    ) -> None:
        self.device = device
        self._settings = settings
        self._update = update
        self._keep = keep
        self._optimizer: LiveOptimizer | None = None
        self._sections: SectionsOfRanks | None = None
        self._is_allocated = False
        self.anomalies: Anomalies | None = None
        self._parked: list[tuple[Program, OpenedProgram]] = []
        self._open(program)

    def _open(self, program: Program, kept: RankMemory | None = None) -> None:
        """Create everything that runs a program, with the contents of the memory ``kept`` of the previous one."""
        settings = self._settings
        self.program = program
        self.job = open_job(program, settings.backend, self.device, settings.timeout)
        self.opened = open_program(program, self.job, self.device, settings, kept, self.anomalies)
        self._connect()

    def _connect(self) -> None:
        """Give the program the job's record of sections, the optimizer's settings, and who takes what is stored."""
        self.executor.keep = self._keep
        if not self.job.is_alone:
            self._sections = self._sections or SectionsOfRanks(self.job)
            self.executor.compare_sections(self._sections)
        if self._optimizer is not None:
            self._optimizer.go_on_with(self.program, [self.memory])
        elif self.program.groups:
            self._optimizer = LiveOptimizer(self.program, [self.memory], self._update)
        if self._optimizer is not None:
            self.executor.settings = SettingsOfRanks(optimizer=self._optimizer, job=self.job)

    @property
    def memory(self) -> RankMemory:
        """The buffers of this rank."""
        return self.opened.memory

    @property
    def executor(self) -> StepExecutor:
        """The executor of the sections."""
        return self.opened.executor

    @property
    def step_count(self) -> int:
        """The number of training steps so far, including skipped ones."""
        return self.executor.step_count

    @property
    def optimizer(self) -> LiveOptimizer:
        """The settings of the optimizer groups; UserError where the program updates nothing."""
        if self._optimizer is None:
            raise UserError("The program updates no parameter, so it has no optimizer.")
        return self._optimizer

    @property
    def optimizer_if_any(self) -> LiveOptimizer | None:
        """The settings of the optimizer groups; None where the program updates nothing."""
        return self._optimizer

    @contextmanager
    def between_sections(self) -> Iterator[None]:
        """Run the block on the device, which has done all submitted work.

        An error of the block is an error of the engine.
        """
        with self.executor.entered():
            self.executor.finish()
            yield

    def replace(self, program: Program, waiting: WaitingStates | None = None) -> CarriedValues:
        """Switch to another program: parameters, master weights and states keep their values.

        They keep their tensors, too, where both programs have the same flats; elsewhere ``waiting`` has the states of
        the parameters that the present program does not train. Within a step the sums so far are kept. All ranks call
        this together.
        """
        carried = self._carried()
        if self._sections is not None:
            # Another rank may be in a section, and should learn why its connection breaks.
            self._sections.begin(OTHER_PROGRAM, self.step_count + 1, carried.micro_steps)
            self._sections.show()
        with self.between_sections():
            moved = carried_values(
                self.program,
                program,
                self.memory,
                self.job.comm,
                WaitingStates() if waiting is None else waiting,
            )
        self._stop_parked(())
        self.opened.close(self.job)
        self._open(program, kept=self.memory)
        with self.executor.entered():
            self.memory.clear(moved.cleared)
            for name, values in moved.buffers.items():
                self.memory.write(name, 0, values)
            for name, count in moved.scalars.items():
                self.memory.buffer(name).fill_(count)
        self._go_on(carried)
        return moved

    def begin_batches(self) -> None:
        """Record that the ranks choose a program for their batches now, for ranks that do something else."""
        if self._sections is not None:
            executor = self.executor
            self._sections.begin(BATCHES, executor.step_count + 1, executor.micro_steps_done)

    def meet_for_change(self, change: str) -> None:
        """Wait until all ranks have found a change of the user's code, as ``SectionsOfRanks.meet`` does."""
        if self._sections is not None:
            executor = self.executor
            with executor.entered():
                executor.finish()
                self._sections.meet(
                    change,
                    executor.step_count + 1,
                    executor.micro_steps_done,
                    self._settings.timeout,
                )

    def look_for(self, anomalies: Anomalies | None) -> None:
        """Let something look at the values of steps, or nothing any more. All ranks call this together."""
        self.anomalies = anomalies
        self.replace(self.program)

    def change_to(self, program: Program, among: Sequence[Program]) -> None:
        """Switch to another program with the same communicators, as ``replace`` does; other ranks need not do so.

        The programs ``among`` which a rank changes are opened once.
        """
        carried = self._carried()
        left, left_program = self.opened, self.program
        self._stop_parked(among)
        if left.memory.can_be_parked:
            left.memory.park()
            self._parked.append((left_program, left))
        parked = next((each for each in self._parked if each[0] is program), None)
        self.program = program
        if parked is None:
            self.opened = open_program(
                program, self.job, self.device, self._settings, left.memory, self.anomalies
            )
        else:
            self._parked.remove(parked)
            self.opened = parked[1]
            self.memory.unpark()
            self.executor.restart(carried.step_count)
        if not left.memory.can_be_parked:
            left.stop()
        self._connect()
        self._go_on(carried)

    def _stop_parked(self, among: Sequence[Program]) -> None:
        """Stop the programs that were left, except those among these."""
        for each in [each for each in self._parked if not any(each[0] is one for one in among)]:
            self._parked.remove(each)
            each[1].stop()

    def _carried(self) -> _TakenOver:
        """Return what the next program takes over from the present one, besides persistent buffers."""
        executor = self.executor
        sums: dict[str, Tensor] = {}
        with self.between_sections():
            if executor.micro_steps_done:
                buffers = [self.program.buffer_by_name[name] for name in open_buffers(self.program)]
                sums = {
                    buffer.name: self.memory.buffer(buffer.name).to("cpu", copy=True)
                    for buffer in buffers
                    # A new program begins with a loss of 0.
                    if not buffer.is_persistent or buffer.name == self.program.loss
                }
        return _TakenOver(
            step_count=executor.step_count,
            seed=executor.seed,
            earlier_micro_steps=executor.earlier_micro_steps,
            micro_steps=executor.micro_steps_done,
            weight_sums=executor.weight_sums(),
            sums=sums,
        )

    def _go_on(self, carried: _TakenOver) -> None:
        executor = self.executor
        executor.step_count, executor.seed = carried.step_count, carried.seed
        executor.earlier_micro_steps = carried.earlier_micro_steps
        with executor.entered():
            self.memory.allocate()
            if carried.micro_steps:
                executor.establish(MICRO_STEP)
                for name, values in carried.sums.items():
                    self.memory.buffer(name).copy_(values)
                executor.go_on_within(carried.micro_steps, carried.weight_sums)

    def allocate_once(self) -> None:
        """Allocate what is not allocated yet, before the first step."""
        if self._is_allocated:
            return
        self._is_allocated = True
        if self.device.type == "cpu":
            keep_freed_memory()
        with self.executor.entered():
            self.memory.allocate()

    def fill(self, set_values: Callable[[], object]) -> None:
        """Set the contents of buffers before step 1, and allocate the rest; the settings are written again."""
        with self.between_sections():
            set_values()
            self.memory.allocate()
        if self._optimizer is not None:
            self._optimizer.forget_written()

    def close(self) -> None:
        """Stop the streams and destroy the process groups, as ``Engine.close`` describes."""
        self._stop_parked(())
        self.opened.close(self.job)
        if self._sections is not None:
            self._sections.close()
