"""What a program depends on outside the engine: the user's code and tensors, which may change between steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroir.errors import ChangedCodeError, UserError
from zeroir.ir.program import Program
from zeroir.ir.reports import Storing
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.absent_tensors import Lender, home_of
from zeroir.torch_ops.types import TORCH_DTYPE


class WatchedCode(Protocol):
    """The user's code and tensors that a program was compiled from.

    ``tensors`` have the present values of constants of the program, by name, and ``optimizers`` are those of the
    script whose groups the program took over.
    """

    @property
    def model(self) -> nn.Module | None:
        """The user's module, where there is one in this process."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The user's tensors by the names of constants."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The script's own optimizers."""

    @property
    def numbers(self) -> frozenset[str]:
        """The names of the user's numbers whose present values count."""

    @property
    def unfollowed(self) -> frozenset[str]:
        """The names of numbers that the program was to follow and cannot."""

    @property
    def appends(self) -> bool:
        """Whether the code appends tensors to a list."""

    def keep(self, moment: Storing, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors, by their names, where the code would store them in a micro-step or an evaluation."""

    @property
    def ignored(self) -> Sequence[str]:
        """Patterns of names whose changes do not matter."""

    def ignore(self, patterns: Sequence[str]) -> None:
        """Accept changes of the names that match one of these patterns, too."""

    def parameter_names(self) -> Mapping[int, str]:
        """Return the names of the module's parameters by their ids."""

    def trained_names(self) -> Sequence[str]:
        """Return the names of the module's parameters that require a gradient now."""

    def remember(self) -> None:
        """Compare with the present state of the user's code from now on."""

    def state(self) -> Hashable:
        """Return a value that is the same where the present state of the user's code is."""

    def require_unchanged(self, *, is_step: bool = True) -> None:
        """Raise ChangedCodeError where something changed that the program does not follow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledAgain:
    """A program that was compiled from some state of the user's code, None where that is not known.

    ``accumulating`` compiles it for steps of several batches; None where it is.
    """

    program: Program
    code: WatchedCode | None
    accumulating: Callable[[], Program] | None = None


class UnwatchedCode:
    """Code that runs at each step by itself, so that it may change, but for which parameters are trained."""

    def __init__(self, code: WatchedCode) -> None:
        self._code = code
        self._trained = tuple(code.trained_names())
        self.model = code.model
        self.tensors: Mapping[str, Tensor] = {}
        self.optimizers = code.optimizers
        self.numbers: frozenset[str] = frozenset()
        self.unfollowed: frozenset[str] = frozenset()
        self.appends = False
        self.ignored: Sequence[str] = ()

    def keep(self, moment: Storing, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the code has stored tensors itself."""

    def ignore(self, patterns: Sequence[str]) -> None:
        """Accept changes, as of everything."""

    def parameter_names(self) -> Mapping[int, str]:
        """Return the names of the module's parameters by their ids."""
        return self._code.parameter_names()

    def trained_names(self) -> Sequence[str]:
        """Return the names of the module's parameters that require a gradient now."""
        return self._code.trained_names()

    def remember(self) -> None:
        """Do nothing."""

    def state(self) -> Hashable:
        """Return a value that is the same for one object."""
        return id(self)

    def require_unchanged(self, *, is_step: bool = True) -> None:
        """Raise UserError where there are other parameters, or others are to be trained."""
        changed = set(self._trained) ^ set(self.trained_names())
        if changed:
            raise UserError(
                f"requires_grad of {min(changed)} changed within engine.eager(): leave that block first, so that a "
                "program can be compiled for it."
            )
        try:
            self._code.require_unchanged(is_step=is_step)
        except ChangedCodeError as change:
            if not change.may_compile:
                raise


def is_current(code: WatchedCode | None, *, is_step: bool) -> bool:
    """Return whether a program is one of the present state of the user's code, of which it may know more."""
    try:
        if code is not None:
            code.require_unchanged(is_step=is_step)
    except ChangedCodeError:
        return False
    return True


def lent_values(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the present values of those tensors that other engines have, by the tensors' ids.

    All ranks call this together.
    """
    by_lender: dict[int, tuple[Lender, dict[str, int]]] = {}
    for tensor in tensors:
        home = home_of(tensor)
        if home is not None:
            _, ids = by_lender.setdefault(id(home.lender), (home.lender, {}))
            ids[home.name] = id(tensor)
    return {
        ids[name]: value
        for lender, ids in by_lender.values()
        for name, value in lender.lent(list(ids)).items()
    }


def read_tensors(
    tensors: Mapping[str, Tensor],
    program: Program,
    memory: RankMemory,
    lent: Mapping[int, Tensor] = MappingProxyType({}),
) -> None:
    """Copy the present values of the user's tensors to the constants of these names.

    ``lent`` are the values of tensors that other engines have, by the tensors' ids.

    Raises:
        UserError: where a tensor has another shape or dtype than when the program was compiled, or no values.
    """
    for binding in program.module_buffers:
        tensor = tensors.get(binding.name)
        if tensor is None:
            continue
        dtype = TORCH_DTYPE[program.buffer_by_name[binding.buffer].dtype]
        value = lent.get(id(tensor), tensor)
        if tuple(tensor.shape) != binding.shape or tensor.dtype is not dtype or value.is_meta:
            raise UserError(
                f"A tensor outside the model is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device} now, "
                f"and was {dtype} of shape {list(binding.shape)} when the program was compiled: compile again."
            )
        memory.write(binding.buffer, 0, value.detach().to(dtype).reshape(-1))
