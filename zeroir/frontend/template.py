"""The joint graph of one tape: what every call of an equal block adds to the joint graph of the model."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.frontend._torch_private import (
    FunctionGraph,
    annotated,
    function_graph,
    is_backward,
    is_gradient_sum,
    whole_operators,
)
from zeroir.frontend.block_calls import Kind, Tape, UnfitError, filled, kind_of, refs_in
from zeroir.frontend.block_recording import Recording, tensors_in
from zeroir.frontend.relative import is_beyond
from zeroir.ir.buffers import span_numel
from zeroir.torch_ops.neutral import NeutralOps

aten = torch.ops.aten


@dataclass(slots=True, kw_only=True, eq=False)
class Template:
    """Forward and backward of a tape, traced once.

    The graph's inputs are the tape's tensors from outside and the seeds; ``seeds`` are the nodes that take the seed
    of each dropout. ``nodes`` are its operators, those of the backward marked; the note of each is the number of its
    step. ``tangents`` are what the backward expects of the outputs' gradients, None where there is none;
    ``gradients`` what it yields for each tensor from outside.
    """

    tape: Tape
    graph: FunctionGraph
    nodes: tuple[fx.Node, ...]
    is_backward: dict[fx.Node, bool]
    outputs: tuple[fx.Node, ...]
    seeds: dict[fx.Node, int]
    tangents: tuple[Kind | None, ...]
    gradients: tuple[Kind | None, ...]
    is_sum: tuple[bool, ...]

    def fits(self, recording: Recording) -> bool:
        """Whether a call adds its gradients when and in the order in which the model's own graph would.

        Gradients of one tensor are added in the reverse order of its uses, each as soon as it is there. So a block
        has to be the last user of what it takes; parameters it may share, whose gradients are added elsewhere, but
        not where it adds several of its own to what is there.
        """
        return all(
            is_last or gradient is None or (is_leaf and not is_sum)
            for is_last, is_leaf, gradient, is_sum in zip(
                recording.is_last_user, recording.is_leaf, self.gradients, self.is_sum, strict=True
            )
        )


def make_template(tape: Tape, mode: FakeTensorMode) -> Template:
    """Trace a tape.

    Raises:
        UnfitError: where what is traced is not what the tape says.
        Exception: whatever torch raises at what it cannot trace by itself, such as changes to a leaf.
    """
    with mode:
        inputs = [_fresh(kind) for kind in tape.outside]
        inputs.append(torch.empty(max(tape.sites, 1), dtype=torch.int64))
    player = _Player(tape)
    graph = function_graph(mode, player, inputs)
    if player.sites != tape.sites:
        raise UnfitError("another number of dropouts")
    seeds = {
        node: int(str(node.args[2]))
        for node in graph.inputs[-1].users
        if node.target is aten.slice.Tensor
    }
    if len(seeds) != len(graph.inputs[-1].users):
        raise UnfitError("another use of the seeds than dropout's")
    nodes = tuple(node for node in graph.module.graph.nodes if node.op == "call_function")
    if any(is_beyond(node) is not None for node in nodes):
        raise UnfitError("a strided view of more than the block is given")
    return Template(
        tape=tape,
        graph=graph,
        nodes=nodes,
        is_backward={node: is_backward(_operator_of(node)) for node in nodes},
        outputs=tuple(_cloned(node) for node in graph.outputs),
        seeds=seeds,
        tangents=tuple(_kind(node) for node in graph.tangents),
        gradients=tuple(_kind(node) for node in graph.gradients[:-1]),
        is_sum=tuple(_is_sum(node) for node in graph.gradients[:-1]),
    )


class _Player(nn.Module):
    """A tape as a function of the tensors from outside and the seeds; it returns copies of the tape's outputs."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.sites = 0
        self._tape = tape
        self._at = 0

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tape = self._tape
        values: list[Tensor] = []

        def tensor(index: int) -> Tensor:
            return values[index] if index >= 0 else inputs[-1 - index]

        mode = NeutralOps(inputs[-1], lambda function: annotated(function, lambda: self._at))
        with whole_operators(), mode:
            for self._at, step in enumerate(tape.steps):
                if not refs_in((step.args, step.kwargs, step.result)):
                    continue
                args, kwargs = filled(step.args, tensor), filled(step.kwargs, tensor)
                assert isinstance(args, tuple)
                assert isinstance(kwargs, dict)
                with torch.set_grad_enabled(step.has_grad):
                    result = step.function(*args, **kwargs)
                for index, made in zip(refs_in(step.result), tensors_in(result), strict=True):
                    if index == len(values):
                        values.append(made)
                        if kind_of(made) != tape.made[index]:
                            raise UnfitError("a result of another kind")
        self.sites = mode.sites
        found = tuple(values[index].clone() for index in tape.outputs)
        if [kind_of(x) for x in found] != [tape.made[index] for index in tape.outputs]:
            raise UnfitError("an output with gaps")
        return found


def _fresh(kind: Kind) -> Tensor:
    span = kind.offset + span_numel(kind.shape, kind.stride)
    made = torch.empty(span, dtype=kind.dtype).as_strided(kind.shape, kind.stride, kind.offset)
    return made.requires_grad_(kind.requires_grad)


def _operator_of(node: fx.Node) -> fx.Node:
    """The node itself, or the one of whose results it is one."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _cloned(node: fx.Node) -> fx.Node:
    """What an output is a copy of."""
    if node.target is not aten.clone.default:
        raise UnfitError("an output that is no copy")
    (source,) = node.all_input_nodes
    return source


def _kind(node: fx.Node | None) -> Kind | None:
    return None if node is None else kind_of(node.meta["val"])


def _is_sum(node: fx.Node | None) -> bool:
    while node is not None and node.target in (aten.alias.default, aten.detach.default):
        (node,) = node.all_input_nodes
    return node is not None and is_gradient_sum(node)
