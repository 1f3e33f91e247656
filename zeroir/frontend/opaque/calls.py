"""Opaque modules of a model: while it is traced, their forward is one operator, which runs their code as it is.

What such a call returns is found out when the model is traced (``found_out``).
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from zeroir.errors import UserError
from zeroir.frontend._torch_private import function_modes
from zeroir.frontend.capture.python_state import PythonState, UsersCode
from zeroir.frontend.opaque.eager_forward import (
    EagerForward,
    Forward,
    ResultType,
    Returned,
    SeededOps,
    Structure,
    own_tensors,
    taken_apart,
)
from zeroir.frontend.opaque.found_out import OpaqueModule, WhatItReturns, found_out
from zeroir.frontend.source.source import ModelSource
from zeroir.frontend.source.source_lines import line_of_forward
from zeroir.torch_ops.neutral import NeutralOps
from zeroir.torch_ops.opaque import generators_seeded, opaque, register_call

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """A call of an opaque module, as ``torch_ops.opaque.OpaqueCall``.

    ``module_of`` returns the module whose code runs, or None if it is gone, and ``plain`` is its forward before this
    replaced it, if it did. ``results`` are the tensors that it returns, then the new values of the inputs that it may
    change, at the positions ``may_change``. Where it changes attributes, ``_earlier`` has those from before, by the
    seed, because the backward calls it with them.
    """

    path: str
    reason: str
    module_of: Callable[[], nn.Module | None]
    plain: Forward | None
    eager: EagerForward
    trained: tuple[int, ...]
    returned: Structure
    results: tuple[ResultType, ...]
    may_change: tuple[int, ...]
    _earlier: dict[int, PythonState] = field(default_factory=dict, compare=False)

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The positions of the results that have a gradient."""
        return tuple(i for i, kind in enumerate(self.results) if kind.is_differentiated)

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
        return PythonState.of(self._module, _NO_OTHER_CODE)

    def empty_results(self) -> list[Tensor]:
        """Return tensors like the results, for a trace."""
        return [
            torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype) for kind in self.results
        ]

    def run(self, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Return the results."""
        if not self.trained:
            return self._run(inputs, seed, None, self._laid_out)
        before = self._state()
        results = self._run(inputs, seed, None, self._laid_out)
        if before.changed(self._state()) or before.stores():
            while len(self._earlier) >= _MOST_STATES:
                del self._earlier[next(iter(self._earlier))]
            self._earlier[seed] = before
        return results

    def _run(
        self,
        inputs: Sequence[Tensor],
        seed: int,
        trained: Sequence[int] | None,
        use: Callable[[Returned], T],
    ) -> T:
        module, changing = self._module, frozenset(self.may_change)
        # In hand, its code may have changed since.
        forward = module.forward if self.plain is None else self.plain
        return self.eager.run(module, forward, inputs, seed, trained, changing, use)

    def gradients(
        self, gradients: Sequence[Tensor], inputs: Sequence[Tensor], seed: int
    ) -> list[Tensor]:
        """Return the gradients of the trained inputs."""

        def differentiated(returned: Returned) -> list[Tensor]:
            results = self._results(returned)
            pairs = [
                (results[number], gradient)
                for number, gradient in zip(self.differentiated, gradients, strict=True)
                if results[number].requires_grad
            ]
            wanted = [returned.leaves[number] for number in self.trained]
            made: Sequence[Tensor | None] = [None] * len(wanted)
            if pairs:
                outputs, given = zip(*pairs, strict=True)
                made = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
            return [
                torch.zeros_like(x) if gradient is None else torch.empty_like(x).copy_(gradient)
                for gradient, x in zip(made, (x.detach() for x in wanted), strict=True)
            ]

        before = self._earlier.pop(seed, None)
        if before is None:
            return self._run(inputs, seed, self.trained, differentiated)
        present = self._state()
        before.restore_exactly()
        try:
            return self._run(inputs, seed, self.trained, differentiated)
        finally:
            present.restore_exactly()

    def _results(self, returned: Returned) -> list[Tensor]:
        place = self.eager.place
        structure, tensors = taken_apart(returned.values, place, "returns")
        if str(structure) != str(self.returned):
            raise UserError(
                f"{place} returned {structure} where it returned {self.returned} when the program was compiled."
            )
        new = (returned.changed.get(i, returned.leaves[i]) for i in self.may_change)
        results = [*tensors, *new]
        found = [(tuple(x.shape), x.dtype) for x in results]
        expected = [(kind.shape, kind.dtype) for kind in self.results]
        if found != expected:
            raise UserError(
                f"{place} returned tensors of {_types(found)} where it returned {_types(expected)} when the program "
                "was compiled."
            )
        return results

    def _laid_out(self, returned: Returned) -> list[Tensor]:
        return [
            torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=x.device).copy_(x)
            for x, kind in zip(self._results(returned), self.results, strict=True)
        ]


def _types(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in kinds)


_MOST_STATES: Final = 1024
"""Forwards whose backward never comes, as after a failure, are forgotten."""

_NO_OTHER_CODE: Final = UsersCode(modules=(), functions=())

_NUMBERS: Final[weakref.WeakKeyDictionary[nn.Module, int]] = weakref.WeakKeyDictionary()
_NEXT: Final = count()


@dataclass(slots=True)
class OpaqueModules:
    """The opaque modules of a model that is traced: the reason why it cannot be traced for each name of ``reasons``.

    ``found`` has what modules return, by their class and what they are called with.

    The code of the user's own module runs, if it is in hand, with its present attributes.
    """

    source: ModelSource
    reasons: Mapping[str, str]
    mode: FakeTensorMode
    found: dict[tuple[type, str], WhatItReturns]
    _known: dict[str, CapturedCall] = field(default_factory=dict)
    _label: str = ""

    def install(self, model: nn.Module) -> None:
        """Replace the forward of these modules of the model by an operator."""
        if not self.reasons:
            return
        live = self.source.model() if self.source.is_in_hand else model
        file = self.source.file
        if file is not None:
            text = f"{file.factory} {file.sha256}"
            self._label = f"f{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        else:
            if live not in _NUMBERS:
                _NUMBERS[live] = next(_NEXT)
            self._label = f"m{_NUMBERS[live]}"
        for path, reason in sorted(self.reasons.items()):
            traced, runs = model.get_submodule(path), live.get_submodule(path)
            plain = traced.forward
            module = OpaqueModule(
                path=path,
                reason=reason,
                traced=traced,
                plain=plain,
                runs=runs,
            )
            traced.forward = self._forward(module)

    def _forward(self, module: OpaqueModule) -> Forward:
        def call(*args: object, **kwargs: object) -> object:
            return self._call(module, args, kwargs)

        return call

    def _call(
        self, module: OpaqueModule, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        path, traced = module.path, module.traced
        own, tensors = own_tensors(traced)
        line = line_of_forward(traced)
        place = f"{line + ': ' if line else ''}The module {path}, whose code runs as it is,"
        if any(
            isinstance(size, torch.SymInt)
            for leaf in (*tensors, *pytree.tree_leaves((args, kwargs)))
            for size in (leaf.shape if isinstance(leaf, Tensor) else (leaf,))
        ):
            raise UserError(
                f"{place} returns what is known for one size only: leave shapes out, or let it be traced."
            )
        arguments, given = taken_apart((args, kwargs), place, "is called with")
        inputs = [*tensors, *given]
        eager = EagerForward(
            path=path,
            place=place,
            own=own,
            arguments=arguments,
            training=tuple(each.training for each in traced.modules()),
            autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        )
        has_grad = torch.is_grad_enabled()
        trained = tuple(i for i, x in enumerate(inputs) if has_grad and x.requires_grad)
        types = [(tuple(x.shape), x.dtype) for x in inputs]
        call = f"{arguments} {eager.training} {eager.autocast} {trained} {types}"
        key = f"{path} {call}"
        word = f"{self._label}_{_mangled(path)}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        known = self._known.get(word)
        if known is None:
            # Modules of one class that are called alike return alike, which each call checks.
            of_class = type(traced), f"{[each.names for each in own]} {call}"
            if of_class not in self.found:
                self.found[of_class] = found_out(eager, module, inputs, trained, self.mode)
            found = self.found[of_class]
            known = self._known[word] = CapturedCall(
                path=path,
                reason=module.reason,
                module_of=_holding(module),
                plain=module.plain if module.runs is traced else None,
                eager=eager,
                trained=trained,
                returned=found.returned,
                results=found.results,
                may_change=found.may_change,
            )
        register_call(word, known)
        before = [*inputs]
        for number in known.may_change:
            # The backward reads the value from before the call.
            inputs[number] = inputs[number].clone()
        results = opaque(inputs, _neutral().seed(), word)
        returned = results[: len(results) - len(known.may_change)]
        for number, value in zip(known.may_change, results[len(returned) :], strict=True):
            before[number].copy_(value)
        return known.returned.filled(returned)


def _holding(module: OpaqueModule) -> Callable[[], nn.Module | None]:
    """Return a function that returns the module whose code runs; the user's own is not kept alive."""
    runs = module.runs
    return (lambda: runs) if runs is module.traced else weakref.ref(runs)


def run_as_opaque(model: nn.Module, paths: Iterable[str]) -> None:
    """Let these modules of a model draw their random numbers as the opaque calls of a program do."""
    for path in paths:
        module = model.get_submodule(path)
        module.forward = _seeded(module.forward)


def _seeded(forward: Forward) -> Forward:
    def call(*args: object, **kwargs: object) -> object:
        seed = int(_neutral().seed())
        with generators_seeded(seed), SeededOps(seed):
            return forward(*args, **kwargs)

    return call


def _neutral() -> NeutralOps:
    """Return the mode in which the model runs."""
    return next(mode for mode in reversed(function_modes()) if isinstance(mode, NeutralOps))


def _mangled(path: str) -> str:
    return re.sub(r"\W", "_", path)[:40]
