"""The code that calls the model or its submodules runs as it is, while what it calls is traced.

Where the forward of the model itself or the loss function decides by values, one operator calls that code once more,
mostly after all modules have run, and answers its calls of modules with what these returned in the program. So no
parameter of a module is gathered for it.

A trace does not know the values by which code decides. It guesses that ``if labels.max() >= self.classes: raise`` is
false, goes on, and gives the operator what later modules are called with, too: at each step the code must call them
with equal tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zeroir.errors import UserError

NO_CALL: Final = "no module"
"""Stands for the name of a module where none is called."""

Given = tuple[tuple[object, ...], Mapping[str, object]] | None
"""What a module is called with after a guess; None before one."""


def names_of_called(model: nn.Module, *, is_loss: bool) -> dict[int, str]:
    """Return the names of the modules that the code may call, by the ids of their attributes."""
    # The user's frozen modules share the attributes of those that are traced.
    modules = model.named_modules(remove_duplicate=False)
    return {id(vars(module)): name for name, module in modules if name or is_loss}


@dataclass(slots=True)
class NotedCalls:
    """The calls of modules: the name of each, and what it is called with and returns.

    ``failure`` is the exception of one that failed, which is no matter of the code that calls it.
    """

    names: list[str] = field(default_factory=list)
    results: list[tuple[Given, object]] = field(default_factory=list)
    failure: Exception | None = None


class _Guesses(TorchFunctionMode):
    """A mode that answers whether a tensor is true where no values are known."""

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self._answer = answer
        self.is_paused = self.has_guessed = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func``, or guess."""
        # In a trace torch asks for the item of what an ``if`` asks for.
        is_question = func is Tensor.__bool__ or (func is Tensor.item and _is_bool(args[0]))
        if not is_question or self.is_paused:
            return func(*args, **(kwargs or {}))
        answer: object = None
        with suppress(Exception):  # whatever torch raises in a trace
            answer = func(*args)
        if isinstance(answer, bool):
            return answer
        self.has_guessed = True
        return self._answer


def _is_bool(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype is torch.bool


@contextmanager
def calls_noted(
    names: Mapping[int, str], keep: Callable[[], None], *, guess: bool
) -> Iterator[NotedCalls]:
    """Note each call of these modules within the block, unless it is inside another one, and ``keep`` after it.

    Where the code between these calls asks whether a tensor is true, ``guess`` is the answer.
    """
    noted = NotedCalls()
    plain = nn.Module.__call__
    guesses = _Guesses(guess)

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        name = names.get(id(vars(module)))
        if name is None or guesses.is_paused:
            return plain(module, *args, **kwargs)
        guesses.is_paused = True
        try:
            result = plain(module, *args, **kwargs)
        except Exception as failure:
            noted.failure = failure
            raise
        finally:
            guesses.is_paused = False
        noted.names.append(name)
        keep()
        noted.results.append(((args, kwargs) if guesses.has_guessed else None, result))
        return result

    with mock.patch.object(nn.Module, "__call__", call), guesses:
        yield noted


def answered(
    code: Callable[..., object],
    names: Mapping[int, str],
    called: Sequence[str],
    place: str,
    is_compared: bool,
    results: Sequence[tuple[Given, object]],
    *args: object,
    **kwargs: object,
) -> object:
    """Return what the code returns, whose calls of the modules ``called`` return these results.

    Raises:
        UserError: if it calls other modules, or in another order, or if it ``is_compared`` and calls one with other
            tensors than ``results`` have beside the result.
    """
    remaining = iter(zip(called, results, strict=True))
    plain = nn.Module.__call__

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        name = names.get(id(vars(module)))
        if name is None:
            return plain(module, *args, **kwargs)
        expected, (given, result) = next(remaining, (NO_CALL, (None, None)))
        if name != expected:
            raise _other_call(place, name or "the model", expected or "the model")
        if is_compared and given is not None and not _are_equal(given, (args, kwargs)):
            raise UserError(
                f"{place} calls {name or 'the model'} with other tensors than when the program was compiled, as its "
                "values decide: move what decides into a submodule."
            )
        return result

    with mock.patch.object(nn.Module, "__call__", call):
        value = code(*args, **kwargs)
    expected, _ = next(remaining, (NO_CALL, None))
    if expected != NO_CALL:
        raise _other_call(place, NO_CALL, expected)
    return value


def _are_equal(given: object, present: object) -> bool:
    """Return whether arguments have the same tensors, bit for bit, except zeros of either sign."""
    leaves, spec = pytree.tree_flatten(given)
    others, other_spec = pytree.tree_flatten(present)
    if spec != other_spec:
        return False
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            if leaf.shape != other.shape or leaf.dtype is not other.dtype:
                return False
            if not bool(((leaf == other) | ((leaf != leaf) & (other != other))).all()):
                return False
        elif isinstance(leaf, Tensor) or isinstance(other, Tensor) or repr(leaf) != repr(other):
            return False
    return True


def _other_call(place: str, name: str, expected: str) -> UserError:
    return UserError(
        f"{place} calls {name} where it called {expected} when the program was compiled: let it call the same modules "
        "for all values, or move what decides into a submodule."
    )
