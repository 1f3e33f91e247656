"""The graph of a segment for a compiler: it fills, or adds to, destinations without other tensors of their size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.runtime.support import embedding_gradient, segment
from tests.support.programs import mlp
from zeroir.ir.ops import Compute, Mode
from zeroir.ir.segments.bindings import Binding, bindings
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.kernels import graph
from zeroir.runtime.kernels.eager import EagerKernels

CPU = torch.device("cpu")


def run_graph(
    of: Segment,
    bindings: Sequence[Binding | None],
    arguments: Sequence[Tensor],
    destinations: Sequence[Tensor],
) -> None:
    """The graph that a compiler would get, by torch's operators."""
    graph.build_graph(of, bindings, CPU)(*arguments, *destinations)


def test_the_graph_fills_destinations_like_the_eager_kernels() -> None:
    """Each segment of a program, by the graph alone: stores, products in place and views undone."""
    program = mlp(clip=0.5)
    checked = 0
    for op in program.ops():
        if not isinstance(op, Compute):
            continue
        one, how = program.segment_by_name[op.segment], bindings(op)
        arguments = [torch.randn(kind.shape) for kind in one.inputs]
        kinds = graph.input_types(one, how)[len(one.inputs) :]
        filled = [torch.zeros(kind.shape) for kind in kinds]
        expected = [torch.zeros(kind.shape) for kind in kinds]
        run_graph(one, how, arguments, filled)
        outputs = graph.graph_outputs(how)
        targets: list[Tensor | None] = [None] * len(how)
        for output, tensor in zip((*outputs.direct, *outputs.scratch), expected, strict=True):
            targets[output] = tensor
        EagerKernels(CPU).compile(one, how)(arguments, targets)
        for tensor, wanted in zip(filled, expected, strict=True):
            torch.testing.assert_close(tensor, wanted)
        checked += 1
    assert checked >= 4


def test_a_product_is_added_to_what_the_destination_holds() -> None:
    """dW += dyᵀ x, through the transposes that autograd writes, without a tensor of that size for the product."""
    gradient = segment(
        "$0: f32[8,5], $1: f32[8,3]",
        "$2 = aten.t.default($1) : f32[3,8;1,3]",
        "$3 = aten.mm.default($2, $0) : f32[3,5]",
        "$4 = aten.t.default($3) : f32[5,3;1,5]",
        "$5 = aten.t.default($4) : f32[3,5]",
        "return ($5)",
    )
    how = [Binding(mode=Mode.ACCUMULATE, stride=(5, 1), is_exclusive=True)]
    dy, x, held_before = torch.randn(8, 5), torch.randn(8, 3), torch.randn(3, 5)
    filled = held_before.clone()
    run_graph(gradient, how, [dy, x], [filled])
    torch.testing.assert_close(filled, held_before + x.t() @ dy)
    called = [node.target for node in graph.build_graph(gradient, how, CPU).graph.nodes]
    assert torch.ops.zeroir.addmm_out.default in called
    assert torch.ops.zeroir.store.default not in called


@pytest.mark.parametrize("padding", [-1, 2])
def test_rows_are_added_to_what_the_destination_holds(padding: int) -> None:
    """An embedding's gradient is added where it was looked up, the padding's left out, without a table of its own."""
    dy, rows, held_before = torch.randn(3, 4, 5), torch.randint(0, 6, (3, 4)), torch.randn(6, 5)
    looked_up, how = embedding_gradient(Mode.ACCUMULATE, padding)
    filled = held_before.clone()
    run_graph(looked_up, how, [dy, rows], [filled])
    gradient = torch.ops.aten.embedding_dense_backward(dy, rows, 6, padding, False)
    torch.testing.assert_close(filled, held_before + gradient)
    called = [node.target for node in graph.build_graph(looked_up, how, CPU).graph.nodes]
    assert torch.ops.zeroir.store.default not in called
