"""Opaque modules of a model: while it is traced, their forward is one operator, which runs their code as it is.

What such a call returns is found out when the model is traced (``module_results``).
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final, cast

import torch
from torch import nn

from zeroir.errors import UserError
from zeroir.frontend._torch_private import fake_mode, function_modes
from zeroir.frontend._torch_sizes import NoPolynomialError, left_out, size_of, torch_sizes
from zeroir.frontend.capture.python_state import PythonState, UsersCode
from zeroir.frontend.opaque.captured_call import CapturedCall
from zeroir.frontend.opaque.choice import OwnCode
from zeroir.frontend.opaque.eager_forward import (
    EagerForward,
    Forward,
    SeededOps,
    own_tensors,
    present_tensors,
)
from zeroir.frontend.opaque.module_results import (
    InputType,
    ModuleResults,
    OpaqueModule,
    name_in_sentences,
    results_of_module,
)
from zeroir.frontend.opaque.own_code import CallsOfCode, answered, names_of_called
from zeroir.frontend.opaque.structure import (
    CannotRunError,
    OwnCodeError,
    taken_apart,
)
from zeroir.frontend.source.source import LossFunction, ModelSource, capitalised
from zeroir.frontend.source.source_lines import (
    line_of_definition,
    line_of_forward,
)
from zeroir.torch_ops._torch_device_tensors import DeviceTensorMode
from zeroir.torch_ops.neutral import NeutralOps
from zeroir.torch_ops.opaque import generators_seeded, opaque, register_call

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
    mode: DeviceTensorMode
    found: dict[tuple[type, str], ModuleResults]
    _known: dict[str, CapturedCall] = field(default_factory=dict)
    _codes: dict[object, UsersCode] = field(default_factory=dict)
    _label: str = ""

    def install(
        self,
        model: nn.Module,
        *,
        with_loss: bool,
        own_code: OwnCode | None = None,
        reason_of_own_code: str = "",
    ) -> ModelSource:
        """Replace the forward of these modules of the model by an operator, and return the source of the trace.

        ``with_loss`` is for the model itself: the operator calls the loss function, which calls the model. ``own_code``
        is replaced by an operator that follows the modules which it calls.
        """
        if not self.reasons and own_code is None:
            return self.source
        live = self.source.model() if self.source.is_in_hand else model
        file = self.source.file
        if file is not None:
            text = f"{file.factory} {file.sha256}"
            self._label = f"f{_digest(text)}"
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
                own=own_tensors(traced),
                plain=plain,
                runs=runs,
            )
            if with_loss and self.source.loss is not None:
                return self._with_opaque_loss(module, self.source.loss)
            traced.forward = self._forward(module)
        if own_code is None:
            return self.source
        around = OpaqueModule(
            path="",
            reason=reason_of_own_code,
            traced=model,
            own=tuple(own for own in own_tensors(model) if any("." not in n for n in own.names)),
            plain=model.forward,
            runs=live,
        )
        if own_code is OwnCode.LOSS and self.source.loss is not None:
            return self._with_own_code_of_loss(around, self.source.loss)
        model.forward = self._own_code(around, None)
        return self.source

    def _with_own_code_of_loss(self, module: OpaqueModule, loss: LossFunction) -> ModelSource:
        """Return a source whose loss function is an operator that follows the model."""
        around = replace(module, own=(), plain=partial(loss, module.traced))
        of_loss = self._own_code(around, loss)
        return replace(self.source, loss=lambda _, batch: of_loss(batch))

    def _own_code(self, module: OpaqueModule, loss: LossFunction | None) -> Forward:
        """Return a function that traces the modules which the code calls, and makes an operator of the code."""
        names = names_of_called(module.traced, is_loss=loss is not None)

        def call(*args: object, **kwargs: object) -> object:
            before = PythonState.of(module.traced, self._code_of(loss or module.plain))
            neutral = _neutral()
            first_site = neutral.sites

            def run() -> object:
                before.restore_exactly()
                neutral.sites = first_site
                return module.plain(*args, **kwargs)

            def sites(number: int | None) -> int:
                neutral.sites = neutral.sites if number is None else number
                return neutral.sites

            place = _place(module, loss, OwnCode.LOSS if loss else OwnCode.FORWARD)
            with left_out(self.mode) as keep:
                calls = CallsOfCode(run=run, place=place, names=names, keep=keep, sites=sites)
                try:
                    noted = calls.trace()
                except OwnCodeError:
                    raise
                except UserError as error:
                    if calls.noted.failure is not None:
                        raise
                    raise CannotRunError("", str(error)) from None
                finally:
                    before.restore_exactly()
            return self._call(module, loss, (noted.results, *args), kwargs, noted.names)

        return call

    def _with_opaque_loss(self, module: OpaqueModule, loss: LossFunction) -> ModelSource:
        """Return a source whose loss function is an operator that calls this one."""
        forward = self._forward(replace(module, plain=partial(loss, module.traced)), loss)
        return replace(self.source, loss=lambda _, batch: forward(batch))

    def _forward(self, module: OpaqueModule, loss: LossFunction | None = None) -> Forward:
        def call(*args: object, **kwargs: object) -> object:
            return self._call(module, loss, args, kwargs)

        return call

    def _call(
        self,
        module: OpaqueModule,
        loss: LossFunction | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        called: Sequence[str] | None = None,
    ) -> object:
        path, traced, own = module.path, module.traced, module.own
        plain_forward = module.plain
        own_code = "" if called is None else OwnCode.LOSS if loss else OwnCode.FORWARD
        tensors = present_tensors(traced, own)
        name = own_code or (name_in_sentences(path) if loss is None else OwnCode.LOSS)
        place = _place(module, loss, name)
        arguments, given, sizes = taken_apart(
            (args, kwargs), place, "is called with", may_have_objects=called is not None
        )
        if called is not None:
            plain = partial(answered, module.plain, traced, called, place, loss is not None)
            module = replace(module, plain=plain)
        inputs = [*tensors, *given]
        try:
            types = [InputType(tuple(map(size_of, x.shape)), x.dtype) for x in inputs]
            polynomials = tuple(map(size_of, sizes))
        except NoPolynomialError as error:
            raise CannotRunError(
                path,
                f"{place} is called with a size that is no polynomial of dims, {error}: give that dimension one size.",
            ) from None
        eager = EagerForward(
            path=path,
            place=place,
            own=own,
            arguments=arguments,
            training=tuple(each.training for each in traced.modules()),
            autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            is_own_code=called is not None,
        )
        has_grad = torch.is_grad_enabled()
        trained = tuple(i for i, x in enumerate(inputs) if has_grad and x.requires_grad)
        # Modules of one class that are printed alike and called alike return alike, which each call checks.
        own_names = [each.names for each in own]
        call = f"{own_names} {arguments} {eager.training} {eager.autocast} {trained} {loss is None} {called}"
        of_class = type(traced), f"{traced} {call} {types} {polynomials}"
        if of_class not in self.found:
            mode = self.mode if self.mode.shape_env is None else fake_mode(device=self.mode.device)
            earlier = PythonState.of(traced, self._code_of(loss or plain_forward))
            self.found[of_class] = results_of_module(
                eager, module, types, polynomials, trained, mode
            )
            later = PythonState.of(traced, earlier.code)
            earlier.restore_exactly()
            changed = earlier.changed_objects(later)
            if called is not None and changed:
                # Part of the code is traced, and has to be again where objects that it reads change.
                raise OwnCodeError(
                    f"{place} changes {changed[0]} at every call: change it between steps, or in a submodule.",
                )
        found = self.found[of_class]
        # Calls that differ in sizes alone are one.
        kind = _digest(
            f"{type(traced).__qualname__} {call} {[x.dtype for x in inputs]} {found.returned} {found.results} "
            f"{found.may_change}"
        )
        word = f"{self._label}_{_mangled(path)}_{_digest(f'{path} {kind}')}"
        known = self._known.get(word)
        if known is None:
            known = CapturedCall(
                path=path,
                reason=module.reason,
                kind=kind,
                workspaces=found.workspaces,
                module_of=_holding(module),
                plain=plain_forward if module.runs is traced else None,
                loss=loss,
                own_code=own_code,
                called=tuple(called or ()),
                eager=eager,
                trained=trained,
                returned=found.returned,
                results=found.results,
                may_change=found.may_change,
                code=self._code_of(loss or plain_forward),
            )
        workspaces = _larger(known.workspaces, found.workspaces)
        self._known[word] = known = replace(known, workspaces=workspaces)
        register_call(word, known)
        before = [*inputs]
        for number in known.may_change:
            # The backward reads the value from before the call.
            inputs[number] = inputs[number].clone()
        of_results = cast("list[int]", torch_sizes(found.sizes, self.mode))
        results = opaque(inputs, _neutral().seed(), [*sizes, *of_results], word)
        returned = results[: len(results) - len(known.may_change)]
        for number, value in zip(known.may_change, results[len(returned) :], strict=True):
            before[number].copy_(value)
        numbers = of_results[len(of_results) - known.returned.sizes :]
        return known.returned.filled(returned, numbers, path, before)

    def _code_of(self, function: Callable[..., object]) -> UsersCode:
        """Return what a function reads beside the attributes of modules; methods of one class read the same."""
        # A method would keep its module alive.
        plain = getattr(function, "__func__", function)
        if plain not in self._codes:
            self._codes[plain] = UsersCode.of_function(plain)
        return self._codes[plain]


def _place(module: OpaqueModule, loss: LossFunction | None, name: str) -> str:
    """Return the beginning of a sentence on code that runs as it is."""
    line = line_of_forward(module.traced) if loss is None else line_of_definition(loss)
    return f"{line + ': ' if line else ''}{capitalised(name)}, whose code runs as it is,"


def _larger(
    first: tuple[int, int] | None, second: tuple[int, int] | None
) -> tuple[int, int] | None:
    if first is None or second is None:
        return None
    return max(first[0], second[0]), max(first[1], second[1])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _holding(module: OpaqueModule) -> Callable[[], nn.Module | None]:
    """Return a function that returns the module whose code runs; the user's own is not kept alive."""
    runs = module.runs
    return (lambda: runs) if runs is module.traced else weakref.ref(runs)


def run_as_opaque(model: nn.Module, paths: Iterable[str]) -> None:
    """Let these modules of a model draw their random numbers as the opaque calls of a program do."""
    for path in paths:
        module = model.get_submodule(path)
        module.forward = _seeded(module.forward)


@contextmanager
def seeded_as_opaque(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Let these modules draw their random numbers as ``run_as_opaque`` does within the block."""
    modules = [model.get_submodule(path) for path in paths]
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = _seeded(module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


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
