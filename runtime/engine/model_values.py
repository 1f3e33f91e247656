"""The values of the model on a rank between steps: setting and gathering them, and state dictionaries."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor, nn

from zeroir.errors import UserError, memory_for
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint.model_facts import ModelFacts, model_facts
from zeroir.runtime.comm.job import explained
from zeroir.runtime.comm.rank_zero_values import ALONE, RankZeroValues
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.publishing.image import image_of
from zeroir.runtime.publishing.publisher import Publisher
from zeroir.runtime.state import initial_values, state_dicts
from zeroir.runtime.state import state as state_of_buffers
from zeroir.runtime.state.carried_values import (
    CarriedValues,
    counts_of_steps,
)
from zeroir.runtime.state.frozen_updates import (
    FollowingValues,
    follow,
    following_values,
    frozen_module,
    paired_buffers,
    set_values,
)
from zeroir.runtime.state.full_parameters import whole_parameters
from zeroir.runtime.state.gathered_module import DeepCopy, ModuleGatherer, module_maker
from zeroir.runtime.state.initial_module import (
    Factory,
    StateSource,
    free_tensors,
    watched_source,
)
from zeroir.runtime.state.named_tensors import NamedTensors
from zeroir.runtime.state.waiting_states import WaitingStates
from zeroir.runtime.state.write_back import return_values
from zeroir.torch_ops.absent_tensors import Home, set_home

LOGGER: Final = logging.getLogger("zeroir")

_LESS: Final = "gather smaller modules, one after the other"
"""The remedy if memory runs out for a gathered module."""


class ModelValues:
    """Sets and reads the values of the model; ``Engine`` describes each method. All ranks call them together.

    ``others`` are the values of the module's tensors that the program does not hold.
    """

    def __init__(self, rank_program: RankProgram) -> None:
        self._rank_program = rank_program
        self._make: Callable[[], nn.Module] | None = None
        self._adapt: Callable[[nn.Module], None] | None = None
        self._facts: ModelFacts | None = None
        self.others: dict[str, Tensor] = {}
        self.are_set = False
        self._taken_from: nn.Module | None = None
        self._waiting = WaitingStates()
        self._following: dict[tuple[str, str, bool], FollowingValues] = {}
        self._following_of: Program | None = None
        self._publisher = Publisher()

    def initialise(
        self,
        source: Factory | nn.Module,
        seed: int,
        *,
        state: StateSource | None,
        keep_module: bool,
        deep_copy: DeepCopy,
        adapt: Callable[[nn.Module], None] | None,
    ) -> None:
        """Initialise every buffer from the module on rank 0."""
        rank_program = self._rank_program
        from_rank_zero = (
            ALONE
            if rank_program.job.is_alone
            else RankZeroValues(rank=rank_program.job.rank, device=rank_program.device)
        )

        def set_values() -> None:
            with memory_for("the model's parameters while they get their first values"):
                self.others = dict(
                    initial_values.initialise(
                        rank_program.program,
                        [rank_program.memory],
                        watched_source(source, self._note),
                        seed,
                        from_rank_zero,
                        state=state,
                        keep_module=keep_module,
                    )
                )

        rank_program.fill(set_values)
        self.forget_waiting()
        self.are_set = True
        if isinstance(source, nn.Module) and not keep_module:
            self._taken_from = source
            self._set_homes()
        self._make = module_maker(source, deep_copy)
        self._adapt = adapt

    def initialise_flats(self, values: Mapping[str, Tensor]) -> None:
        """Initialise buffers from ``values`` by name, as ``state.initialise_flats`` does."""
        program, memory = self._rank_program.program, self._rank_program.memory
        self._rank_program.fill(
            lambda: state_of_buffers.initialise_flats(program, [memory], values)
        )
        self.forget_waiting()
        self.are_set = True

    @contextmanager
    def gathered(
        self, name: str, units: Sequence[str] | None, *, masters: bool, ema: bool
    ) -> Iterator[nn.Module]:
        """Yield a module of the model with the present values, for reading."""
        rank_program = self._rank_program
        if self._make is None:
            raise UserError(
                "The engine was not initialised from a module, so there is none that it could lend."
            )
        gatherer = ModuleGatherer(
            program=rank_program.program,
            memory=rank_program.memory,
            comm=rank_program.job.comm,
            make=self._make,
            others=self.others,
            adapt=self._adapt,
            waiting=self._waiting,
        )
        block = ExitStack()
        with (
            rank_program.between_sections(),
            memory_for(f"the parameters of {name or 'the whole model'} on each rank", _LESS),
        ):
            module = block.enter_context(gatherer.gathered(name, units, masters=masters, ema=ema))
        with block:
            yield module

    def publish(
        self,
        address: str | os.PathLike[str],
        *,
        receivers: int | None,
        masters: bool,
        ema: bool,
        timeout: timedelta,
    ) -> int:
        """Publish the present values at an address, and return their version."""
        rank_program = self._rank_program
        image = image_of(
            rank_program.program,
            rank_program.memory,
            rank_program.job.comm,
            self.facts(),
            self.others,
            self._waiting,
            rank_program.step_count,
            masters=masters,
            ema=ema,
        )
        with rank_program.between_sections(), explained():
            published = self._publisher.publish(
                image, rank_program.job, address, receivers, timeout
            )
        if published.failure is not None:
            raise published.failure
        return published.version

    def close(self) -> None:
        """Publish nothing any more."""
        self._publisher.close()

    def _set_homes(self) -> None:
        """Let the user's tensors whose values are here say so."""
        if self._taken_from is not None:
            named = NamedTensors(self._taken_from)
            for name in named:
                set_home(named[name], Home(self, name))

    def lent(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return the present values of the module's tensors of these names, unsharded."""
        rank_program = self._rank_program
        program = rank_program.program
        by_slot: dict[str, list[str]] = {}
        for name in names:
            if name in program.parameter_by_name:
                _, slot = program.parameter_by_name[name]
                by_slot.setdefault(slot.name, []).append(name)
        buffers = {binding.name: binding for binding in program.module_buffers}
        values = {name: self.others[name] for name in names if name in self.others}
        with rank_program.between_sections():
            for name in names:
                if name in buffers:
                    held = rank_program.memory.read(buffers[name].buffer)
                    values[name] = held.clone().view(buffers[name].shape)
            parameters = whole_parameters(
                program,
                [rank_program.memory],
                rank_program.job.comm,
                by_slot,
                masters=True,
                waiting=self._waiting,
            )
            for slot, (value,) in parameters:
                values |= dict.fromkeys(by_slot[slot.name], value)
        return values

    def give_back(self) -> None:
        """Write the present values to the user's module, if they were taken from it, and forget that module."""
        if self._taken_from is not None:
            self.return_to(self._taken_from, torch.device("cpu"))
            self._taken_from = None

    def return_to(self, module: nn.Module, device: torch.device) -> None:
        """Write the present values to the user's module, unsharded on every rank."""
        rank_program = self._rank_program
        with rank_program.between_sections(), memory_for("the whole model on each rank"):
            return_values(
                rank_program.program,
                rank_program.memory,
                rank_program.job.comm,
                module,
                device,
                self.others,
                self._waiting,
            )

    def go_on_with(self, program: Program, among: Sequence[Program] = ()) -> None:
        """Switch to another program, and move the buffers of the model that only one of the two programs holds.

        A rank alone may switch to a program ``among`` those that it changes, if it holds the same buffers.
        """
        rank_program = self._rank_program
        present = rank_program.program
        held = state_of_buffers.names_of_buffers(present)
        wanted = state_of_buffers.names_of_buffers(program)
        if among and held == wanted and present.flats == program.flats:
            rank_program.change_to(program, among)
            return
        with rank_program.between_sections():
            for binding in present.module_buffers:
                if binding.name in held - wanted:
                    values = rank_program.memory.buffer(binding.buffer).view(binding.shape)
                    self.others[binding.name] = values.to("cpu", copy=True)
        carried = rank_program.replace(program, self._waiting)
        self._say(carried)
        arriving = [binding for binding in program.module_buffers if binding.name in wanted - held]
        with rank_program.executor.entered():
            for binding in arriving:
                values = self.others.pop(binding.name)
                rank_program.memory.buffer(binding.buffer).copy_(values.reshape(-1))
        if self._taken_from is not None:
            free_tensors(self._taken_from, [binding.name for binding in arriving])
            self._set_homes()

    def step_counts(self, trained: Sequence[str]) -> Mapping[str, int]:
        """Give each count of steps of these parameters a number from 1 on; those trained in all steps have none."""
        rank_program = self._rank_program
        with rank_program.between_sections():
            counts = counts_of_steps(rank_program.program, rank_program.memory, self._waiting)
        most = counts.of_all
        counted = {
            name: counts.of_parameter[name] for name in trained if name in counts.of_parameter
        }
        others = sorted(set(counted.values()) - {most}, reverse=True)
        return {name: 1 + others.index(count) for name, count in counted.items() if count != most}

    def forget_waiting(self) -> None:
        """Forget the states of parameters that are not trained now, because all parameters got others."""
        self._waiting = WaitingStates()

    @property
    def waiting_parameters(self) -> frozenset[str]:
        """The parameters whose states are not in the program, because it does not train them."""
        return frozenset(name for name, _ in self._waiting.values)

    def _say(self, carried: CarriedValues) -> None:
        """Say what happened to the states of parameters that are frozen or trained now."""
        if self._rank_program.job.rank != 0:
            return
        for names, sentence in (
            (
                carried.frozen,
                f"frozen now; {self._waiting.size_bytes:,} bytes of optimizer states wait in the memory of this host.",
            ),
            (carried.resumed, "trained again, with the optimizer states that they had."),
            (carried.begun, "trained now, with new optimizer states."),
        ):
            if names:
                others = f" and {len(names) - 1} more parameters" if names[1:] else ""
                LOGGER.warning("%s%s: %s", names[0], others, sentence)

    def parameters(self, *, masters: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter with its name, unsharded, unit by unit."""
        rank_program = self._rank_program
        with rank_program.between_sections():
            pass
        parameters = whole_parameters(
            rank_program.program,
            [rank_program.memory],
            rank_program.job.comm,
            masters=masters,
            waiting=self._waiting,
        )
        while True:
            with rank_program.executor.entered():
                following = next(parameters, None)
            if following is None:
                return
            slot, (values,) = following
            yield slot.name, values

    def full_parameters(self, *, ema: bool) -> dict[str, Tensor]:
        """Return every parameter by name, unsharded."""
        rank_program = self._rank_program
        with rank_program.between_sections():
            return state_of_buffers.full_parameters(
                rank_program.program,
                [rank_program.memory],
                rank_program.job.comm,
                ema=ema,
                waiting=self._waiting,
            )

    def full_state(self) -> dict[tuple[str, str], Tensor]:
        """Return parameters, master weights and optimizer states, unsharded, by (flat, quantity)."""
        rank_program = self._rank_program
        with rank_program.between_sections():
            return state_of_buffers.full_state(
                rank_program.program, [rank_program.memory], rank_program.job.comm
            )

    def state_dict(self, *, rank0_only: bool, only_trained: bool) -> dict[str, Tensor]:
        """Return the module's ``state_dict``."""
        rank_program = self._rank_program
        is_kept = rank_program.job.rank == 0 or not rank0_only
        facts = self.facts() if is_kept else ModelFacts()
        with rank_program.between_sections():
            return state_dicts.module_state(
                rank_program.program,
                rank_program.memory,
                rank_program.job.comm,
                facts,
                self.others,
                self._waiting,
                is_kept=is_kept,
                only_trained=only_trained,
            )

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], *, is_strict: bool
    ) -> tuple[list[str], list[str]]:
        """Load unsharded tensors by the module's names; return the missing and the unknown names."""
        rank_program = self._rank_program
        with rank_program.between_sections():
            names = state_dicts.load_module_state(
                rank_program.program,
                rank_program.memory,
                state_dict,
                self.facts(),
                self.others,
                is_strict=is_strict,
                has_averages=rank_program.step_count > 0,
            )
            rank_program.executor.restart(rank_program.step_count)
        known = rank_program.program.parameter_by_name
        self._waiting.forget_values({known[name][1].name for name in state_dict if name in known})
        return names

    def set_frozen(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Set the values of a frozen module."""
        rank_program = self._rank_program
        target = frozen_module(rank_program.program, name)
        with self._changing():
            set_values(rank_program.program, rank_program.memory, self.others, target, values)
        self._waiting.forget_values({slot.name for _, slot in target.parameters.values()})

    def follow(
        self, name: str, source: str, *, decay: float, averages: bool, buffers: bool
    ) -> None:
        """Let a frozen module become a mean of itself and of another module."""
        rank_program = self._rank_program
        program = rank_program.program
        key = name, source, averages
        if self._following_of is not program or self._waiting.values:
            self._following, self._following_of = {}, program
        if key not in self._following:
            self._following[key] = following_values(
                program,
                rank_program.memory.rank,
                frozen_module(program, name),
                source,
                averages=averages,
                waiting=self._waiting,
            )
        with self._changing():
            pairs = (
                paired_buffers(program, rank_program.memory, self.others, name, source)
                if buffers
                else []
            )
            follow(
                program,
                rank_program.memory,
                rank_program.job.comm,
                self._following[key],
                decay=decay,
                averages=averages,
                waiting=self._waiting,
            )
            for own, other in pairs:
                own.copy_(other)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change values of buffers within the block, from which the next section starts."""
        rank_program = self._rank_program
        with rank_program.between_sections(), torch.inference_mode(mode=False), torch.no_grad():
            yield
            rank_program.executor.restart(rank_program.step_count)

    def optimizer_state_dict(
        self, *, rank0_only: bool
    ) -> dict[str, dict[str, object] | list[dict[str, object]]]:
        """Return the optimizer's state by parameter name, unsharded, on the CPU."""
        rank_program = self._rank_program
        optimizer = rank_program.optimizer
        with rank_program.between_sections():
            return state_dicts.optimizer_state(
                rank_program.program,
                rank_program.memory,
                rank_program.job.comm,
                optimizer,
                is_kept=rank_program.job.rank == 0 or not rank0_only,
            )

    def facts(self) -> ModelFacts:
        """Return the names and the configuration of the user's model, if there is one; they are determined once."""
        if self._facts is None:
            self._facts = ModelFacts() if self._make is None else model_facts(self._make())
        return self._facts

    def _note(self, module: nn.Module) -> None:
        self._facts = model_facts(module)
