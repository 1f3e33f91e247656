"""Eager kernels where results lie in memory otherwise than the segment says, or are copied as they stand."""

from __future__ import annotations

import torch

from tests.runtime.test_kernels import called, flipped, kind, to
from zeroir.ir.ops import Mode
from zeroir.ir.segments.segment import Node, Ref, Segment, Symbol
from zeroir.runtime.kernels.eager import EagerKernels

CPU = torch.device("cpu")
CONTIGUOUS = (("memory_format", Symbol("contiguous_format")),)


def test_a_result_is_laid_out_anew_for_a_node_that_looks_at_it_in_another_shape() -> None:
    # On this device the sine of a transposed matrix is transposed, too, and has no flat view.
    segment = Segment(
        name="sine",
        inputs=(flipped(3, 5),),
        nodes=(
            Node(op="aten.sin.default", args=(Ref(0),), results=(kind(3, 5),)),
            Node(op="aten.view.default", args=(Ref(1), (15,)), results=(kind(15),)),
        ),
        outputs=(2,),
    )
    x, found = torch.randn(5, 3).t(), torch.empty(15)
    EagerKernels(CPU).compile(segment, [to(Mode.WRITE, 1)])([x], [found])
    assert torch.equal(found, x.sin().flatten())


def test_a_result_that_lies_as_it_should_is_not_copied() -> None:
    segment = Segment(
        name="sine",
        inputs=(kind(3, 5),),
        nodes=(
            Node(op="aten.sin.default", args=(Ref(0),), results=(kind(3, 5),)),
            Node(op="aten.view.default", args=(Ref(1), (15,)), results=(kind(15),)),
            Node(op="aten.cos.default", args=(Ref(2),), results=(kind(15),)),
        ),
        outputs=(3,),
    )
    kernel = EagerKernels(CPU).compile(segment, [to(Mode.WRITE, 1)])
    x, found = torch.randn(3, 5), torch.empty(15)
    with called() as seen:
        kernel([x], [found])
    assert [name for name, _ in seen] == ["aten.sin.default", "aten.view.default", "aten.cos.out"]


def expansion(mode: Mode, *, is_exclusive: bool = True) -> list[str]:
    """The operators that run to store a copy of one number expanded."""
    segment = Segment(
        name="expansion",
        inputs=(kind(),),
        nodes=(
            Node(op="aten.expand.default", args=(Ref(0), (4,)), results=(flipped(4),)),
            Node(op="aten.clone.default", args=(Ref(1),), kwargs=CONTIGUOUS, results=(kind(4),)),
        ),
        outputs=(2,),
    )
    kernel = EagerKernels(CPU).compile(segment, [to(mode, 1, is_exclusive=is_exclusive)])
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
    swap = Segment(
        name="swap",
        inputs=(kind(3), kind(3)),
        nodes=tuple(
            Node(op="aten.clone.default", args=(Ref(i),), kwargs=CONTIGUOUS, results=(kind(3),))
            for i in (1, 0)
        ),
        outputs=(2, 3),
    )
    shared = to(Mode.WRITE, 1, is_exclusive=False)
    EagerKernels(CPU).compile(swap, [shared, shared])([a, b], [a, b])
    assert a.eq(1).all()
    assert b.eq(0).all()


def test_losses_write_no_further_than_their_one_number() -> None:
    segment = Segment(
        name="loss",
        inputs=(kind(3, 4), kind(3, 4)),
        nodes=(Node(op="aten.mse_loss.default", args=(Ref(0), Ref(1)), results=(kind(),)),),
        outputs=(2,),
    )
    memory = torch.full((32,), 7.0)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    EagerKernels(CPU).compile(segment, [to(Mode.WRITE)])([x, y], [memory[4:5].view(())])
    assert torch.equal(memory[4], (x - y).square().mean())
    assert memory[:4].eq(7).all()
    assert memory[5:].eq(7).all()
