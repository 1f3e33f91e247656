"""Eager kernels: results go where they belong without a detour, and values do not outlive their last use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Compute, Mode
from zeroir.ir.segment import Node, Ref, Segment, Symbol, TensorType
from zeroir.runtime.engine import Engine
from zeroir.runtime.handlers import bindings
from zeroir.runtime.kernels.base import Binding
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.kernels.eager import EagerKernels

# Inductor leaves files of its cache to the garbage collector.
COMPILER_WARNINGS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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


@pytest.mark.slow
@COMPILER_WARNINGS
def test_inductor_writes_a_weight_gradient_straight_into_the_flat() -> None:
    from torch._inductor.utils import run_and_get_code

    from zeroir.runtime.kernels.inductor import InductorKernels

    program = mlp(dim=96, features=64, batch=32)
    op = next(
        op for op in program.ops() if isinstance(op, Compute) and op.segment == "block.backward"
    )
    segment = program.segment_by_name[op.segment]
    arguments = [torch.randn(one.shape) for one in segment.inputs]

    def destinations() -> tuple[Tensor, list[Tensor | None]]:
        flat = torch.zeros(96 * 96 + 96)
        return flat, [torch.zeros(32, 96), flat[: 96 * 96].view(96, 96), flat[96 * 96 :]]

    expected, targets = destinations()
    EagerKernels(CPU).compile(segment, bindings(op))(arguments, targets)
    found, targets = destinations()
    kernel = InductorKernels(CPU).compile(segment, bindings(op))
    with torch.no_grad():
        _, (code,) = run_and_get_code(lambda: kernel(arguments, targets))
    torch.testing.assert_close(found, expected)
    assert "torch.ops.zeroir.mm_into.default(arg" in code
    # No buffer of the weight's size is made, and no loop copies one.
    assert "empty_strided_cpu((96, 96)" not in code
    assert "9216L" not in code


@pytest.mark.slow
@COMPILER_WARNINGS
def test_a_program_trains_alike_with_inductor() -> None:
    program = lowered(mlp(clip=0.5), 3, 1)
    engines = [Engine(program, kernels=kernels) for kernels in KernelBackend]
    for engine in engines:
        engine.initialise_flats(initial_flats(program))
    for ((batch,),) in random_batches(3, 1):
        losses = [engine.step(batch).loss for engine in engines]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for engine in engines:
        engine.close()
