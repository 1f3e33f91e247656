"""A call of code that runs as it is, which the process that captured the model knows by a word."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from zeroir.errors import UserError, ZeroirError, is_out_of_memory
from zeroir.frontend.capture.python_state import PythonState, UsersCode
from zeroir.frontend.opaque.eager_forward import (
    EagerForward,
    Forward,
    ResultType,
    Returned,
    gradients_of,
)
from zeroir.frontend.opaque.own_code import answered
from zeroir.frontend.opaque.structure import Structure
from zeroir.frontend.source.source import LossFunction, explain
from zeroir.frontend.source.source_lines import line_of_call, line_of_error

T = TypeVar("T")

_MOST_STATES: Final = 1024
"""Forwards whose backward never comes, as after a failure, are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """A call of an opaque module, as ``torch_ops.opaque.OpaqueCall``.

    ``module_of`` returns the module whose code runs, or None if it is gone, and ``plain`` is its forward before this
    replaced it, if it did. A ``loss`` function runs in place of the forward, with the module as its first argument.
    ``results`` are the tensors that it returns, then the new values of the inputs that it may change, at the positions
    ``may_change``. The sizes of a call are those that its arguments have, then those of the tensors that it returns,
    then the numbers that it returns and that depend on dims. Where the code is ``own_code``, its first argument are the
    results of the modules ``called``. Where it changes attributes, or what ``code`` reads, ``_earlier`` has those from
    before, by the seed, because the backward calls it with them.
    """

    path: str
    reason: str
    kind: str
    workspaces: tuple[int, int] | None
    module_of: Callable[[], nn.Module | None]
    plain: Forward | None
    eager: EagerForward
    trained: tuple[int, ...]
    returned: Structure
    results: tuple[ResultType, ...]
    may_change: tuple[int, ...]
    code: UsersCode
    loss: LossFunction | None = None
    own_code: str = ""
    called: tuple[str, ...] = ()
    _earlier: dict[int, PythonState] = field(default_factory=dict, compare=False)

    @property
    def is_measured(self) -> bool:
        """Whether the memory of its first run is compared with what is planned."""
        return True

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The positions of the results that have a gradient."""
        return tuple(i for i, kind in enumerate(self.results) if kind.is_differentiated)

    def line_here(self) -> str:
        """Return ``file:line`` of the user's code that runs in this thread; empty if there is none."""
        return line_of_call()

    def take_failure(self) -> None:
        """Return None: a failure of the code ends the step in its middle."""

    def on(self, model: nn.Module) -> CapturedCall:
        """Return the same call, whose code is that of another model's module."""
        module = model.get_submodule(self.path)
        return replace(self, module_of=weakref.ref(module), plain=None, _earlier={})

    @property
    def _module(self) -> nn.Module:
        module = self.module_of()
        if module is None:
            place = self.eager.place
            raise UserError(f"{place} is gone: keep the module that was compiled.")
        return module

    def _state(self) -> PythonState:
        return PythonState.of(self._module, self.code)

    def _shapes(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes of the results."""
        remaining = iter(sizes[self.eager.arguments.sizes :])
        returned = self.results[: len(self.results) - len(self.may_change)]
        shapes = [tuple(next(remaining) for _ in kind.order) for kind in returned]
        return [*shapes, *(tuple(inputs[i].shape) for i in self.may_change)]

    def empty_results(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return tensors like the results, for a trace."""
        shapes = self._shapes(inputs, sizes)
        return [kind.empty(shape) for kind, shape in zip(self.results, shapes, strict=True)]

    def run(self, inputs: Sequence[Tensor], seed: int, sizes: Sequence[int]) -> list[Tensor]:
        """Return the results."""

        def laid_out(returned: Returned) -> list[Tensor]:
            with torch._C.DisableTorchFunction():  # these calls are not the module's
                results = self._results(returned, inputs, sizes)
                return [
                    kind.empty(tuple(x.shape), x.device).copy_(x)
                    for x, kind in zip(results, self.results, strict=True)
                ]

        if not self.trained:
            return self._run(inputs, seed, sizes, None, laid_out)
        before = self._state()
        results = self._run(inputs, seed, sizes, None, laid_out)
        if before.changed(self._state()) or before.stores():
            while len(self._earlier) >= _MOST_STATES:
                del self._earlier[next(iter(self._earlier))]
            self._earlier[seed] = before
        return results

    def _run(
        self,
        inputs: Sequence[Tensor],
        seed: int,
        sizes: Sequence[int],
        trained: Sequence[int] | None,
        use: Callable[[Returned], T],
    ) -> T:
        module, changing = self._module, frozenset(self.may_change)
        # In hand, its code may have changed since.
        forward = module.forward if self.plain is None else self.plain
        if self.loss is not None:
            forward = partial(self.loss, module)
        if self.own_code:
            is_loss = self.loss is not None
            forward = partial(answered, forward, module, self.called, self.eager.place, is_loss)
        given = sizes[: self.eager.arguments.sizes]
        try:
            return self.eager.run(module, forward, inputs, given, seed, trained, changing, use)
        except ZeroirError:
            raise
        except Exception as error:
            line = line_of_error(error)
            if line is None or is_out_of_memory(error):
                raise
            raise UserError(explain(error, line, f"{self.eager.place} failed")) from error

    def gradients(
        self,
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        seed: int,
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """Return the gradients of the trained inputs."""

        def gradients_at(returned: Returned) -> list[Tensor]:
            with torch._C.DisableTorchFunction():
                results = self._results(returned, inputs, sizes)
            differentiated = [results[number] for number in self.differentiated]
            return gradients_of(returned.leaves, differentiated, gradients, self.trained)

        before = self._earlier.pop(seed, None)
        if before is None:
            return self._run(inputs, seed, sizes, self.trained, gradients_at)
        present = self._state()
        before.restore_exactly()
        try:
            return self._run(inputs, seed, sizes, self.trained, gradients_at)
        finally:
            present.restore_exactly()

    def _results(
        self, returned: Returned, inputs: Sequence[Tensor], sizes: Sequence[int]
    ) -> list[Tensor]:
        place = self.eager.place
        structure, tensors = returned.taken_apart(place)
        known = self.returned.with_sizes(sizes[len(sizes) - self.returned.sizes :])
        if str(structure) != str(known):
            raise UserError(
                f"{place} returned {structure} where it returned {known} when the program was compiled."
            )
        new = (returned.changed.get(i, returned.leaves[i]) for i in self.may_change)
        results = [*tensors, *new]
        found = [(tuple(x.shape), x.dtype) for x in results]
        shapes = self._shapes(inputs, sizes)
        expected = [(shape, kind.dtype) for shape, kind in zip(shapes, self.results, strict=True)]
        if found != expected:
            raise UserError(
                f"{place} returned tensors of {_types(found)} where the program, as it was compiled, has "
                f"{_types(expected)} for arguments of these sizes."
            )
        return results


def _types(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in kinds)
