"""The code that calls the model or its submodules runs as it is, while what it calls is traced.

Where the forward of the model itself or the loss function decides by values, one operator calls that code once more,
after all modules have run, and answers its calls of modules with what these returned in the program. So no parameter of
a module is gathered for it.

A trace does not know the values by which code decides. Before a module is called it may decide only whether it fails,
as ``if labels.max() >= self.classes: raise ValueError`` does: the trace goes on where it does not. Nor may it draw
random numbers before, because the second call would draw others, or use tensors of the modules itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zeroir.errors import UserError
from zeroir.frontend.capture.python_state import random_generators
from zeroir.frontend.opaque.structure import OwnCodeError

_NO_CALL: Final = "no module"
"""Stands for the name of a module where none is called."""

_NOT_USERS: Final = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_MOST_QUESTIONS: Final = 16


def names_of_called(model: nn.Module, *, is_loss: bool) -> dict[int, str]:
    """Return the names of the modules that the code may call, by the ids of their attributes."""
    # The user's frozen modules share the attributes of those that are traced.
    modules = model.named_modules(remove_duplicate=False)
    return {id(vars(module)): name for name, module in modules if name or is_loss}


def tensors_of_called(model: nn.Module, *, is_loss: bool) -> dict[int, str]:
    """Return the names of the parameters and buffers of these modules, by id, without those of the code's own model."""
    every = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    own = () if is_loss else [id(tensor) for name, tensor in every.items() if "." not in name]
    return {id(tensor): name for name, tensor in every.items() if id(tensor) not in own}


@dataclass(slots=True)
class NotedCalls:
    """The calls of modules by some code: the name of each, and what it returned.

    ``failure`` is the exception of one that failed, which is no matter of the code that calls it.
    """

    names: list[str] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    failure: Exception | None = None


def _getter(name: str) -> object:
    """Return what torch calls an attribute of tensors in a mode."""
    return getattr(Tensor, name).__get__


class _NextQuestion(BaseException):
    """The code asks for values of a tensor, and has no answer."""


class _Answers(TorchFunctionMode):
    """A mode that answers whether tensors are true, in the order of the questions."""

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__()
        self._remaining = iter(answers)
        self.is_paused = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func``, or answer."""
        # In a trace torch asks for the item of what an ``if`` asks for.
        is_question = func is Tensor.__bool__ or (func is Tensor.item and _is_bool(args[0]))
        if not is_question or self.is_paused:
            return func(*args, **(kwargs or {}))
        known: object = None
        with suppress(Exception):  # whatever torch raises in a trace
            known = func(*args)
        if isinstance(known, bool):
            return known
        for answer in self._remaining:
            return answer
        raise _NextQuestion


def _is_bool(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype is torch.bool


@dataclass(slots=True, kw_only=True)
class CallsOfCode:
    """Traces the modules that some code calls, the names of which are ``names`` by the ids of their attributes.

    ``run`` calls the code, from the same state each time. After each call of a module ``keep`` keeps what the trace has
    learnt. ``sites`` reads, or sets, how many random numbers the trace has drawn.
    """

    run: Callable[[], object]
    place: str
    names: Mapping[int, str]
    keep: Callable[[], None]
    sites: Callable[[int | None], int]
    noted: NotedCalls = field(default_factory=NotedCalls)
    random_before: str = ""
    _sites: list[int] = field(default_factory=list)
    _first_site: int = 0
    _generators: Mapping[str, object] = field(default_factory=dict)

    def trace(self) -> NotedCalls:
        """Return the calls of modules, in order, with their results.

        Raises:
            Exception: that of a module.
            UserError: where values decide which modules are called.
            OwnCodeError: where random numbers are drawn before.
        """
        self._generators = random_generators()
        self._first_site = self.sites(None)
        answers: list[bool] = []
        while self._asks(answers):
            before = len(self.noted.names)
            outcomes = {answer: self._fails([*answers, answer]) for answer in (False, True)}
            going_on = [answer for answer, fails in outcomes.items() if not fails]
            if len(going_on) == 1 and len(answers) < _MOST_QUESTIONS:
                answers += going_on
                continue
            if len(self.noted.names) > before:
                raise UserError(f"{self.place} calls modules, or does not, as values decide.")
            break
        if self.random_before:
            raise OwnCodeError(
                f"{self.place} draws random numbers before it calls {self.random_before}: draw them in a submodule, or "
                "give them with the batch."
            )
        self.sites(self._last_site)
        return self.noted

    @property
    def _last_site(self) -> int:
        """How many random numbers the trace has drawn after the last call of a module."""
        return self._sites[-1] if self._sites else self._first_site

    def _asks(self, answers: Sequence[bool]) -> bool:
        """Return whether the code asks for more than these answers."""
        try:
            with suppress(Exception), self._noting(answers):
                self.run()
        except _NextQuestion:
            return True
        finally:
            if self.noted.failure is not None:
                raise self.noted.failure
        return False

    def _fails(self, answers: Sequence[bool]) -> bool:
        """Return whether the code itself raises an exception after these answers, before it calls another module."""
        before = len(self.noted.names)
        try:
            with self._noting(answers):
                self.run()
        except _NextQuestion:
            return False
        except Exception as error:  # noqa: BLE001 - any error of the code
            if self.noted.failure is not None:
                raise self.noted.failure from None
            innermost = traceback.extract_tb(error.__traceback__)[-1].filename
            return len(self.noted.names) == before and not innermost.startswith(_NOT_USERS)
        return False

    @contextmanager
    def _noting(self, answers: Sequence[bool]) -> Iterator[None]:
        """Note the calls of modules within the block, unless they are inside another one or were noted before."""
        noted, plain = self.noted, nn.Module.__call__
        mode = _Answers(answers)
        number = 0

        def call(module: nn.Module, *args: object, **kwargs: object) -> object:
            nonlocal number
            name = self.names.get(id(vars(module)))
            if name is None or mode.is_paused:
                return plain(module, *args, **kwargs)
            if number < len(noted.names):
                self.sites(self._sites[number])
            else:
                if self.sites(None) != self._last_site or random_generators() != self._generators:
                    self.random_before = self.random_before or name or "the model"
                mode.is_paused = True
                try:
                    result = plain(module, *args, **kwargs)
                except Exception as failure:
                    noted.failure = failure
                    raise
                finally:
                    mode.is_paused = False
                self.keep()
                noted.names.append(name)
                noted.results.append(result)
                self._sites.append(self.sites(None))
                self._generators = random_generators()
            number += 1
            return noted.results[number - 1]

        with mock.patch.object(nn.Module, "__call__", call), mode:
            yield


def answered(
    code: Callable[..., object],
    model: nn.Module,
    called: Sequence[str],
    place: str,
    is_loss: bool,
    results: Sequence[object],
    *args: object,
    **kwargs: object,
) -> object:
    """Return what the code returns, whose calls of the modules ``called`` of a model return these results.

    The code is the loss function, if it ``is_loss``, or the model's own forward.

    Raises:
        UserError: if it calls other modules, or in another order.
        OwnCodeError: if it uses tensors of modules itself.
    """
    names = names_of_called(model, is_loss=is_loss)
    tensors = tensors_of_called(model, is_loss=is_loss)
    remaining = iter(zip(called, results, strict=True))
    plain = nn.Module.__call__

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        name = names.get(id(vars(module)))
        if name is None:
            return plain(module, *args, **kwargs)
        expected, result = next(remaining, (_NO_CALL, None))
        if name != expected:
            raise _other_call(place, name or "the model", expected or "the model")
        return result

    device = next((x.device for x in tree_leaves(results) if isinstance(x, Tensor)), _CPU)
    with mock.patch.object(nn.Module, "__call__", call), _Absent(tensors, place, device):
        value = code(*args, **kwargs)
    expected, _ = next(remaining, (_NO_CALL, None))
    if expected != _NO_CALL:
        raise _other_call(place, _NO_CALL, expected)
    return value


class _Absent(TorchFunctionMode):
    """A mode in which code knows the types of some tensors, by their ids, but not their values."""

    def __init__(self, names: Mapping[int, str], place: str, device: torch.device) -> None:
        super().__init__()
        self._names, self._place, self._device = names, place, device

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func``.

        Raises:
            OwnCodeError: if it uses the values of one.
        """
        kwargs = kwargs or {}
        name = next((n for x in tree_leaves((args, kwargs)) if (n := self._names.get(id(x)))), None)
        if name is None or func in _OF_TYPES:
            return func(*args, **kwargs)
        if func == _DEVICE:
            return self._device
        raise OwnCodeError(
            f"{self._place} uses {name} of a module itself, whose values it does not have: let a submodule use it."
        )


_CPU: Final = torch.device("cpu")
_DEVICE: Final = _getter("device")
_OF_TYPES: Final[frozenset[object]] = frozenset(
    {
        *map(_getter, ("shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
    }
)
"""What asks for no values of a tensor."""


def _other_call(place: str, name: str, expected: str) -> UserError:
    return UserError(
        f"{place} calls {name} where it called {expected} when the program was compiled: let it call the same modules "
        "for all values, or move what decides into a submodule."
    )
