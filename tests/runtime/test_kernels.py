"""Eager kernels: results go where they belong without a detour, and values do not outlive their last use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.support import ROOT
from tests.support.programs import mlp
from tests.support.stages import scheduled
from zeroir.errors import UserError
from zeroir.ir.buffers import Role, contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Compute, Mode
from zeroir.ir.segments.bindings import Binding, bindings
from zeroir.ir.segments.segment import Node, Ref, Segment, Symbol, TensorType
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


def kind(*shape: int, dtype: DType = DType.F32) -> TensorType:
    return TensorType(dtype=dtype, shape=shape, stride=contiguous_stride(shape))


def flipped(*shape: int) -> TensorType:
    """A transposed matrix of that shape."""
    return TensorType(dtype=DType.F32, shape=shape, stride=(1, shape[0]))


def to(mode: Mode, *stride: int, is_exclusive: bool = True) -> Binding:
    return Binding(mode=mode, stride=stride, is_exclusive=is_exclusive)


# dW = (xᵀ dy)ᵀ as autograd writes it: a transposed product of two transposes.
WEIGHT_GRADIENT = Segment(
    name="gradient",
    inputs=(kind(8, 5), kind(8, 3)),
    nodes=(
        Node(op="aten.t.default", args=(Ref(0),), results=(flipped(5, 8),)),
        Node(op="aten.mm.default", args=(Ref(2), Ref(1)), results=(kind(5, 3),)),
        Node(op="aten.t.default", args=(Ref(3),), results=(flipped(3, 5),)),
        Node(op="aten.t.default", args=(Ref(4),), results=(kind(5, 3),)),
    ),
    outputs=(5,),
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
    segment = Segment(
        name="both",
        inputs=(kind(4),),
        nodes=(
            Node(op="aten.add.Tensor", args=(Ref(0), 1.0), results=(kind(4),)),
            Node(op="aten.mul.Tensor", args=(Ref(0), 2.0), results=(kind(4),)),
        ),
        outputs=(1, 2),
    )
    x, double = torch.arange(4.0), torch.empty(4)
    kernel = EagerKernels(CPU).compile(
        segment, [to(Mode.WRITE, 1, is_exclusive=False), to(Mode.WRITE, 1)]
    )
    kernel([x], [x, double])
    assert double.tolist() == [0, 2, 4, 6]
    assert x.tolist() == [1, 2, 3, 4]


def test_destinations_may_have_other_strides() -> None:
    segment = Segment(
        name="strided",
        inputs=(kind(2, 3),),
        nodes=(Node(op="aten.relu.default", args=(Ref(0),), results=(kind(2, 3),)),),
        outputs=(1,),
    )
    memory = torch.zeros(6)
    target = memory.as_strided((2, 3), (1, 2))
    EagerKernels(CPU).compile(segment, [to(Mode.WRITE, 1, 2)])(
        [torch.arange(6.0).view(2, 3)], [target]
    )
    assert memory.tolist() == [0, 3, 1, 4, 2, 5]


def test_results_may_be_several_unused_or_dropped() -> None:
    segment = Segment(
        name="norm",
        inputs=(kind(4, 8), kind(8), kind(8)),
        nodes=(
            Node(
                op="aten.native_layer_norm.default",
                args=(Ref(0), (8,), Ref(1), Ref(2), 1e-5),
                results=(kind(4, 8), kind(4, 1), kind(4, 1)),
            ),
            Node(
                op="aten.full.default",
                args=((2,), 3.0),
                kwargs=(("dtype", DType.F16), ("device", Symbol("device"))),
                results=(kind(2, dtype=DType.F16),),
            ),
        ),
        outputs=(3, 4, 5, 6),
    )
    out, mean, full = torch.empty(4, 8), torch.empty(4, 1), torch.empty(2, dtype=torch.float16)
    x = torch.randn(4, 8)
    kernel = EagerKernels(CPU).compile(
        segment, [to(Mode.WRITE, 8, 1), to(Mode.WRITE, 1, 1), None, to(Mode.WRITE, 1)]
    )
    kernel([x, torch.ones(8), torch.zeros(8)], [out, mean, None, full])
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
    segment = program.segment_by_name["block.backward"]
    assert len({id(kernels.compile(segment, bindings(op))) for op in backward}) == 1


def test_an_unknown_operator_is_named() -> None:
    segment = Segment(
        name="odd",
        inputs=(kind(2),),
        nodes=(Node(op="aten.no_such_op.default", args=(Ref(0),), results=(kind(2),)),),
        outputs=(1,),
    )
    with pytest.raises(UserError, match=r"aten\.no_such_op\.default"):
        EagerKernels(CPU).compile(segment, [to(Mode.WRITE, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_an_embedding_is_made_in_the_flat(dtype: torch.dtype) -> None:
    kinds = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
    segment = Segment(
        name="gradient",
        inputs=(kind(2, 30, 4, dtype=kinds[dtype]), kind(2, 30, dtype=DType.I64)),
        nodes=(
            Node(
                op="aten.embedding_dense_backward.default",
                args=(Ref(0), Ref(1), 7, 2, False),
                results=(kind(7, 4, dtype=kinds[dtype]),),
            ),
        ),
        outputs=(2,),
    )
    grad, indices = torch.randn(2, 30, 4).to(dtype), torch.randint(0, 7, (2, 30))
    view = torch.full((7, 4), 9.0, dtype=dtype)
    kernel = EagerKernels(CPU).compile(segment, [to(Mode.WRITE, 4, 1)])
    with called() as seen:
        kernel([grad, indices], [view])
    expected = torch.ops.aten.embedding_dense_backward(grad, indices, 7, 2, False)
    assert torch.equal(view, expected)
    assert not [name for name, _ in seen if "copy" in name or "embedding_dense" in name]


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
