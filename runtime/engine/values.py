"""The values that an engine holds between steps: buffers, whole parameters, lent modules and state dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from zeroir.errors import UserError, memory_for
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint.checkpointer import Checkpointer
from zeroir.runtime.checkpoint.model_facts import ModelFacts, model_facts
from zeroir.runtime.comm.job import Job
from zeroir.runtime.distributed.rank_position import RankPosition
from zeroir.runtime.engine.accumulation import Accumulation
from zeroir.runtime.engine.live_optimizer import LiveOptimizer
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state import state as state_of_buffers
from zeroir.runtime.state import state_dicts
from zeroir.runtime.state.full_parameters import whole_parameters
from zeroir.runtime.state.gathered_module import ModuleGatherer
from zeroir.runtime.state.write_back import return_values

_LESS: Final = "gather smaller modules, one after the other"
"""The remedy if memory runs out for a lent module."""


class EngineValues:
    """The part of an engine that shows its values and takes over others. ``Engine`` makes the attributes."""

    program: Program
    device: torch.device
    job: Job
    _memory: RankMemory
    _executor: StepExecutor
    _accumulation: Accumulation
    _checkpoints: Checkpointer
    _optimizer: LiveOptimizer | None
    _module_gatherer: ModuleGatherer | None
    _facts: ModelFacts | None

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.world_size} on {self.device}"
        return f"<{type(self).__name__} of {where} after step {self.step_count}: {self.program.outline}>"

    @property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        return self.job.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return self.program.mesh.world_size

    @property
    def step_count(self) -> int:
        """Training steps that ``step`` has carried out, skipped ones included."""
        return self._executor.step_count

    @property
    def optimizer(self) -> LiveOptimizer:
        """The settings of the optimizer groups; changes count from the next update. All ranks change them alike.

        Raises:
            UserError: where the program updates nothing.
        """
        if self._optimizer is None:
            raise UserError("The program updates no parameter, so it has no optimizer.")
        return self._optimizer

    def position(self) -> RankPosition:
        """Where this rank is in its program. Any thread may ask."""
        return self._executor.position()

    def buffer(self, name: str) -> Tensor:
        """A buffer of this rank; it is a copy only where the buffer is on disk."""
        return self._memory.read(name)

    @contextmanager
    def gathered(
        self, name: str = "", *, masters: bool = False, ema: bool = False
    ) -> Iterator[nn.Module]:
        """Lend a module of the model, or the whole, with the present values, for reading. All ranks call this together.

        ``name`` is as in ``named_modules``. The module is the user's class on this rank's device; its parameters have
        the dtypes that the program computes with, or FP32 with ``masters``, and with ``ema`` the values of the moving
        averages of ``--ema``. Its buffers have this rank's values. A module in hand is lent in the mode, training or
        evaluation, that the user left it in; another one as it is built. Parts of the model that are not lent stay on
        the meta device. At the end of the block the module's memory is freed, and every use of its tensors raises a
        UserError.

        Raises:
            UserError: where the model has no such module, the engine was initialised without a module, the program
                keeps no averages, or the block changed a parameter in place.
        """
        if self._module_gatherer is None:
            raise UserError(
                "The engine was not initialised from a module, so there is none that it could lend."
            )
        with self._executor.entered():
            self._executor.finish()
            block = ExitStack()
            with memory_for(f"the parameters of {name or 'the whole model'} on each rank", _LESS):
                module = block.enter_context(
                    self._module_gatherer.gathered(name, masters=masters, ema=ema)
                )
        with block:
            yield module

    def return_values(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Give the module in hand the present values back, whole on every rank. All ranks call this together.

        Its tensors get their own dtypes, FP32 masters where there are some, on ``device``, by default the CPU. The
        engine keeps its values.

        Raises:
            UserError: where the program was not compiled from this module.
        """
        with self._executor.entered():
            self._executor.finish()
            with memory_for("the whole model on each rank"):
                return_values(
                    self.program,
                    self._memory,
                    self.job.comm,
                    module,
                    device or torch.device("cpu"),
                )

    def parameters(self, *, masters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name, whole, one unit after the other, FP32 masters where there are some.

        Each tensor is a copy. Tied parameters come under their first name. All ranks iterate together, to the end, and
        do nothing else with the engine meanwhile.
        """
        with self._executor.entered():
            self._executor.finish()
        parameters = whole_parameters(self.program, [self._memory], self.job.comm, masters=masters)
        while True:
            with self._executor.entered():
                following = next(parameters, None)
            if following is None:
                return
            slot, (values,) = following
            yield slot.name, values

    def full_parameters(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Every parameter by name, whole, FP32 where the program has masters. All ranks call this together.

        With ``ema`` these are the moving averages of ``--ema``; frozen parameters are themselves.

        Raises:
            UserError: with ``ema``, where the program keeps no averages.
        """
        with self._executor.entered():
            self._executor.finish()
            return state_of_buffers.full_parameters(
                self.program, [self._memory], self.job.comm, ema=ema
            )

    def full_state(self) -> dict[tuple[str, str], Tensor]:
        """Parameters, masters and optimizer states, whole, by (flat, quantity). All ranks call this together."""
        with self._executor.entered():
            self._executor.finish()
            return state_of_buffers.full_state(self.program, [self._memory], self.job.comm)

    def state_dict(
        self, *, rank0_only: bool = False, only_trained: bool = False
    ) -> dict[str, Tensor]:
        """What the module's ``state_dict`` would have: whole tensors on the CPU, copied. All ranks call this together.

        Parameters are FP32 where the program has masters. Tied ones stand under each of their names. With
        ``rank0_only`` the result is empty on the other ranks, with ``only_trained`` it lacks frozen parameters.
        """
        is_kept = self.rank == 0 or not rank0_only
        facts = self._model_facts() if is_kept else ModelFacts()
        with self._executor.entered():
            self._executor.finish()
            return state_dicts.module_state(
                self.program,
                self._memory,
                self.job.comm,
                facts,
                self._others,
                is_kept=is_kept,
                only_trained=only_trained,
            )

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Take over whole tensors by the names of the module; the optimizer's state stays. Every rank gives them alike.

        Moving averages begin with them before step 1. Returns the missing and the unknown names, as
        ``nn.Module.load_state_dict`` does.

        Raises:
            UserError: where a tensor has another shape, with ``strict`` where a name is missing or unknown; then
                nothing has changed. Within a step.
        """
        self._accumulation.require_none("load_state_dict")
        self._checkpoints.join()
        with self._executor.entered():
            self._executor.finish()
            names = state_dicts.load_module_state(
                self.program,
                self._memory,
                state_dict,
                self._model_facts(),
                self._others,
                is_strict=strict,
                has_averages=self.step_count > 0,
            )
            self._executor.restart(self.step_count)
        return names

    def optimizer_state_dict(
        self, *, rank0_only: bool = False
    ) -> dict[str, dict[str, object] | list[dict[str, object]]]:
        """The optimizer's state by the names of parameters, whole, on the CPU. All ranks call this together.

        Its form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, with torch's names of
        states. With ``rank0_only`` the result is empty on the other ranks.

        Raises:
            UserError: where the program updates nothing.
        """
        optimizer = self.optimizer
        with self._executor.entered():
            self._executor.finish()
            return state_dicts.optimizer_state(
                self.program,
                self._memory,
                self.job.comm,
                optimizer,
                is_kept=self.rank == 0 or not rank0_only,
            )

    @property
    def _others(self) -> Mapping[str, Tensor]:
        """The tensors of the module that the program does not hold."""
        return {} if self._module_gatherer is None else self._module_gatherer.others

    def _model_facts(self) -> ModelFacts:
        """The names and the configuration of the user's model, where there is one; made anew where none was noted."""
        if self._facts is None:
            self._facts = (
                ModelFacts()
                if self._module_gatherer is None
                else model_facts(self._module_gatherer.make())
            )
        return self._facts
