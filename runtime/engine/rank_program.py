"""A program on one rank, ready to run; another program of the same model may replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.runtime.checkpoint.snapshots import open_buffers
from zeroir.runtime.comm.job import open_job
from zeroir.runtime.distributed.section_comparison import SectionsOfRanks
from zeroir.runtime.distributed.section_history import OTHER_PROGRAM
from zeroir.runtime.engine.live_optimizer import LiveOptimizer, SettingsOfRanks
from zeroir.runtime.engine.opened_program import EngineSettings, open_program
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.memory.malloc import keep_freed_memory
from zeroir.runtime.memory.rank_memory import RankMemory


class RankProgram:
    """The program, its memory, and its executor; ``job`` connects it with the other ranks.

    ``update`` updates the parameters, for an optimizer whose ``step`` does so.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        settings: EngineSettings,
        update: Callable[[], object],
    ) -> None:
        self.device = device
        self._settings = settings
        self._update = update
        self._optimizer: LiveOptimizer | None = None
        self._sections: SectionsOfRanks | None = None
        self._is_allocated = False
        self._open(program)

    def _open(self, program: Program, kept: RankMemory | None = None) -> None:
        """Create everything that runs a program, with the contents of the memory ``kept`` of the previous one."""
        settings = self._settings
        self.program = program
        self.job = open_job(program, settings.backend, self.device, settings.timeout)
        self.opened = open_program(program, self.job, self.device, settings, kept)
        if not self.job.is_alone:
            self._sections = self._sections or SectionsOfRanks(self.job)
            self.executor.compare_sections(self._sections)
        if self._optimizer is not None:
            self._optimizer.write_to([self.memory])
        elif program.groups:
            self._optimizer = LiveOptimizer(program, [self.memory], self._update)
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

    def replace(self, program: Program) -> None:
        """Switch to another program: parameters, master weights and states keep their tensors.

        Within a step the sums so far are kept, too.
        """
        step_count, seed = self.step_count, self.executor.seed
        done, weight_sums = self.executor.micro_steps_done, self.executor.weight_sums()
        sums: dict[str, Tensor] = {}
        if done:
            with self.between_sections():
                sums = {
                    name: self.memory.buffer(name).to("cpu", copy=True)
                    for name in open_buffers(self.program)
                }
        if self._sections is not None:
            # Another rank may be in a section, and should learn why its connection breaks.
            self._sections.begin(OTHER_PROGRAM, step_count + 1, done)
            self._sections.show()
        self.opened.close(self.job)
        self._open(program, kept=self.memory)
        self.executor.step_count = step_count
        self.executor.seed = seed
        with self.executor.entered():
            self.memory.allocate()
            if done:
                self.executor.establish(MICRO_STEP)
                for name, values in sums.items():
                    self.memory.buffer(name).copy_(values)
                self.executor.go_on_within(done, weight_sums)

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
        self.opened.close(self.job)
        if self._sections is not None:
            self._sections.close()
