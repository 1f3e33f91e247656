"""Operators that write into a given tensor yield the same bits as torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.torch_ops import addmm_out, bmm_out, embedding_gradient, mm_out, store

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@examples(25)
@given(
    rows=st.integers(1, 9),
    dim=st.integers(1, 20),
    count=st.integers(0, 60),
    padding_idx=st.integers(-1, 8),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from((torch.int64, torch.int32)),
    seed=st.integers(0, 99),
)
def test_the_gradient_of_an_embedding_has_torchs_bits(
    rows: int,
    dim: int,
    count: int,
    padding_idx: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    padding_idx = min(padding_idx, rows - 1)
    indices = torch.randint(0, rows, (2, count), generator=generator).to(index_dtype)
    grad = torch.randn(2, count, dim, generator=generator).to(dtype)
    out = torch.full((rows, dim), 9.0, dtype=dtype)
    embedding_gradient(out, grad, indices, padding_idx)
    expected = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding_idx, False)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_written_to_views(dtype: torch.dtype) -> None:
    a, b, bias = (torch.randn(*shape).to(dtype) for shape in ((4, 3), (3, 5), (5,)))
    flat = torch.zeros(60, dtype=dtype)
    out = flat[7:27].view(4, 5)
    mm_out(out, a, b)
    assert torch.equal(out, a @ b)
    addmm_out(out, bias, a, b, 1.0, 2.0)
    assert torch.equal(out, torch.addmm(bias, a, b, alpha=2))
    held = out.clone()
    addmm_out(out, out, a, b, 1.0, 1.0)
    torch.testing.assert_close(out, torch.addmm(held, a, b))
    batches = flat[20:60].view(2, 4, 5)
    bmm_out(batches, torch.stack([a, -a]), torch.stack([b, b]))
    assert torch.equal(batches, torch.bmm(torch.stack([a, -a]), torch.stack([b, b])))
    store(out, held)
    assert torch.equal(out, held)
    assert not flat[:7].any()
