"""Opaque modules of a model: while it is traced, their forward is one operator, which runs their code as it is.

What such a call returns is found out when the model is traced: the module's forward runs once on numbers without
meaning, of the shapes of the trace.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from zeroir.errors import UserError
from zeroir.frontend.capture.node_facts import require_dtype
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
from zeroir.frontend.source.source import ModelSource, explain
from zeroir.frontend.source.source_lines import line_of_error, line_of_forward
from zeroir.torch_ops.neutral import NeutralOps
from zeroir.torch_ops.opaque import generators_seeded, opaque, register_call

T = TypeVar("T")


class CannotRunError(UserError):
    """The forward of a module cannot run as it is, as ``path`` names it."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """A call of an opaque module, as ``torch_ops.opaque.OpaqueCall``.

    ``module`` is the one whose code runs, and ``forward`` its plain one. ``results`` are the tensors that it returns,
    then the new values of the inputs that it may change, at the positions ``may_change``. Where it changes attributes,
    ``_earlier`` has those from before, by the seed, because the backward calls it with them.
    """

    path: str
    module: nn.Module
    forward: Forward
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
        return replace(self, module=module, forward=_present_forward(module), _earlier={})

    def empty_results(self) -> list[Tensor]:
        """Return tensors like the results, for a trace."""
        return [
            torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype) for kind in self.results
        ]

    def run(self, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Return the results."""
        before = PythonState.of(self.module, _NO_OTHER_CODE)
        results = self._run(inputs, seed, None, self._laid_out)
        after = PythonState.of(self.module, _NO_OTHER_CODE)
        if self.trained and (before.changed(after) or before.stores()):
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
        changing = frozenset(self.may_change)
        return self.eager.run(self.module, self.forward, inputs, seed, trained, changing, use)

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
        present = PythonState.of(self.module, _NO_OTHER_CODE)
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
    """The opaque modules of a model that is traced, by their names ``paths``.

    The code of the user's own module runs, if it is in hand, with its present attributes.
    """

    source: ModelSource
    paths: frozenset[str]
    mode: FakeTensorMode
    _known: dict[str, CapturedCall] = field(default_factory=dict)
    _label: str = ""

    def install(self, model: nn.Module) -> None:
        """Replace the forward of these modules of the model by an operator."""
        if not self.paths:
            return
        live = self.source.model() if self.source.is_in_hand else model
        file = self.source.file
        if file is not None:
            text = f"{file.factory} {file.sha256}"
            self._label = f"f{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        else:
            self._label = f"m{_NUMBERS.setdefault(live, next(_NEXT))}"
        for path in sorted(self.paths):
            traced, runs = model.get_submodule(path), live.get_submodule(path)
            plain = traced.forward
            # In hand, its code may have changed until a call.
            forward = plain if runs is traced else _present_forward(runs)
            traced.forward = self._forward(path, traced, plain, runs, forward)

    def _forward(
        self, path: str, traced: nn.Module, plain: Forward, runs: nn.Module, forward: Forward
    ) -> Forward:
        def call(*args: object, **kwargs: object) -> object:
            return self._call(path, traced, plain, runs, forward, args, kwargs)

        return call

    def _call(
        self,
        path: str,
        traced: nn.Module,
        plain: Forward,
        runs: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        own, tensors = own_tensors(traced)
        line = line_of_forward(traced)
        place = f"{line + ': ' if line else ''}The module {path}, whose code runs as it is,"
        if any(
            isinstance(size, torch.SymInt)
            for leaf in (*tensors, *pytree.tree_leaves((args, kwargs)))
            for size in (leaf.shape if isinstance(leaf, Tensor) else (leaf,))
        ):
            raise UserError(
                f"{place} because it cannot be traced, returns what is known for one size only: leave shapes out."
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
        key = f"{path} {arguments} {eager.training} {eager.autocast} {trained} {types}"
        word = f"{self._label}_{_mangled(path)}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        known = self._known.get(word)
        if known is None:
            known = self._known[word] = _probed(
                eager, traced, plain, runs, forward, inputs, trained, self.mode
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


def _present_forward(module: nn.Module) -> Forward:
    def call(*args: object, **kwargs: object) -> object:
        return module.forward(*args, **kwargs)

    return call


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
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next(mode for mode in modes if isinstance(mode, NeutralOps))


def _mangled(path: str) -> str:
    return re.sub(r"\W", "_", path)[:40]


def _probed(
    eager: EagerForward,
    traced: nn.Module,
    plain: Forward,
    runs: nn.Module,
    forward: Forward,
    inputs: Sequence[Tensor],
    trained: tuple[int, ...],
    mode: FakeTensorMode,
) -> CapturedCall:
    """Run a module once, and return the call with what it returns.

    Raises:
        CannotRunError: if the module's code fails, or returns what no program holds.
    """
    place = f"the code of the module {eager.path}"
    try:
        # Modes of the trace are those of its thread.
        with ThreadPoolExecutor(1) as thread:
            returned = thread.submit(_run_once, eager, traced, plain, runs, inputs, trained, mode)
            structure, tensors, changed = returned.result()
        for tensor in tensors:
            require_dtype(tensor.dtype, place[0].upper() + place[1:])
    except UserError as error:
        raise CannotRunError(eager.path, str(error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the module's code
        sentence = explain(error, line_of_error(error), f"{place} cannot run as it is")
        raise CannotRunError(eager.path, sentence[0].upper() + sentence[1:]) from None
    statistics = (i for i, own in enumerate(eager.own) if own.is_statistic and eager.training[0])
    may_change = sorted({*changed, *statistics})
    return CapturedCall(
        path=eager.path,
        module=runs,
        forward=forward,
        eager=eager,
        trained=trained,
        returned=structure,
        results=(
            *(_type_of(x, x.requires_grad) for x in tensors),
            *(_type_of(inputs[i], i in trained) for i in may_change),
        ),
        may_change=tuple(may_change),
    )


def _run_once(
    eager: EagerForward,
    traced: nn.Module,
    plain: Forward,
    runs: nn.Module,
    inputs: Sequence[Tensor],
    trained: tuple[int, ...],
    mode: FakeTensorMode,
) -> tuple[Structure, list[Tensor], frozenset[int]]:
    """Return what a module returns, its tensors, and the positions of the inputs that it changes.

    Raises:
        UserError: if numbers among its results depend on tensors.
    """
    types = [(tuple(x.shape), x.dtype) for x in inputs]
    values = _values(eager, runs)

    def taken(returned: Returned) -> tuple[Structure, list[Tensor], frozenset[int]]:
        structure, tensors = taken_apart(returned.values, eager.place, "returns")
        return structure, tensors, frozenset(returned.changed)

    def run(numbers: Sequence[Tensor]) -> tuple[Structure, list[Tensor], frozenset[int]]:
        own = enumerate(eager.own)
        every = frozenset(range(len(numbers))) - {i for i, each in own if each.is_parameter}
        return eager.run(traced, plain, numbers, 0, trained, every, taken)

    def run_on(integer: int) -> tuple[Structure, list[Tensor], frozenset[int]]:
        return run(
            [
                values[i].to(dtype) if i in values else _without_meaning(shape, dtype, i, integer)
                for i, (shape, dtype) in enumerate(types)
            ]
        )

    try:
        with mode:
            return run([torch.empty(shape, dtype=dtype) for shape, dtype in types])
    except Exception:  # noqa: BLE001 - its code may need values
        # Integers may be the number for no word, or an index.
        tried = [_tried(run_on, integer) for integer in range(3)]
        found = [each for each in tried if not isinstance(each, Exception)]
        if not found:
            raise next(each for each in tried if isinstance(each, Exception)) from None
        if any(str(each[0]) != str(found[0][0]) for each in found):
            place = eager.place
            raise UserError(
                f"{place} returns numbers that depend on the values of tensors."
            ) from None
        return found[0]


def _tried(run: Callable[[int], T], argument: int) -> T | Exception:
    try:
        return run(argument)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of the module's code
        return error


def _type_of(x: Tensor, is_differentiated: bool) -> ResultType:
    stride = torch.empty_like(x, device="meta").stride()
    return ResultType(tuple(x.shape), stride, x.dtype, is_differentiated)


def _values(eager: EagerForward, runs: nn.Module) -> dict[int, Tensor]:
    """Return the values of the module's buffers by their positions, where they are known: code may index with them."""
    names = dict(runs.named_buffers(remove_duplicate=False))
    found = (
        (i, names.get(own.names[0])) for i, own in enumerate(eager.own) if not own.is_parameter
    )
    return {i: x.cpu() for i, x in found if x is not None and type(x) is Tensor and not x.is_meta}


def _without_meaning(
    shape: tuple[int, ...], dtype: torch.dtype, position: int, integer: int
) -> Tensor:
    """Return small random numbers, or an integer everywhere: integers may be indices."""
    if not dtype.is_floating_point:
        return torch.full(shape, integer, dtype=dtype)
    generator = torch.Generator().manual_seed(2 * position + integer)
    return torch.empty(shape, dtype=dtype).normal_(0, 0.1, generator=generator)
