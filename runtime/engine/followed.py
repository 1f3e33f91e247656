"""What a program depends on outside the engine: the user's code and tensors, which may change between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.runtime.memory.rank_memory import RankMemory


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

    def parameter_names(self) -> Mapping[int, str]:
        """Return the names of the module's parameters by their ids."""

    def remember(self) -> None:
        """Compare with the present state of the user's code from now on."""

    def require_unchanged(self, *, is_step: bool = True) -> None:
        """Raise UserError where something changed that the program does not follow."""


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
