"""Finds out what a module returns whose code runs as it is, when the model around it is traced.

Its forward runs without values where it needs none, otherwise on numbers without meaning: once for a batch of one
shape, and where sizes depend on dims for a few values of these, from which follow the sizes of its results. It runs
once more, with its backward, to count the memory that they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import UserError
from zeroir.frontend.capture.node_facts import require_dtype
from zeroir.frontend.opaque.eager_forward import (
    EagerForward,
    Forward,
    OwnTensor,
    ResultType,
    Returned,
    gradients_of,
)
from zeroir.frontend.opaque.fitted_sizes import Point, at_point, fitted, points_of
from zeroir.frontend.opaque.held_memory import HeldMemory
from zeroir.frontend.opaque.structure import (
    CannotRunError,
    OwnCodeError,
    Structure,
    common_structure,
)
from zeroir.frontend.source.source import capitalised, explain
from zeroir.frontend.source.source_lines import line_of_error
from zeroir.ir.size_bounds import grows
from zeroir.ir.sizes import Size
from zeroir.torch_ops.ranks import collective_error
from zeroir.workspace.scratch.allowance import SLACK_BYTES

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueModule:
    """An opaque module of a model that is traced, by its name ``path``.

    ``traced`` is the one in that model, with its ``plain`` forward and its ``own`` tensors, and ``runs`` the one whose
    code runs. ``reason`` says why it cannot be traced; it is empty where the user chose it.
    """

    path: str
    reason: str
    traced: nn.Module
    own: tuple[OwnTensor, ...]
    plain: Forward
    runs: nn.Module


def name_in_sentences(path: str) -> str:
    """Return what an opaque module is called."""
    return f"the module {path}" if path else "the model itself"


class InputType(NamedTuple):
    """The shape and dtype of an argument; sizes may be polynomials of dims."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ModuleResults(NamedTuple):
    """What a module returns: without tensors, the types of its results, and the inputs that it may change.

    ``results`` are the tensors that it returns, then those inputs. ``sizes`` are the sizes of the tensors, then the
    numbers that depend on dims. ``workspaces`` are the bytes that forward and backward hold at most beside operands and
    results, with a margin; None where that is unknown.
    """

    returned: Structure
    results: tuple[ResultType, ...]
    sizes: tuple[int, ...]
    may_change: tuple[int, ...]
    workspaces: tuple[int, int] | None


def results_of_module(
    eager: EagerForward,
    module: OpaqueModule,
    inputs: Sequence[InputType],
    sizes: Sequence[int],
    trained: tuple[int, ...],
    mode: FakeTensorMode,
) -> ModuleResults:
    """Run a module, and return what it returns for inputs of these types, some of which are ``trained``.

    ``sizes`` are those among its arguments that depend on dims, and ``mode`` is one without dims.

    Raises:
        CannotRunError: if the module's code fails, or returns what no program holds.
    """
    place = f"the code of {name_in_sentences(eager.path)}"
    trial = _Trial(eager, module, inputs, sizes, trained, mode)
    try:
        # Modes of the trace are those of its thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(trial.run).result()
    except OwnCodeError:
        raise
    except UserError as error:
        raise CannotRunError(eager.path, str(error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the module's code
        refusal = collective_error(error)
        if refusal is not None:
            text = f"{line_of_error(error) or capitalised(place)} {refusal}."
            raise CannotRunError(eager.path, text) from None
        sentence = explain(error, line_of_error(error), f"{place} cannot run as it is")
        raise CannotRunError(eager.path, sentence[0].upper() + sentence[1:]) from None


class _KindOfResult(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_differentiated: bool

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.stride)), key=lambda axis: -self.stride[axis]))


class _Results(NamedTuple):
    """What a module returned at one point, and the positions of the inputs that it changed."""

    structure: Structure
    tensors: list[_KindOfResult]
    changed: frozenset[int]


_MARGIN: Final = 2
"""Other values may take another path through the code, which holds more."""


@dataclass(slots=True)
class _Trial:
    """Runs a module without values or, where that fails, on numbers without meaning."""

    eager: EagerForward
    module: OpaqueModule
    inputs: Sequence[InputType]
    sizes: Sequence[int]
    trained: tuple[int, ...]
    mode: FakeTensorMode
    _needs_values: bool = False
    _integer: int = 0

    def run(self) -> ModuleResults:
        dims = {
            dim
            for size in (*self.sizes, *(size for each in self.inputs for size in each.shape))
            if isinstance(size, Size)
            for dim in size.dims
        }
        points = points_of(dims)
        found: list[tuple[Point, _Results]] = []
        for point in points:
            try:
                found.append((point, self._at(point)))
            except Exception:
                # Code may refuse the smallest batches.
                if point in (points[0], points[-1]):
                    raise
        place = self.eager.place
        structure, numbers = common_structure([each.structure for _, each in found], place)
        tensors = _alike([each.tensors for _, each in found], place)
        for tensor in tensors:
            require_dtype(tensor.dtype, f"The code of {name_in_sentences(self.eager.path)}")
        values = [
            [*(size for tensor in each.tensors for size in tensor.shape), *of_point]
            for (_, each), of_point in zip(found, numbers, strict=True)
        ]
        sizes = [
            _fitted([point for point, _ in found], of_size, place)
            for of_size in zip(*values, strict=True)
        ]
        for size in sizes[: sum(len(tensor.order) for tensor in tensors)]:
            if isinstance(size, Size) and not grows(size):
                raise UserError(
                    f"{place} returns a tensor of size {size}, which is negative or shrinks for some sizes of the "
                    "batch: narrow the dims."
                )
        statistics = (
            i for i, own in enumerate(self.eager.own) if own.is_statistic and self.eager.training[0]
        )
        may_change = sorted({*statistics, *(i for _, each in found for i in each.changed)})
        results = (
            *(ResultType(each.order, each.dtype, each.is_differentiated) for each in tensors),
            *(self._type_of_changed(i) for i in may_change),
        )
        return ModuleResults(
            returned=structure,
            results=results,
            sizes=tuple(sizes),
            may_change=tuple(may_change),
            workspaces=self._workspaces(*found[-1], frozenset(may_change)),
        )

    def _type_of_changed(self, number: int) -> ResultType:
        shape, dtype = self.inputs[number]
        return ResultType(tuple(range(len(shape))), dtype, number in self.trained)

    def _at(self, point: Point) -> _Results:
        """Return what the module returns where dims have these values.

        Raises:
            UserError: if numbers among its results depend on tensors.
        """
        own = enumerate(self.eager.own)
        every = frozenset(range(len(self.inputs))) - {i for i, each in own if each.is_parameter}

        def taken(returned: Returned) -> _Results:
            structure, tensors = returned.taken_apart(self.eager.place)
            return _Results(structure, [_type_of(x) for x in tensors], frozenset(returned.changed))

        def run_on(integer: int) -> _Results:
            self._integer = integer
            return self._run(point, self.trained, every, taken)

        if not self._needs_values:
            try:
                return self._run(point, self.trained, every, taken)
            except Exception:  # noqa: BLE001 - its code may need values
                self._needs_values = True
        # Integers may be the number for no word, or an index.
        tried = {0: _tried(run_on, 0)}
        first = tried[0]
        if isinstance(first, Exception) or any(
            type(x) in (int, float) for x in first.structure.leaves
        ):
            tried |= {integer: _tried(run_on, integer) for integer in (1, 2)}
        found = {i: each for i, each in tried.items() if not isinstance(each, Exception)}
        if not found:
            raise next(each for each in tried.values() if isinstance(each, Exception)) from None
        self._integer, first = next(iter(found.items()))
        if any(str(each.structure) != str(first.structure) for each in found.values()):
            place = self.eager.place
            raise UserError(
                f"{place} returns numbers that depend on the values of tensors."
            ) from None
        return first

    def _run(
        self,
        point: Point,
        trained: tuple[int, ...] | None,
        may_change: Set[int],
        use: Callable[[Returned], T],
        memory: HeldMemory | None = None,
    ) -> T:
        """Return what ``use`` makes of what forward returns where dims have these values."""
        module, sizes = self.module, [at_point(size, point) for size in self.sizes]
        with ExitStack() as stack:
            if not self._needs_values:
                stack.enter_context(self.mode)
            tensors = self._tensors(point)
            if memory is not None:
                stack.enter_context(memory)
            return self.eager.run(
                module.traced, module.plain, tensors, sizes, 0, trained, may_change, use
            )

    def _tensors(self, point: Point) -> list[Tensor]:
        shapes = [tuple(at_point(size, point) for size in each.shape) for each in self.inputs]
        dtypes = [each.dtype for each in self.inputs]
        if not self._needs_values:
            return [
                torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
        values = _values(self.eager, self.module.runs)
        return [
            values[i].to(dtype) if i in values else _without_meaning(shape, dtype, i, self._integer)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    def _workspaces(
        self, point: Point, found: _Results, may_change: Set[int]
    ) -> tuple[int, int] | None:
        """Return the bytes that forward and backward hold; None where the module's code fails in the backward."""
        shapes = [(each.shape, each.dtype) for each in self.inputs]
        copies = sum(
            math.prod(at_point(size, point) for size in shape) * max(dtype.itemsize, 4)
            for shape, dtype in (*shapes, *((each.shape, each.dtype) for each in found.tensors))
        )

        def backward(returned: Returned) -> None:
            _, tensors = returned.taken_apart(self.eager.place)
            ones = [torch.ones_like(x) for x in tensors]
            gradients_of(returned.leaves, tensors, ones, self.trained)

        def held(trained: tuple[int, ...] | None, use: Callable[[Returned], None]) -> int:
            memory = HeldMemory()
            self._run(point, trained, may_change, use, memory)
            return _MARGIN * memory.most_bytes + copies + SLACK_BYTES

        try:
            forward_bytes = held(None, lambda _: None)
            return forward_bytes, held(self.trained, backward) if self.trained else 0
        except UserError:
            raise
        except Exception:  # noqa: BLE001 - any error of the module's code
            return None


def _tried(run: Callable[[int], T], argument: int) -> T | Exception:
    try:
        return run(argument)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of the module's code
        return error


def _type_of(x: Tensor) -> _KindOfResult:
    stride = torch.empty_like(x, device="meta").stride()
    return _KindOfResult(tuple(x.shape), stride, x.dtype, x.requires_grad)


def _alike(found: Sequence[Sequence[_KindOfResult]], place: str) -> list[_KindOfResult]:
    """Return the types of several results, which differ in sizes alone.

    Raises:
        UserError: if they differ in something else.
    """
    first = found[0]
    for other in found:
        for one, another in zip(first, other, strict=True):
            if (len(one.shape), one.dtype) != (len(another.shape), another.dtype):
                raise UserError(
                    f"{place} returns {one.dtype}{[*one.shape]} for batches of one size and "
                    f"{another.dtype}{[*another.shape]} for others."
                )
    return [
        kind._replace(is_differentiated=any(each[i].is_differentiated for each in found))
        for i, kind in enumerate(first)
    ]


def _fitted(points: Sequence[Point], values: Sequence[int], place: str) -> int:
    size = fitted(points, values)
    if size is None:
        shown = ", ".join(
            f"{value} at {' and '.join(f'{dim.name} = {at}' for dim, at in point.items())}"
            for point, value in zip(points, values, strict=True)
        )
        raise UserError(
            f"{place} returns a size that is no polynomial of dims ({shown}): leave shapes out, or compute it outside "
            "of this module, in code that can be traced."
        )
    return size


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
