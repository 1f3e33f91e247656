"""Scaled dot-product attention as one operator pair whose types are the same on every device.

torch has a different operator for every device and kernel, and a graph traced on one device does not run on another.
This one selects the kernel when it runs: the CPU's flash kernel, CUDA's flash or memory-efficient kernels, or plain
matrix products. All kernels return the same pair, the output and the natural logarithm of the softmax's denominator, so
the backward may use another kernel than the forward.

Tensors: q ``(batch, heads, length, dim)``, k and v ``(batch, kv_heads, kv_length, dim)`` with heads a multiple of
kv_heads (grouped-query attention), mask broadcastable to ``(batch, heads, length, kv_length)``: bool (True attends) or
added to the scores. Outputs and gradients of q, k, v have the memory layout (batch, length, heads, dim), as the fused
kernels write them; the logarithm is f32 (f64 for f64 inputs) with the layout (batch, length, heads). If a mask excludes
every key of a row, the output is 0.

The calls of CUDA's kernels follow the sources and shape functions of torch 2.11 to 2.13; none has been measured yet.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from zeroir.torch_ops.define import define, differentiate, fake

aten = torch.ops.aten

# CUDA's memory-efficient kernel pads the logarithms of a head to a multiple of this; ROCm's does not pad.
_LSE_ROW = 32 if torch.version.hip is None else 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention without dropout.

    Returns:
        the output, shaped like q with v's dim, and the logsumexp of the scaled scores.
    """
    q, k, v, bias = _prepare(q, k, v, mask)
    match _kernel(q, k, v, bias, is_causal):
        case SDPBackend.FLASH_ATTENTION if q.device.type == "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        case SDPBackend.FLASH_ATTENTION:
            out, lse = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, is_causal, scale=scale
            )[:2]
        case SDPBackend.EFFICIENT_ATTENTION:
            k, v = _repeated(q, k, v)
            out, lse = aten._scaled_dot_product_efficient_attention(
                q, k, v, _aligned(bias, q, k), True, 0.0, is_causal, scale=scale
            )[:2]
            lse = lse[..., : q.shape[2]]
        case _:
            out, lse = _math_forward(q, *_repeated(q, k, v), bias, is_causal, scale)
    return _by_length(out), _by_length(lse)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from that of the output."""
    kv_heads = k.shape[1]
    q, k, v, bias = _prepare(q, k, v, mask)
    match _kernel(q, k, v, bias, is_causal):
        case SDPBackend.FLASH_ATTENTION if q.device.type == "cpu":
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, logsumexp, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        case SDPBackend.FLASH_ATTENTION:
            # Any offsets of sequences, even empty ones, would mean that lengths differ. Without dropout the kernel does
            # not read the generator's state. It reads the logarithm as contiguous, (batch, heads, length).
            state = torch.empty(2, dtype=torch.uint64, device=q.device)
            grads = aten._scaled_dot_product_flash_attention_backward(
                _packed(grad), q, k, v, out, logsumexp.contiguous(), None, None,
                q.shape[2], k.shape[2], 0.0, is_causal, state, state[:0], scale=scale,
            )  # fmt: skip
        case SDPBackend.EFFICIENT_ATTENTION:
            k, v = _repeated(q, k, v)
            state = torch.empty((), dtype=torch.int64, device=q.device)
            lse = F.pad(logsumexp, (0, -q.shape[2] % _LSE_ROW), value=math.inf).contiguous()
            grads = aten._scaled_dot_product_efficient_attention_backward(
                _packed(grad), q, k, v, _aligned(bias, q, k), out, lse, state, state, 0.0,
                [True, True, True, False], is_causal, scale=scale,
            )[:3]  # fmt: skip
        case _:
            k, v = _repeated(q, k, v)
            grads = _math_backward(grad, q, k, v, bias, out, is_causal, scale)
    grad_q, grad_k, grad_v = grads
    return (
        _by_length(grad_q),
        _by_length(_sum_groups(grad_k, kv_heads)),
        _by_length(_sum_groups(grad_v, kv_heads)),
    )


attention = define("zeroir::attention", attend)
attention_backward = define("zeroir::attention_backward", attend_backward)


@fake("zeroir::attention")
def _(q: Tensor, _: Tensor, v: Tensor, *__: object) -> tuple[Tensor, Tensor]:
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    accumulated = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(batch, length, heads, dtype=accumulated).transpose(1, 2)


@fake("zeroir::attention_backward")
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: object) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        batch, heads, length, dim = x.shape
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)

    return like(q), like(k), like(v)


differentiate(
    "zeroir::attention",
    attention_backward,
    lambda inputs, results: ((*inputs[:4], *results), inputs[4:]),
)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Make the last dimensions of q, k and v dense, and convert the mask to a bias that is added to the scores."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    return _packed(q), _packed(k), _packed(v), mask


def _kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool) -> SDPBackend:
    """Select the best kernel of the device for these shapes, the same in the forward and in the backward."""
    is_grouped = q.shape[1] != k.shape[1]
    if q.device.type == "cpu":
        if isinstance(q, FakeTensor):
            # Torch selects none of these kernels for the fake tensors of a compiler.
            with _disable_current_modes():
                return _cpu_kernel(*_small(q, k, v, bias), is_causal)
        return _cpu_kernel(q, k, v, bias, is_causal)
    if q.device.type == "cuda":
        params = SDPAParams(q, k, v, bias, 0.0, is_causal, is_grouped)
        # torch pads other dims for the kernel. It checks the kernel's backward only where gradients are recorded:
        # some GPUs have none for dims of 193 to 224.
        is_dim_supported = q.shape[3] % 8 == 0 and not 192 < q.shape[3] <= 224
        if is_dim_supported and can_use_flash_attention(params):
            return SDPBackend.FLASH_ATTENTION
        params = SDPAParams(q, *_repeated(q, k, v), bias, 0.0, is_causal, False)
        if can_use_efficient_attention(params):
            return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def _cpu_kernel(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool
) -> SDPBackend:
    is_grouped = q.shape[1] != k.shape[1]
    return SDPBackend(torch._fused_sdp_choice(q, k, v, bias, 0.0, is_causal, enable_gqa=is_grouped))


def _small(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return real tensors of one row and one position, for which the CPU has the same kernel.

    They have one head where the number of heads is a symbol, which then is the same for q, k and v.
    """
    q, k, v = (
        torch.empty(1, _number(x.shape[1]), 1, int(x.shape[3]), dtype=x.dtype) for x in (q, k, v)
    )
    return q, k, v, None if bias is None else torch.empty([1] * bias.dim(), dtype=bias.dtype)


def _number(size: int | torch.SymInt) -> int:
    return 1 if isinstance(size, torch.SymInt) else size


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for every head of q, for kernels without grouped-query attention."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _packed(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_length(x: Tensor) -> Tensor:
    """Return the tensor with the memory layout (batch, length, heads, ...)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the expanded mask with rows aligned to 16 elements, as the memory-efficient kernel requires."""
    if bias is None:
        return None
    length = k.shape[2]
    bias = _packed(bias.to(q.dtype).expand(*bias.shape[:-1], length))
    if length % 16:
        bias = F.pad(bias, (0, -length % 16))[..., :length]
    elif any(step % 16 for step in bias.stride()[:-1]):
        bias = bias.contiguous()
    return bias.expand(*q.shape[:3], length)


def _sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    """Sum the heads of a gradient that share a key-value head, the backward of ``_repeated``."""
    batch, heads, length, dim = grad.shape
    if heads == kv_heads:
        return grad
    return grad.reshape(batch, kv_heads, heads // kv_heads, length, dim).sum(2)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, float]:
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q @ k.transpose(2, 3) * factor
    if is_causal:
        causal = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    return (scores if bias is None else scores + bias), factor


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores, _ = _scores(q.to(wide), k.to(wide), bias, is_causal, scale)
    # A row that attends to no key has the logarithm 0, which is what the CPU's flash kernel writes: its backward
    # subtracts the logarithm from -inf.
    logarithms = scores.logsumexp(3).masked_fill(_excluded(scores).squeeze(3), 0.0)
    return (_weights(scores) @ v.to(wide)).to(q.dtype), logarithms


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, grad, out = (x.to(wide) for x in (q, k, v, grad, out))
    scores, factor = _scores(q, k, bias, is_causal, scale)
    weights = _weights(scores)
    grad_scores = weights * (grad @ v.transpose(2, 3) - (grad * out).sum(3, keepdim=True)) * factor
    return (
        (grad_scores @ k).to(dtype),
        (grad_scores.transpose(2, 3) @ q).to(dtype),
        (weights.transpose(2, 3) @ grad).to(dtype),
    )


def _weights(scores: Tensor) -> Tensor:
    """Return the softmax, with weights of zero in a row whose mask excludes every key.

    Computing it from the logarithm of a row's sum would be inexact if scores are large: added to the smallest finite
    number, with which many masks exclude a key, the logarithm is rounded away.
    """
    return scores.softmax(3).masked_fill(_excluded(scores), 0.0)


def _excluded(scores: Tensor) -> Tensor:
    """Return for each row whether its mask excludes every key."""
    return (scores == -math.inf).all(3, keepdim=True)
