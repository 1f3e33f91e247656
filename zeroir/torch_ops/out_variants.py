"""Operators that write their result into a given tensor, for graphs whose results have fixed addresses.

A compiler that traces ``torch.mm(a, b, out=view)`` computes the product in a new tensor and copies it. These operators
declare that they write ``out`` and return nothing, so the product is written to the view directly. The names and
arguments of the products are those of torch's C functions for ahead-of-time compiled code (``aoti_torch_cpu_mm_out``),
which compiled code calls instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroir.torch_ops.define import define


def _mm_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the product of ``a`` (n, k) and ``b`` (k, m) into ``out`` (n, m)."""
    torch.mm(a, b, out=out)


def _addmm_out(out: Tensor, bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> None:
    """Write ``beta`` × ``bias`` + ``alpha`` × the product of ``a`` and ``b`` into ``out``; bias may be out itself."""
    torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)


def _bmm_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the products of the matrices of ``a`` (batch, n, k) and ``b`` (batch, k, m) into ``out``."""
    torch.bmm(a, b, out=out)


def _store(out: Tensor, value: Tensor) -> None:
    """Copy ``value``, which has no other reader, to ``out``; a compiler may compute it in ``out`` directly."""
    out.copy_(value)


def _embedding_gradient(out: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> None:
    """Write the gradient of an embedding's weight into ``out`` (rows, dim).

    Row r becomes the sum, in order, of the rows of ``grad`` (…, dim) whose index in ``indices`` (…) is r. A
    ``padding_idx`` that is not negative names a row that becomes zero. On the CPU the result has the same bits as that
    of ``aten.embedding_dense_backward`` without scaling by frequency.
    """
    out.zero_()
    # With 64-bit indices torch would sum the contributions to a row of 16-bit elements in FP32.
    rows = indices.flatten().int() if out.dtype.itemsize == 2 else indices.flatten()
    out.index_add_(0, rows, grad.reshape(-1, grad.shape[-1]))
    if padding_idx >= 0:
        out[padding_idx].zero_()


mm_out = define("zeroir::mm_out", _mm_out, mutates=("out",))
addmm_out = define("zeroir::addmm_out", _addmm_out, mutates=("out",))
bmm_out = define("zeroir::bmm_out", _bmm_out, mutates=("out",))
store = define("zeroir::store", _store, mutates=("out",))
embedding_gradient = define("zeroir::embedding_gradient", _embedding_gradient, mutates=("out",))
