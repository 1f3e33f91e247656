"""Traces a recorded forward with one node in the joint graph for each call of an equal block, which is traced once.

The recorded calls of torch functions are repeated on the tracer's tensors. For a block with a block graph, one operator
returns the block's outputs instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.frontend._torch_private import (
    Function,
    annotated,
    whole_where_different,
)
from zeroir.frontend._torch_sizes import torch_sizes
from zeroir.frontend.capture.blocks.calls import (
    CallSequence,
    TensorKind,
    UnrecordableError,
    kind_of,
)
from zeroir.frontend.capture.blocks.graph import BlockGraph, make_block_graph
from zeroir.frontend.capture.blocks.recording import BlockCall, ForwardRecording
from zeroir.frontend.capture.node_origins import NodeOrigin, OriginTracker
from zeroir.torch_ops.neutral import NeutralOps


@dataclass(slots=True)
class ReusePlan:
    """A recorded forward, and the block graphs of its calls of blocks by index.

    ``mismatches`` are the indices of the calls whose outputs got gradients of other kinds than their block graph
    expects.
    """

    recording: ForwardRecording
    mode: FakeTensorMode
    graphs: dict[int, BlockGraph]
    mismatches: set[int] = field(default_factory=set)
    _at: int = 0

    @property
    def reused_blocks(self) -> tuple[str, ...]:
        """The blocks whose calls are not traced one by one, in the order of the calls."""
        return tuple(self.recording.block_calls[index].block for index in sorted(self.graphs))

    def origins(self, index: int) -> tuple[NodeOrigin, ...]:
        """Return the origins of the calls of torch functions in a call of a block."""
        call = self.recording.block_calls[index]
        return tuple(made.origin for made in self.recording.calls[call.start : call.stop])

    def drop_mismatches(self) -> None:
        """Trace the mismatched calls one by one from now on."""
        for index in self.mismatches:
            del self.graphs[index]
        self.mismatches.clear()

    def repeat(
        self, outside: Sequence[Tensor], seeds: Tensor, tracker: OriginTracker
    ) -> tuple[Tensor, ...]:
        """Repeat the forward on other inputs and tensors of the model; return its results.

        Raises:
            UnrecordableError: if a call does something else than when it was recorded.
        """

        def origin() -> NodeOrigin:
            recorded = self.recording.calls[self._at].origin
            # Only the model's own autograd functions have lines now.
            return replace(recorded, source=tracker.line() or recorded.source)

        def around(function: Function) -> Function:
            return annotated(whole_where_different(function), origin)

        recording = self.recording
        values = {-1 - at: x for at, x in enumerate([*outside, *recording.constants])}
        starts = {recording.block_calls[index].start: index for index in self.graphs}
        self._at = 0
        with NeutralOps(seeds, around) as neutral:
            while self._at < len(recording.calls):
                if (index := starts.get(self._at)) is None:
                    recording.calls[self._at].repeat(values, recording.kinds)
                    self._at += 1
                else:
                    self._add_block(index, values, neutral)
                    self._at = recording.block_calls[index].stop
        return tuple(values[number] for number in recording.results)

    def _add_block(self, index: int, values: dict[int, Tensor], neutral: NeutralOps) -> None:
        """Add one node for a call of a block with a block graph."""
        call, graph = self.recording.block_calls[index], self.graphs[index]
        sequence = graph.sequence
        inputs = [values[number] for number in call.inputs]
        seeds = [neutral.seed() for _ in range(sequence.sites)]
        with torch._C.DisableTorchFunction():
            outputs = _BlockFunction.apply(self, index, graph, *inputs, *seeds)  # type: ignore[no-untyped-call]
        kinds = [*sequence.inputs, *(sequence.results[number] for number in sequence.outputs)]
        if [kind_of(x) for x in (*inputs, *outputs)] != kinds:
            raise UnrecordableError("another tensor than in the recorded forward")
        values.update(zip(call.outputs, outputs, strict=True))


def make_plan(recording: ForwardRecording, mode: FakeTensorMode, minimum: int) -> ReusePlan:
    """Create one block graph for all equal calls, where there are at least ``minimum`` of them."""
    groups: dict[object, tuple[CallSequence, list[int]]] = {}
    for index, call in enumerate(recording.block_calls):
        if call.sequence is not None:
            groups.setdefault(call.sequence.key(), (call.sequence, []))[1].append(index)
    graphs: dict[int, BlockGraph] = {}
    for sequence, members in groups.values():
        if len(members) < minimum:
            continue
        try:
            graph = make_block_graph(sequence, mode)
        except Exception:  # noqa: BLE001 - the capture of the whole model reports any error with its line
            continue
        fitting = [at for at in members if _keeps_gradient_order(recording.block_calls[at], graph)]
        graphs.update(dict.fromkeys(fitting, graph))
    return ReusePlan(recording, mode, graphs)


def _keeps_gradient_order(call: BlockCall, graph: BlockGraph) -> bool:
    """Return whether a call adds gradients in the same order as the model's own graph would.

    Autograd adds the gradients of one tensor in the reverse order of its uses, each as soon as it exists. So a block
    has to be the last user of each of its inputs. Parameters may be shared, because their gradients are added
    elsewhere, unless the block adds several gradients of its own to the existing one.
    """
    return all(
        is_last or gradient is None or (is_leaf and not is_sum)
        for is_last, is_leaf, gradient, is_sum in zip(
            call.is_last_user, call.is_leaf, graph.gradients, graph.is_sum, strict=True
        )
    )


@torch.library.custom_op("zeroir::block", mutates_args=())
def block(
    inputs: Sequence[Tensor], instance: int, results: str, sizes: Sequence[int]
) -> list[Tensor]:
    """Return the outputs of a block's forward; the operator occurs only in joint graphs, until they are read.

    ``results`` spells their dtypes and numbers of dimensions, and ``sizes`` are the shape and the strides of each.
    """
    raise NotImplementedError


@torch.library.custom_op("zeroir::block_backward", mutates_args=())
def block_backward(
    tangents: Sequence[Tensor], instance: int, results: str, sizes: Sequence[int]
) -> list[Tensor]:
    """Return the gradients of the block's inputs that have one."""
    raise NotImplementedError


@block.register_fake
@block_backward.register_fake
def _(tensors: Sequence[Tensor], _: int, results: str, sizes: Sequence[int]) -> list[Tensor]:
    made: list[Tensor] = []
    at = 0
    for dtype, rank in json.loads(results):
        shape, stride = sizes[at : at + rank], sizes[at + rank : at + 2 * rank]
        at += 2 * rank
        kind = getattr(torch, dtype)
        made.append(torch.empty_strided(shape, stride, dtype=kind, device=tensors[0].device))
    return made


def _described(
    kinds: Sequence[TensorKind], mode: FakeTensorMode
) -> tuple[str, list[int | torch.SymInt]]:
    """Return the last two arguments of ``block`` for results of these kinds."""
    text = json.dumps([(str(k.dtype).removeprefix("torch."), len(k.shape)) for k in kinds])
    return text, torch_sizes((size for k in kinds for size in (*k.shape, *k.stride)), mode)


class _BlockFunction(torch.autograd.Function):
    """One autograd node for a whole block."""

    @staticmethod
    def forward(
        ctx: _BlockContext, plan: ReusePlan, at: int, graph: BlockGraph, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        sequence = graph.sequence
        kinds = [sequence.results[index] for index in sequence.outputs]
        outputs = block(inputs, at, *_described(kinds, plan.mode))
        ctx.plan, ctx.at, ctx.graph = plan, at, graph
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for x, kind in zip(outputs, kinds, strict=True) if not kind.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _BlockContext, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        graph = ctx.graph
        if [None if x is None else kind_of(x) for x in tangents] != [
            None if kind is None else _without_grad(kind) for kind in graph.tangents
        ]:
            ctx.plan.mismatches.add(ctx.at)
        kinds = [kind for kind in graph.gradients if kind is not None]
        present = [x for x in tangents if x is not None]
        gradients = iter(block_backward(present, ctx.at, *_described(kinds, ctx.plan.mode)))
        by_input = [None if kind is None else next(gradients) for kind in graph.gradients]
        seeds = [None] * graph.sequence.sites
        return (None, None, None, *by_input, *seeds)


class _BlockContext(torch.autograd.function.FunctionCtx):
    plan: ReusePlan
    at: int
    graph: BlockGraph


def _without_grad(kind: TensorKind) -> TensorKind:
    return TensorKind(kind.dtype, kind.shape, kind.stride, kind.offset, False)
