"""torch's rules about types that the memory model repeats without torch: of promotion, and of views."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import TensorType
from zeroir.ir.segments.views import view_stride
from zeroir.torch_ops.types import IR_DTYPE, TORCH_DTYPE
from zeroir.workspace.promotion import Operand, common_dtype, promoted

PROMOTED = [dtype for dtype in DType if dtype is not DType.F8_E4M3]
"""Torch refuses operands of several dtypes among which are floats of 8 bits."""

NUMBERS = {DType.BOOL: True, DType.I64: 2, DType.F64: 0.5}


def test_two_dtypes_are_promoted_as_torch_does() -> None:
    for a, b in itertools.product(PROMOTED, repeat=2):
        expected = torch.promote_types(TORCH_DTYPE[a], TORCH_DTYPE[b])
        assert promoted(a, b) is IR_DTYPE[expected], (a, b)


def operands() -> st.SearchStrategy[Operand]:
    tensors = st.builds(
        lambda dtype, rank: TensorType(dtype=dtype, shape=(2,) * rank, stride=(1,) * rank),
        st.sampled_from(PROMOTED),
        st.integers(0, 1),
    )
    return tensors | st.sampled_from(sorted(NUMBERS))


@given(operands(), operands())
@examples(200)
def test_tensors_and_numbers_are_promoted_as_torch_does(a: Operand, b: Operand) -> None:
    x, y = (
        torch.zeros(one.shape, dtype=TORCH_DTYPE[one.dtype])
        if isinstance(one, TensorType)
        else NUMBERS[one]
        for one in (a, b)
    )
    expected = torch.result_type(x, y)
    assert common_dtype([a, b]) is IR_DTYPE[expected]


@given(st.data())
@examples(100)
def test_a_view_has_the_strides_that_torch_gives_it(data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 2, 3, 4, 6])
    shape = tuple(data.draw(st.lists(sizes, max_size=4)))
    steps = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24])
    dense = torch.empty(shape, device="meta").permute(data.draw(st.permutations(range(len(shape)))))
    stride = data.draw(st.just(dense.stride()) | st.tuples(*(steps for _ in shape)), label="stride")
    shape = tuple(dense.shape)
    factors = list(shape)
    wanted = data.draw(
        st.permutations(factors).map(tuple)
        | st.just((torch.Size(shape).numel(),))
        | st.lists(sizes, max_size=4).map(tuple)
    )
    if torch.Size(wanted).numel() != torch.Size(shape).numel():
        wanted = (*shape[:1], torch.Size(shape[1:]).numel())
    if torch.Size(wanted).numel() != torch.Size(shape).numel():
        return
    tensor = torch.empty_strided(shape, stride, device="meta")
    try:
        expected = tensor.view(wanted).stride()
    except RuntimeError:
        expected = None
    assert view_stride(TensorType(dtype=DType.F32, shape=shape, stride=stride), wanted) == expected
