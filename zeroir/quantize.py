"""Frozen weights of few bits: linear layers whose weights are quantised in memory and on the wire.

The weights become bytes, with a scale for each block. Forward dequantises them and so does backward again, so that the
weights in the compute dtype exist only while one product needs them. Everything is plain operators of PyTorch: such a
layer trains without zeroir, too, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroir.errors import UserError

WeightFormat = Literal["nf4", "nf4_double", "int8", "fp8"]

BLOCK_NUMEL: Final = 64
"""Weights with one scale in NF4, as in section 3 of the paper."""
GROUP_NUMEL: Final = 256
"""Scales with one scale of their own where they are quantised, too, as in section 3 of the paper."""

NF4_LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""The 16 values of a 4-bit NormalFloat: appendix E of Dettmers et al. 2023 (arXiv 2305.14314)."""

_NF4_PAIRS: Final = tuple(product(NF4_LEVELS, NF4_LEVELS))
"""The two values of each byte."""


def quantize_frozen(
    model: nn.Module, weights: WeightFormat = "nf4", *, skip: Sequence[str] = ()
) -> nn.Module:
    """Quantise the frozen weights of a model's linear layers in place, and return the model.

    A layer is chosen if its class is ``nn.Linear``, its weight requires no gradient, and no other module has that
    weight. Its ``weight`` and its new parameter ``weight_scales`` are bytes then, which no conversion of the model to
    another dtype changes; its bias stays. It computes in the dtype of its input.

    Args:
        model: the module to change.
        weights: ``nf4`` has 4 bits and for each block of 64 weights an FP32 scale, 4.5 bits in all; ``nf4_double``
            quantises these scales to 8 bits, 4.13 bits in all; ``int8`` and ``fp8`` (``float8_e4m3fn``) have
            8 bits and an FP32 scale for each row.
        skip: patterns (``*``, ``?``, ``[...]``) of names of layers that stay as they are, such as ``*lm_head``.

    Raises:
        UserError: if no layer is chosen, a pattern matches no layer, or a weight is not finite.
    """
    if weights not in get_args(WeightFormat):
        raise UserError(
            f"The weights cannot be quantised as {weights!r}: take one of {', '.join(get_args(WeightFormat))}."
        )
    linears = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise UserError(
                f"The pattern {pattern} of skip= matches no linear layer of the model; names look like "
                f"{next(iter(linears), 'layers.0.linear')}."
            )
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    chosen = {
        name: layer
        for name, layer in linears.items()
        if not layer.weight.requires_grad
        and owners[id(layer.weight)] == 1
        and not any(fnmatchcase(name, pattern) for pattern in skip)
    }
    if not chosen:
        raise UserError(
            "The model has no nn.Linear with a frozen weight of its own to quantise: freeze the base model first, as "
            "model.requires_grad_(False) does."
        )
    for name, layer in chosen.items():
        codes, scales = _FORMATS[weights].encode(_finite(name, layer.weight.detach().float()))
        # The same object, so that its hooks, and whoever holds it, stay.
        layer.__class__ = QuantizedLinear
        assert isinstance(layer, QuantizedLinear)
        layer.weight_format = weights
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.weight_scales = nn.Parameter(scales, requires_grad=False)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and {*module.children()} & {
            *chosen.values()
        }:
            # Torch's fused kernel for it would read the bytes as weights; without this number it calls the layers.
            module.activation_relu_or_gelu = 0
    return model


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is stored as bytes: ``weight`` has codes, ``weight_scales`` FP32 scales."""

    weight_format: WeightFormat
    weight_scales: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` in the dtype of ``x`` (..., in_features), as (..., out_features)."""
        shape = (self.out_features, self.in_features)
        decode = _FORMATS[self.weight_format].decode
        y: Tensor = _Product.apply(x, self.weight, self.weight_scales, decode, shape)  # type: ignore[no-untyped-call]
        bias = self._parameters["bias"]
        return y if bias is None else y + bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return the layer's sizes and its format."""
        return f"{super().extra_repr()}, weights={self.weight_format}"


_Decode = Callable[[Tensor, Tensor], Tensor]


class _ForBackward(torch.autograd.function.FunctionCtx):
    """What backward needs: how to compute the weight from its bytes, its shape, and the dtype of the input."""

    saved_tensors: tuple[Tensor, Tensor]
    decode: _Decode
    shape: tuple[int, int]
    dtype: torch.dtype


class _Product(torch.autograd.Function):
    """The product with a quantised weight, of which backward keeps the bytes alone."""

    @staticmethod
    def forward(
        ctx: _ForBackward,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        decode: _Decode,
        shape: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.decode, ctx.shape, ctx.dtype = decode, shape, x.dtype
        return F.linear(x, _weight(codes, scales, decode, shape, x.dtype))

    @staticmethod
    def backward(ctx: _ForBackward, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,), (codes, scales) = grads, ctx.saved_tensors
        weight = _weight(codes, scales, ctx.decode, ctx.shape, grad.dtype)
        return (grad @ weight).to(ctx.dtype), None, None, None, None


def _weight(
    codes: Tensor, scales: Tensor, decode: _Decode, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    values = decode(codes, scales).to(dtype).view(-1)
    return values[: shape[0] * shape[1]].view(shape)


def _finite(name: str, weight: Tensor) -> Tensor:
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise UserError(
            f"The parameter {f'{name}.weight'.strip('.')} has elements that are not finite, which have no code."
        )
    return weight


def _nonzero(scales: Tensor) -> Tensor:
    """Return divisors: scales, but 1 for blocks of zeros."""
    return torch.where(scales == 0, 1.0, scales)


def _blocks(values: Tensor, numel: int) -> Tensor:
    """Return all values in rows of ``numel``, with zeros at the end."""
    flat = values.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % numel)).view(-1, numel)


def _encode_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two codes in each byte, (blocks, 32), the first in its high bits, and FP32 scales as bytes, (blocks, 4).

    A weight gets the code of the nearest level, the lower one in the middle between two.
    """
    blocks = _blocks(weight, BLOCK_NUMEL)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / _nonzero(scales), middles).to(torch.uint8)
    return codes[:, ::2] * 16 + codes[:, 1::2], scales.view(torch.uint8)


def _decode_nf4(codes: Tensor, scales: Tensor) -> Tensor:
    pairs = torch.tensor(_NF4_PAIRS, device=codes.device)
    return F.embedding(codes.int(), pairs).view(-1, BLOCK_NUMEL) * scales.view(torch.float32)


def _encode_nf4_double(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of NF4, and the scales of 256 blocks in each row of (groups, 264) bytes.

    A row has 256 signed bytes, and their scale and their mean in FP32: scales are positive, so the mean is subtracted
    before they are quantised.
    """
    codes, scales = _encode_nf4(weight)
    groups = _blocks(scales.view(torch.float32), GROUP_NUMEL)
    mean = groups.mean(dim=1, keepdim=True)
    outer, inner = _to_int8(groups - mean)
    return codes, torch.cat([inner, torch.cat([outer, mean], dim=1).view(torch.uint8)], dim=1)


def _decode_nf4_double(codes: Tensor, scales: Tensor) -> Tensor:
    inner = scales[:, :GROUP_NUMEL].view(torch.int8)
    outer = scales[:, GROUP_NUMEL:].view(torch.float32)
    groups = inner.float() * outer[:, :1] + outer[:, 1:]
    blocks = groups.view(-1, 1)[: codes.shape[0]]
    pairs = torch.tensor(_NF4_PAIRS, device=codes.device)
    return F.embedding(codes.int(), pairs).view(-1, BLOCK_NUMEL) * blocks


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a scale for each row, and signed bytes as unsigned ones."""
    scales = rows.abs().amax(dim=1, keepdim=True) / 127
    return scales, (rows / _nonzero(scales)).round().to(torch.int8).view(torch.uint8)


def _encode_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales, codes = _to_int8(weight)
    return codes, scales.view(torch.uint8)


def _encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of floats of 8 bits, of which the largest in each row is their largest number, and scales."""
    scales = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes = (weight / _nonzero(scales)).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def _decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)


def _decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.view(torch.int8).float() * scales.view(torch.float32)


@dataclass(frozen=True, slots=True)
class _Format:
    """Computes bytes from an FP32 weight (out_features, in_features), and values, with padding at the end, from them.

    Bytes are independent of the dtype to which a model is converted.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: _Decode


_FORMATS: Final = {
    "nf4": _Format(_encode_nf4, _decode_nf4),
    "nf4_double": _Format(_encode_nf4_double, _decode_nf4_double),
    "int8": _Format(_encode_int8, _decode_int8),
    "fp8": _Format(_encode_fp8, _decode_fp8),
}
