"""Torch's own samples: the one place that looks into ``torch.testing._internal``, which torch does not promise to keep.

A sample is a call of one operator or module with example arguments, as torch's tests make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MOST_DRAWN = 400
"""Samples of one operator that are looked at; a few have thousands."""

UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators whose results are what memory happens to hold."""

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A call: ``make`` gives the module to call, and None where ``function`` is called as it stands.

    The call is ``function(module, *arguments)``, whose tensors are ``tensors`` in pytree order.
    """

    name: str
    tensors: tuple[Tensor, ...]
    call: Callable[[nn.Module | None, tuple[Tensor, ...]], object]
    make: Callable[[], nn.Module] | None = None


@cache
def subjects() -> dict[str, Callable[[], Iterator[Sample]]]:
    """What there are samples of: ``op addmm``, ``op norm.nuc`` and ``module nn.Linear`` to what makes them."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    found: dict[str, Callable[[], Iterator[Sample]]] = {}
    for op in op_db:
        variant = f".{op.variant_test_name}" if op.variant_test_name else ""
        found[f"op {op.name}{variant}"] = _of_operator(op)
    for module in module_db:
        found[f"module {module.name}"] = _of_module(module)
    return found


def chosen(name: str, most: int) -> list[Sample]:
    """So many samples of one subject, spread evenly over those that there are."""
    torch.manual_seed(0)
    drawn = list(islice(subjects()[name](), MOST_DRAWN))
    count = min(most, len(drawn))
    return [drawn[i * len(drawn) // count] for i in range(count)]


def _of_operator(op: Any) -> Callable[[], Iterator[Sample]]:
    def samples() -> Iterator[Sample]:
        offered = op.supported_dtypes("cpu")
        dtype = next((one for one in _DTYPES if one in offered), None)
        if dtype is None:
            return
        for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
            process = sample.output_process_fn_grad

            def call(_: nn.Module | None, given: Any, process: Any = process) -> object:
                first, args, kwargs = given
                return process(op.op(first, *args, **kwargs))

            yield _sample(op.name, (sample.input, sample.args, sample.kwargs), call)

    return samples


def _of_module(info: Any) -> Callable[[], Iterator[Sample]]:
    def samples() -> Iterator[Sample]:
        made: Iterable[Any] = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        for inputs in made:
            given = inputs.forward_input
            if given is None:
                continue
            built = inputs.constructor_input

            def make(built: Any = built) -> nn.Module:
                module: nn.Module = info.module_cls(*built.args, **built.kwargs)
                return module.train()

            def call(module: nn.Module | None, given: Any) -> object:
                assert module is not None
                args, kwargs = given
                return module(*args, **kwargs)

            yield _sample(info.name, (given.args, given.kwargs), call, make)

    return samples


def _sample(
    name: str,
    arguments: object,
    call: Callable[[nn.Module | None, Any], object],
    make: Callable[[], nn.Module] | None = None,
) -> Sample:
    leaves, spec = pytree.tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def with_tensors(module: nn.Module | None, tensors: tuple[Tensor, ...]) -> object:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return call(module, pytree.tree_unflatten(given, spec))

    tensors = tuple(leaves[place].detach() for place in places)
    return Sample(name=name, tensors=tensors, call=with_tensors, make=make)
