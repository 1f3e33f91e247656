"""What a program depends on outside the engine: the user's code and tensors, which may change between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, Protocol

from torch import Tensor
from torch.optim import Optimizer

from zeroir.errors import ChangedCodeError, UserError
from zeroir.ir.program import Program
from zeroir.runtime.memory.rank_memory import RankMemory

LOGGER: Final = logging.getLogger("zeroir")

MOST_STATES: Final = 8
"""Programs that one engine compiles for as many states of the user's code: a script that anneals a number has more."""


class Followed(Protocol):
    """The user's code and tensors that a program was compiled from.

    ``tensors`` have the present values of constants of the program, by name, and ``optimizers`` are those of the
    script whose groups the program took over.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The user's tensors by the names of constants."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The script's own optimizers."""

    @property
    def ignored(self) -> Sequence[str]:
        """Patterns of names whose changes do not matter."""

    def ignore(self, patterns: Sequence[str]) -> None:
        """Accept changes of the names that match one of these patterns, too."""

    def parameter_names(self) -> Mapping[int, str]:
        """Return the names of the module's parameters by their ids."""

    def remember(self) -> None:
        """Compare with the present state of the user's code from now on."""

    def state(self) -> Hashable:
        """Return a value that is the same where the present state of the user's code is."""

    def require_unchanged(self, *, is_step: bool = True) -> None:
        """Raise ChangedCodeError where something changed that the program does not follow."""


Compile = Callable[[], tuple[Program, Followed]]
"""A function that compiles the program again from the present state of the user's code."""


class ProgramsOfStates:
    """The programs of one model that were compiled from different states of the user's code, by these states."""

    def __init__(self, compile_again: Compile) -> None:
        self._compile = compile_again
        self._programs: dict[Hashable, tuple[Program, Followed]] = {}

    def remember(self, program: Program, followed: Followed) -> None:
        """Remember the program that was compiled from the present state."""
        self._programs[followed.state()] = program, followed

    def after(self, change: ChangedCodeError, followed: Followed) -> tuple[Program, Followed]:
        """Return the program of the present state, which is compiled if it is new.

        Raises:
            ChangedCodeError: ``change``, where parameters or states would not fit, or there are too many programs.
        """
        state = followed.state()
        if state not in self._programs:
            if not change.may_compile or len(self._programs) >= MOST_STATES:
                raise change
            begun = time.perf_counter()
            self._programs[state] = self._compile()
            seconds = time.perf_counter() - begun
            LOGGER.warning("%s: it was compiled again in %.1f s.", change.change, seconds)
        return self._programs[state]


def read_tensors(tensors: Mapping[str, Tensor], program: Program, memory: RankMemory) -> None:
    """Copy the present values of the user's tensors to the constants of these names.

    Raises:
        UserError: where a tensor has another shape or dtype than when the program was compiled, or no values.
    """
    for binding in program.module_buffers:
        tensor = tensors.get(binding.name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != binding.shape or tensor.is_meta:
            raise UserError(
                f"A tensor outside the model has the shape {list(tensor.shape)} on {tensor.device} now, and had "
                f"{list(binding.shape)} when the program was compiled: compile again."
            )
        memory.write(binding.buffer, 0, tensor.detach().reshape(-1))
