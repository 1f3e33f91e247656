"""Finds out what a module returns whose code runs as it is, when the model around it is traced.

Its forward runs once: without values where it needs none, otherwise on numbers without meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import UserError
from zeroir.frontend.capture.node_facts import require_dtype
from zeroir.frontend.opaque.eager_forward import (
    EagerForward,
    Forward,
    ResultType,
    Returned,
    Structure,
    taken_apart,
)
from zeroir.frontend.source.source import explain
from zeroir.frontend.source.source_lines import line_of_error

T = TypeVar("T")


class CannotRunError(UserError):
    """The forward of a module cannot run as it is, as ``path`` names it."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueModule:
    """An opaque module of a model that is traced, by its name ``path``.

    ``traced`` is the one in that model, with its ``plain`` forward, and ``runs`` the one whose code runs. ``reason``
    says why it cannot be traced; it is empty where the user chose it.
    """

    path: str
    reason: str
    traced: nn.Module
    plain: Forward
    runs: nn.Module


class WhatItReturns(NamedTuple):
    """What a module returns: without tensors, the types of its results, and the inputs that it may change.

    ``results`` are the tensors that it returns, then those inputs.
    """

    returned: Structure
    results: tuple[ResultType, ...]
    may_change: tuple[int, ...]


def found_out(
    eager: EagerForward,
    module: OpaqueModule,
    inputs: Sequence[Tensor],
    trained: tuple[int, ...],
    mode: FakeTensorMode,
) -> WhatItReturns:
    """Run a module once, and return what it returns for inputs of these types, some of which are ``trained``.

    Raises:
        CannotRunError: if the module's code fails, or returns what no program holds.
    """
    place = f"the code of the module {eager.path}"
    try:
        # Modes of the trace are those of its thread.
        with ThreadPoolExecutor(1) as thread:
            returned = thread.submit(_run_once, eager, module, inputs, trained, mode)
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
    results = (
        *(_type_of(x, x.requires_grad) for x in tensors),
        *(_type_of(inputs[i], i in trained) for i in may_change),
    )
    return WhatItReturns(structure, results, tuple(may_change))


def _run_once(
    eager: EagerForward,
    module: OpaqueModule,
    inputs: Sequence[Tensor],
    trained: tuple[int, ...],
    mode: FakeTensorMode,
) -> tuple[Structure, list[Tensor], frozenset[int]]:
    """Return what a module returns, its tensors, and the positions of the inputs that it changes.

    Raises:
        UserError: if numbers among its results depend on tensors.
    """
    types = [(tuple(x.shape), x.dtype) for x in inputs]
    values = _values(eager, module.runs)

    def taken(returned: Returned) -> tuple[Structure, list[Tensor], frozenset[int]]:
        structure, tensors = taken_apart(returned.values, eager.place, "returns")
        return structure, tensors, frozenset(returned.changed)

    def run(numbers: Sequence[Tensor]) -> tuple[Structure, list[Tensor], frozenset[int]]:
        own = enumerate(eager.own)
        every = frozenset(range(len(numbers))) - {i for i, each in own if each.is_parameter}
        return eager.run(module.traced, module.plain, numbers, 0, trained, every, taken)

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
        tried = [_tried(run_on, 0)]
        if isinstance(tried[0], Exception) or any(
            type(x) in (int, float) for x in tried[0][0].leaves
        ):
            tried += [_tried(run_on, integer) for integer in (1, 2)]
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
