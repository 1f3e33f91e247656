"""Trace a model with one node in the joint graph for each call of an equal block, whose own graph is traced once.

The model's own Python code runs as always. Inside a block that has a block graph, each call of a torch function is
compared with the recorded call sequence and answered with the recorded tensors; when the block's forward ends, one
operator yields the block's outputs for the rest of the model. Where a call differs, the capture begins again without
block graphs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from zeroir.frontend._torch_private import Function, autograd_functions_replaced
from zeroir.frontend.block_calls import (
    CallSequence,
    TensorKind,
    TensorRef,
    UnrecordableError,
    are_same,
    filled,
    is_call_of,
    kind_of,
    mapped,
    refs_in,
)
from zeroir.frontend.block_graph import BlockGraph, make_block_graph
from zeroir.frontend.block_recording import BlockCall, tensors_in
from zeroir.frontend.node_origins import NodeOrigin, OriginTracker
from zeroir.torch_ops.neutral import NeutralOps


class DivergedError(Exception):
    """A model does something else than in the recorded forward."""


@dataclass(slots=True)
class PlannedBlockCall:
    """One call of a block; with a block graph, ``origins`` are those of the calls of torch functions in it."""

    recorded: BlockCall
    graph: BlockGraph | None
    origins: list[NodeOrigin] = field(default_factory=list)


@dataclass(slots=True)
class ReusePlan:
    """The calls of blocks in order; a node of the joint graph refers to a call by its index here.

    ``mismatches`` are the indices of the calls whose outputs got gradients of other kinds than their block graph
    expects.
    """

    block_calls: list[PlannedBlockCall]
    has_diverged: bool = False
    mismatches: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether no call has a block graph."""
        return all(call.graph is None for call in self.block_calls)

    def drop_mismatches(self) -> None:
        """Trace the mismatched calls one by one."""
        for at in self.mismatches:
            self.block_calls[at].graph = None
        self.mismatches.clear()

    def diverged(self, why: str) -> DivergedError:
        """The error to raise; the plan remembers it, since the model may catch it."""
        self.has_diverged = True
        return DivergedError(why)


def make_plan(block_calls: Sequence[BlockCall], mode: FakeTensorMode, minimum: int) -> ReusePlan:
    """One block graph for all equal calls, where there are at least ``minimum`` of them."""
    groups: list[tuple[CallSequence, list[PlannedBlockCall]]] = []
    planned = [PlannedBlockCall(call, None) for call in block_calls]
    for call in planned:
        sequence = call.recorded.sequence
        if sequence is None:
            continue
        group = next((members for first, members in groups if first.equals(sequence)), None)
        if group is None:
            groups.append((sequence, [call]))
        else:
            group.append(call)
    for sequence, members in groups:
        if len(members) < minimum:
            continue
        try:
            graph = make_block_graph(sequence, mode)
        except Exception:  # noqa: BLE001 - the capture of the whole model reports any error with its line
            continue
        for member in members:
            if graph.fits(member.recorded):
                member.graph = graph
    return ReusePlan(planned)


@torch.library.custom_op("zeroir::block", mutates_args=())
def block(inputs: Sequence[Tensor], instance: int, results: str) -> list[Tensor]:
    """The outputs of a block's forward; this operator occurs in joint graphs only, until they are read."""
    raise NotImplementedError


@torch.library.custom_op("zeroir::block_backward", mutates_args=())
def block_backward(tangents: Sequence[Tensor], instance: int, results: str) -> list[Tensor]:
    """The gradients of those of the block's inputs that have one."""
    raise NotImplementedError


@block.register_fake
@block_backward.register_fake
def _(tensors: Sequence[Tensor], _: int, results: str) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=tensors[0].device)
        for dtype, shape, stride in json.loads(results)
    ]


def _described(kinds: Sequence[TensorKind]) -> str:
    return json.dumps(
        [(str(k.dtype).removeprefix("torch."), list(k.shape), list(k.stride)) for k in kinds]
    )


class _BlockFunction(torch.autograd.Function):
    """One autograd node for a whole block."""

    @staticmethod
    def forward(
        ctx: _Context, plan: ReusePlan, at: int, graph: BlockGraph, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        sequence = graph.sequence
        kinds = [sequence.results[index] for index in sequence.outputs]
        outputs = block(inputs, at, _described(kinds))
        ctx.plan, ctx.at, ctx.graph = plan, at, graph
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for x, kind in zip(outputs, kinds, strict=True) if not kind.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        graph = ctx.graph
        if [None if x is None else kind_of(x) for x in tangents] != [
            None if kind is None else _without_grad(kind) for kind in graph.tangents
        ]:
            ctx.plan.mismatches.add(ctx.at)
        kinds = [kind for kind in graph.gradients if kind is not None]
        present = [x for x in tangents if x is not None]
        gradients = iter(block_backward(present, ctx.at, _described(kinds)))
        by_input = [None if kind is None else next(gradients) for kind in graph.gradients]
        seeds = [None] * graph.sequence.sites
        return (None, None, None, *by_input, *seeds)


class _Context(torch.autograd.function.FunctionCtx):
    plan: ReusePlan
    at: int
    graph: BlockGraph


def _without_grad(kind: TensorKind) -> TensorKind:
    return TensorKind(kind.dtype, kind.shape, kind.stride, kind.offset, False)


class BlockReplacer(TorchFunctionMode):
    """A mode for one forward of a model that replaces each call of a block that has a block graph by one node."""

    def __init__(self, plan: ReusePlan, neutral: NeutralOps, tracker: OriginTracker) -> None:
        super().__init__()
        self._plan = plan
        self._neutral = neutral
        self._tracker = tracker
        self._next = 0
        # The block that is running, and the numbers of the tensors that it has used.
        self._current: PlannedBlockCall | None = None
        self._numbers: dict[int, int] = {}
        self._inputs: list[Tensor] = []
        # The joint graph's tensor for each recorded tensor that was handed to the model, by id.
        self._traced: dict[int, Tensor] = {}
        self._recorded = {id(x) for call in plan.block_calls for x in call.recorded.values}

    def enter(self, block: str) -> None:
        """A block's forward begins."""
        if self._current is not None:
            raise self._plan.diverged("a block calls a block")
        if self._next >= len(self._plan.block_calls):
            raise self._plan.diverged("there are more calls of blocks")
        call = self._plan.block_calls[self._next]
        self._next += 1
        if call.recorded.block != block:
            raise self._plan.diverged("blocks are called in another order")
        if call.graph is None:
            return
        self._current = call
        call.origins = []
        self._numbers = {id(x): number for number, x in enumerate(call.recorded.values)}
        self._inputs = []

    def leave(self, block: str) -> None:
        """A block's forward has ended: one node yields its outputs."""
        call = self._current
        if call is None:
            return
        self._current = None
        graph = call.graph
        assert graph is not None
        sequence = graph.sequence
        if call.recorded.block != block or len(call.origins) != len(sequence.calls):
            raise self._plan.diverged("a block does less")
        seeds = [self._neutral.seed() for _ in range(sequence.sites)]
        with torch._C.DisableTorchFunction():
            outputs = _BlockFunction.apply(  # type: ignore[no-untyped-call]
                self._plan, self._next - 1, graph, *self._inputs, *seeds
            )
        for index, tensor in zip(sequence.outputs, outputs, strict=True):
            if kind_of(tensor) != sequence.results[index]:
                raise self._plan.diverged("a block's output is of another kind")
            self._traced[id(call.recorded.values[index])] = tensor

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer a call inside a block from its call sequence; make any other call on traced tensors."""
        named_args = dict(kwargs or {})
        if self._plan.has_diverged:
            # The model's context managers undo their changes while the error unwinds the stack.
            return func(*args, **named_args)
        if self._current is not None:
            return self._answer(self._current, func, args, named_args)
        args, named_args = self._with_traced(args), self._with_traced(named_args)  # type: ignore[assignment]
        result = func(*args, **named_args)
        if result is None or tensors_in(result):
            self._require_traced((args, named_args))
        return result

    def autograd_functions(self) -> AbstractContextManager[None]:
        """Give autograd functions of the model's own, which are not torch functions, the traced tensors, too."""

        def apply(original: Function, cls: type, /, *args: object, **kwargs: object) -> object:
            if cls is _BlockFunction or self._plan.has_diverged:
                return original(cls, *args, **kwargs)
            if self._current is not None:
                raise self._plan.diverged("a block calls an autograd function of its own")
            args, kwargs = self._with_traced(args), self._with_traced(kwargs)  # type: ignore[assignment]
            self._require_traced((args, kwargs))
            return original(cls, *args, **kwargs)

        return autograd_functions_replaced(apply)

    def _require_traced(self, value: object) -> None:
        if any(id(x) in self._recorded for x in tensors_in(value)):
            raise self._plan.diverged("another tensor of a block is used after it")

    def _with_traced(self, value: object) -> object:
        if not any(id(x) in self._traced for x in tensors_in(value)):
            return value
        try:
            return mapped(value, lambda x: self._traced.get(id(x), x))
        except UnrecordableError as error:
            raise self._plan.diverged(str(error)) from None

    def _answer(
        self,
        current: PlannedBlockCall,
        func: Function,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        assert current.graph is not None
        sequence = current.graph.sequence
        if len(current.origins) == len(sequence.calls):
            raise self._plan.diverged("a block does more")
        call = sequence.calls[len(current.origins)]
        try:
            numbered_args = self._numbered(sequence, args)
            numbered_kwargs = self._numbered(sequence, kwargs)
        except UnrecordableError as error:
            raise self._plan.diverged(str(error)) from None
        is_recorded_call = is_call_of(call, func, numbered_args, numbered_kwargs)
        if not is_recorded_call or torch.is_grad_enabled() != call.has_grad:
            raise self._plan.diverged("a block does something else")
        current.origins.append(self._tracker.origin())
        if refs_in((call.args, call.kwargs, call.result)):
            values = current.recorded.values
            return filled(call.result, lambda i: values[i] if i >= 0 else self._inputs[-1 - i])
        # The call may change a setting, such as whether gradients are recorded.
        result = func(*args, **kwargs)
        if not are_same(result, call.result):
            raise self._plan.diverged("a call in a block returns another value")
        return result

    def _numbered(self, sequence: CallSequence, value: object) -> object:
        return mapped(value, lambda x: self._number(sequence, x))

    def _number(self, sequence: CallSequence, tensor: Tensor) -> TensorRef:
        traced = self._traced.get(id(tensor), tensor)
        number = self._numbers.get(id(traced))
        if number is None:
            count = len(self._inputs)
            if count == len(sequence.inputs) or kind_of(traced) != sequence.inputs[count]:
                raise UnrecordableError("another tensor from outside")
            number = self._numbers[id(traced)] = -1 - count
            self._inputs.append(traced)
        return TensorRef(number)
