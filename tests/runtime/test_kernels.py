"""Eager kernels: results go where they belong without a detour, and values do not outlive their last use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.support import ROOT, embedding_gradient, segment
from tests.support.programs import mlp
from tests.support.stages import scheduled
from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.ir.ops import Compute, Mode
from zeroir.ir.segments.bindings import Binding, bindings
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.kernels import graph
from zeroir.runtime.kernels.eager import CopyToDestination, EagerKernels, compile_eager

CPU = torch.device("cpu")


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: list[tuple[str, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        first = args[0] if args else None
        self._seen.append((str(func), first.numel() if isinstance(first, Tensor) else 0))
        return func(*args, **(kwargs or {}))


@contextmanager
def called() -> Iterator[list[tuple[str, int]]]:
    """Every operator that runs in the block, with the number of elements of its first argument."""
    seen: list[tuple[str, int]] = []
    with _Names(seen):
        yield seen


def to(mode: Mode, *stride: int, is_exclusive: bool = True) -> Binding:
    return Binding(mode=mode, stride=stride, is_exclusive=is_exclusive)


# dW = (xᵀ dy)ᵀ as autograd writes it: a transposed product of two transposes.
WEIGHT_GRADIENT = segment(
    "$0: f32[8,5], $1: f32[8,3]",
    "$2 = aten.t.default($0) : f32[5,8;1,5]",
    "$3 = aten.mm.default($2, $1) : f32[5,3]",
    "$4 = aten.t.default($3) : f32[3,5;1,3]",
    "$5 = aten.t.default($4) : f32[5,3]",
    "return ($5)",
)


def test_a_weight_gradient_is_written_in_place() -> None:
    dy, x = torch.randn(8, 5), torch.randn(8, 3)
    flat = torch.full((40,), 9.0)
    view = flat[16:31].view(5, 3)
    kernel = EagerKernels(CPU).compile(WEIGHT_GRADIENT, [to(Mode.WRITE, 3, 1)])
    with called() as seen:
        kernel([dy, x], [view])
    assert torch.equal(view, dy.t() @ x)
    assert flat[:16].eq(9).all()
    assert flat[31:].eq(9).all()
    names = [name for name, _ in seen]
    assert "aten.mm.out" in names
    assert not [name for name in names if "copy" in name or name == "aten.mm.default"]


def test_accumulation_adds() -> None:
    dy, x = torch.randn(8, 5), torch.randn(8, 3)
    view = torch.ones(5, 3)
    EagerKernels(CPU).compile(WEIGHT_GRADIENT, [to(Mode.ACCUMULATE, 3, 1)])([dy, x], [view])
    assert torch.equal(view, 1 + dy.t() @ x)


def test_a_destination_that_is_read_is_written_last() -> None:
    """x is replaced by x + 1 while 2x is still to be computed from it."""
    both = segment(
        "$0: f32[4]",
        "$1 = aten.add.Tensor($0, 1.0) : f32[4]",
        "$2 = aten.mul.Tensor($0, 2.0) : f32[4]",
        "return ($1, $2)",
    )
    x, double = torch.arange(4.0), torch.empty(4)
    shared = to(Mode.WRITE, 1, is_exclusive=False)
    EagerKernels(CPU).compile(both, [shared, to(Mode.WRITE, 1)])([x], [x, double])
    assert double.tolist() == [0, 2, 4, 6]
    assert x.tolist() == [1, 2, 3, 4]


def test_destinations_may_have_other_strides() -> None:
    relu = segment("$0: f32[2,3]", "$1 = aten.relu.default($0) : f32[2,3]", "return ($1)")
    memory = torch.zeros(6)
    target, x = memory.as_strided((2, 3), (1, 2)), torch.arange(6.0).view(2, 3)
    EagerKernels(CPU).compile(relu, [to(Mode.WRITE, 1, 2)])([x], [target])
    assert memory.tolist() == [0, 3, 1, 4, 2, 5]


def test_results_may_be_several_unused_or_dropped() -> None:
    norm = segment(
        "$0: f32[4,8], $1: f32[8], $2: f32[8]",
        "$3, $4, $5 = aten.native_layer_norm.default($0, [8], $1, $2, 1e-05)"
        " : (f32[4,8], f32[4,1], f32[4,1])",
        "$6 = aten.full.default([2], 3.0, dtype=f16, device=#device) : f16[2]",
        "return ($3, $4, $5, $6)",
    )
    out, mean, full = torch.empty(4, 8), torch.empty(4, 1), torch.empty(2, dtype=torch.float16)
    x = torch.randn(4, 8)
    how = [to(Mode.WRITE, 8, 1), to(Mode.WRITE, 1, 1), None, to(Mode.WRITE, 1)]
    EagerKernels(CPU).compile(norm, how)(
        [x, torch.ones(8), torch.zeros(8)], [out, mean, None, full]
    )
    assert torch.equal(out, torch.nn.functional.layer_norm(x, (8,)))
    torch.testing.assert_close(mean, x.mean(1, keepdim=True))
    assert full.tolist() == [3.0, 3.0]


def test_equal_structures_are_compiled_once() -> None:
    kernels = EagerKernels(CPU)
    program = mlp(blocks=5)
    backward = [
        op for op in program.ops() if isinstance(op, Compute) and op.segment == "block.backward"
    ]
    assert len(backward) == 5
    block = program.segment_by_name["block.backward"]
    assert len({id(kernels.compile(block, bindings(op))) for op in backward}) == 1


def test_an_unknown_operator_is_named() -> None:
    odd = segment("$0: f32[2]", "$1 = aten.no_such_op.default($0) : f32[2]", "return ($1)")
    with pytest.raises(UserError, match=r"aten\.no_such_op\.default"):
        EagerKernels(CPU).compile(odd, [to(Mode.WRITE, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_an_embedding_is_made_in_the_flat(dtype: torch.dtype) -> None:
    short = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    gradient = segment(
        f"$0: {short}[2,30,4], $1: i64[2,30]",
        f"$2 = aten.embedding_dense_backward.default($0, $1, 7, 2, false) : {short}[7,4]",
        "return ($2)",
    )
    grad, indices = torch.randn(2, 30, 4).to(dtype), torch.randint(0, 7, (2, 30))
    view = torch.full((7, 4), 9.0, dtype=dtype)
    kernel = EagerKernels(CPU).compile(gradient, [to(Mode.WRITE, 4, 1)])
    with called() as seen:
        kernel([grad, indices], [view])
    expected = torch.ops.aten.embedding_dense_backward(grad, indices, 7, 2, False)
    assert torch.equal(view, expected)
    assert not [name for name, _ in seen if "copy" in name or "embedding_dense" in name]


# ------------------------------------------------------- results that lie otherwise, or are copied as they stand

SINE = (
    "$1 = aten.sin.default($0) : f32[3,5]",
    "$2 = aten.view.default($1, [15]) : f32[15]",
    "$3 = aten.cos.default($2) : f32[15]",
    "return ($3)",
)


def test_a_result_that_lies_as_it_should_is_not_copied_for_a_node_that_looks_at_it() -> None:
    kernel = EagerKernels(CPU).compile(segment("$0: f32[3,5]", *SINE), [to(Mode.WRITE, 1)])
    x, found = torch.randn(3, 5), torch.empty(15)
    with called() as seen:
        kernel([x], [found])
    assert [name for name, _ in seen] == ["aten.sin.default", "aten.view.default", "aten.cos.out"]
    # On this device the sine of a transposed matrix is transposed, too, and has no flat view.
    kernel = EagerKernels(CPU).compile(segment("$0: f32[3,5;1,3]", *SINE), [to(Mode.WRITE, 1)])
    kernel([x := torch.randn(5, 3).t()], [found])
    assert torch.equal(found, x.sin().flatten().cos())


def expansion(mode: Mode, *, is_exclusive: bool = True) -> list[str]:
    """The operators that run to store a copy of one number expanded."""
    expanded = segment(
        "$0: f32[]",
        "$1 = aten.expand.default($0, [4]) : f32[4;0]",
        "$2 = aten.clone.default($1, memory_format=#contiguous_format) : f32[4]",
        "return ($2)",
    )
    kernel = EagerKernels(CPU).compile(expanded, [to(mode, 1, is_exclusive=is_exclusive)])
    two, found = torch.tensor(2.0), torch.ones(4)
    with called() as seen:
        kernel([two], [found])
    assert found.eq(2.0 if mode is Mode.WRITE else 3.0).all()
    return [name for name, _ in seen]


def test_a_last_copy_is_the_copy_to_the_destination() -> None:
    assert expansion(Mode.WRITE) == ["aten.expand.default", "aten.copy_.default"]
    assert expansion(Mode.ACCUMULATE) == ["aten.expand.default", "aten.add_.Tensor"]


def test_what_another_result_may_overwrite_is_copied_first() -> None:
    assert "aten.clone.default" in expansion(Mode.ACCUMULATE, is_exclusive=False)
    a, b = torch.zeros(3), torch.ones(3)
    swap = segment(
        "$0: f32[3], $1: f32[3]",
        "$2 = aten.clone.default($1, memory_format=#contiguous_format) : f32[3]",
        "$3 = aten.clone.default($0, memory_format=#contiguous_format) : f32[3]",
        "return ($2, $3)",
    )
    shared = to(Mode.WRITE, 1, is_exclusive=False)
    EagerKernels(CPU).compile(swap, [shared, shared])([a, b], [a, b])
    assert a.eq(1).all()
    assert b.eq(0).all()


def test_losses_write_no_further_than_their_one_number() -> None:
    loss = segment(
        "$0: f32[3,4], $1: f32[3,4]", "$2 = aten.mse_loss.default($0, $1) : f32[]", "return ($2)"
    )
    memory = torch.full((32,), 7.0)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    EagerKernels(CPU).compile(loss, [to(Mode.WRITE)])([x, y], [memory[4:5].view(())])
    assert torch.equal(memory[4], (x - y).square().mean())
    assert memory[:4].eq(7).all()
    assert memory[5:].eq(7).all()


MODELS = ROOT / "tests" / "support" / "models"


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "path",
    [ROOT / "examples" / "gpt.py", MODELS / "llama.py", MODELS / "gpt2.py"],
    ids=lambda path: path.stem,
)
def test_no_gradient_of_a_matrix_is_copied(path: Path, stage: int) -> None:
    """Vectors may be: torch's backward of a layer norm makes its own, and has no other way to the same bits."""
    program = scheduled(path, stage, 2)
    gradients = {b.name for b in program.buffers if b.role is Role.GRAD}
    found = 0
    for op in program.ops():
        if not isinstance(op, Compute):
            continue
        kernel = compile_eager(program.segment_by_name[op.segment], bindings(op), CPU)
        copies = [step.plan for step in kernel.steps if isinstance(step, CopyToDestination)]
        copied = {copy.target.output for copy in copies if copy.mode is Mode.WRITE}
        for output, destination in enumerate(op.destinations):
            if destination is None or destination.view.region.buffer not in gradients:
                continue
            found += 1
            assert len(destination.view.shape) < 2 or output not in copied, (op.segment, output)
    assert found > 10


# ---- The graph of a segment for a compiler: it fills, or adds to, destinations without other tensors of their size


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
