"""The samples of torch's own tests: calls of one operator or module with example arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tools import torch_samples

MOST_DRAWN = 400
"""The most samples of one operator that are judged; a few operators have thousands."""

UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators whose results are arbitrary contents of memory."""

OTHERWISE_DERIVED = frozenset({"masked.prod", "prod"})
"""Operators for whose derivative torch chooses a formula according to the values."""

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A call with ``tensors`` among its arguments: ``call(module, tensors)``.

    ``make`` builds the module; without it an operator is called, and the module is None.
    """

    name: str
    tensors: tuple[Tensor, ...]
    call: Callable[[nn.Module | None, tuple[Tensor, ...]], object]
    make: Callable[[], nn.Module] | None = None


class _SampleInput(Protocol):
    """A call ``op(input, *args, **kwargs)``; ``output_process_fn_grad`` returns the part of the result to compare."""

    input: object
    args: Sequence[object]
    kwargs: Mapping[str, object]
    output_process_fn_grad: Callable[[object], object]


class _OpInfo(Protocol):
    """An entry of ``op_db``."""

    name: str
    variant_test_name: str
    op: Callable[..., object]

    def supported_dtypes(self, device: str) -> Collection[torch.dtype]: ...

    def sample_inputs(
        self, device: str, dtype: torch.dtype, *, requires_grad: bool
    ) -> Iterable[_SampleInput]: ...


class _Arguments(Protocol):
    args: Sequence[object]
    kwargs: Mapping[str, object]


class _ModuleInput(Protocol):
    constructor_input: _Arguments
    forward_input: _Arguments | None


class _ModuleInfo(Protocol):
    """An entry of ``module_db``."""

    name: str
    module_cls: type[nn.Module]
    module_inputs_func: Callable[..., Iterable[_ModuleInput]]


@cache
def subjects() -> dict[str, Callable[[], Iterator[Sample]]]:
    """Functions that make the samples, by subject: ``op addmm``, ``op norm.nuc``, ``module nn.Linear``."""
    makers: dict[str, Callable[[], Iterator[Sample]]] = {}
    for op in cast("Sequence[_OpInfo]", torch_samples.operators()):
        variant = f".{op.variant_test_name}" if op.variant_test_name else ""
        makers[f"op {op.name}{variant}"] = partial(_of_operator, op)
    for module in cast("Sequence[_ModuleInfo]", torch_samples.modules()):
        makers[f"module {module.name}"] = partial(_of_module, module)
    return makers


def chosen(name: str, most: int) -> list[Sample]:
    """At most ``most`` samples of one subject, spread evenly over all."""
    torch.manual_seed(0)
    drawn = list(islice(subjects()[name](), MOST_DRAWN))
    count = min(most, len(drawn))
    return [drawn[i * len(drawn) // count] for i in range(count)]


def _of_operator(op: _OpInfo) -> Iterator[Sample]:
    supported = op.supported_dtypes("cpu")
    dtype = next((dtype for dtype in _DTYPES if dtype in supported), None)
    if dtype is None:
        return
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        yield _sample(op.name, arguments, partial(_called, op.op, sample.output_process_fn_grad))


def _called(
    function: Callable[..., object],
    process: Callable[[object], object],
    _: nn.Module | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    return process(function(*args, **kwargs))


def _of_module(info: _ModuleInfo) -> Iterator[Sample]:
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for sample in samples:
        arguments = sample.forward_input
        if arguments is not None:
            make = partial(_constructed, info.module_cls, sample.constructor_input)
            yield _sample(info.name, (arguments.args, arguments.kwargs), _forward, make)


def _constructed(kind: type[nn.Module], arguments: _Arguments) -> nn.Module:
    return kind(*arguments.args, **arguments.kwargs).train()


def _forward(
    module: nn.Module | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    assert module is not None
    return module(*args, **kwargs)


def _sample(
    name: str,
    arguments: tuple[Sequence[object], Mapping[str, object]],
    call: Callable[[nn.Module | None, Sequence[object], Mapping[str, object]], object],
    make: Callable[[], nn.Module] | None = None,
) -> Sample:
    leaves, spec = pytree.tree_flatten(arguments)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def with_tensors(module: nn.Module | None, tensors: tuple[Tensor, ...]) -> object:
        replaced = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            replaced[position] = tensor
        args, kwargs = pytree.tree_unflatten(replaced, spec)
        return call(module, args, kwargs)

    tensors = tuple(leaves[position].detach() for position in positions)
    return Sample(name=name, tensors=tensors, call=with_tensors, make=make)
