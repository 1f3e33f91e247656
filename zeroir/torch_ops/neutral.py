"""A mode that replaces attention, dropout, batch norm, recurrence, losses and random operators by device-neutral ones.

The frontend traces under it, and eager PyTorch under it computes the same bits as the traced program. If a matrix
product, a convolution or a norm mixes FP32 and 16-bit operands, as after the addition of an FP32 buffer, the FP32
operands are rounded; in losses the 16-bit inputs are converted to FP32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zeroir.torch_ops._torch_distributed import collective, is_collective
from zeroir.torch_ops.conditions import tracing_conditions
from zeroir.torch_ops.devices import on_one_device
from zeroir.torch_ops.followed_numbers import has_followed, on_tensors, with_values
from zeroir.torch_ops.layouts import (
    LAYOUT_SENSITIVE,
    called_with_settled,
    flattens,
    multiplied,
    multiplied_stacks,
    padded,
    stacks_of,
)
from zeroir.torch_ops.purity import foreign_operator, pure_call
from zeroir.torch_ops.random_numbers import SeededRandomOps
from zeroir.torch_ops.ranks import Ranks, TracedRanks
from zeroir.torch_ops.replaced.attention import attention
from zeroir.torch_ops.replaced.ctc import reduced_ctc_loss
from zeroir.torch_ops.replaced.dropout import dropout
from zeroir.torch_ops.replaced.grouped import grouped_mm
from zeroir.torch_ops.replaced.indexing import has_sizes, item_of
from zeroir.torch_ops.replaced.interpolation import interpolate
from zeroir.torch_ops.replaced.norm_functions import (
    batch_normed,
    in_order_of_torch,
    instance_normed,
)
from zeroir.torch_ops.replaced.one_hot import one_hot
from zeroir.torch_ops.replaced.recurrent import (
    RecurrentStep,
    gru_step,
    lstm_step,
    recurrent,
    relu_step,
    tanh_step,
)
from zeroir.torch_ops.replaced.tensor_of_sizes import are_sizes, tensor_of
from zeroir.torch_ops.types import LOW_PRECISION, widened

Function = Callable[..., object]

_LOSSES: frozenset[object] = frozenset(
    {
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.cosine_embedding_loss,
        F.cross_entropy,
        F.gaussian_nll_loss,
        F.hinge_embedding_loss,
        F.huber_loss,
        F.kl_div,
        F.l1_loss,
        F.margin_ranking_loss,
        F.mse_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.nll_loss,
        F.poisson_nll_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.triplet_margin_loss,
    }
)
_ONE_DTYPE_FUNCTIONS: frozenset[object] = frozenset(
    {
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.group_norm,
        F.layer_norm,
        F.linear,
        F.multi_head_attention_forward,
        F.rms_norm,
        F.scaled_dot_product_attention,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.addmm,
        Tensor.baddbmm,
        Tensor.bmm,
        Tensor.dot,
        Tensor.matmul,
        Tensor.mm,
        Tensor.mv,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.dot,
        torch.einsum,
        torch.gru,
        torch.lstm,
        torch.matmul,
        torch.mm,
        torch.mv,
        torch.rnn_relu,
        torch.rnn_tanh,
        torch.vdot,
    }
)


class UntracedCallError(NotImplementedError):
    """The model calls a function that no trace holds."""


class BackwardCallError(UntracedCallError):
    """The model computes gradients itself."""


class NeutralOps(TorchFunctionMode):
    """Replace attention, dropout, batch norm and recurrence; compute losses of 16-bit inputs in FP32.

    Devices that the model names are ignored. Each dropout and each random operator uses the next element of ``seeds``
    (i64[sites]); ``sites`` counts them. ``around`` wraps every torch function that the model calls, so that a tracer
    can annotate its nodes. Without ``ranks`` the model may not send tensors to other ranks.
    """

    is_traced = True
    """Whether a trace has to hold what the model calls."""

    def __init__(
        self,
        seeds: Tensor,
        around: Callable[[Function], Function] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.seeds = seeds
        self.sites = 0
        self._around = around
        self._ranks = ranks
        self._random_ops = SeededRandomOps(self.seed)
        self._replacements: Mapping[object, Function] = {
            F.scaled_dot_product_attention: self._attention,
            F.dropout: self._dropout,
            torch.dropout: self._dropout,
            F.dropout1d: self._dropout_channels,
            F.dropout2d: self._dropout_channels,
            F.dropout3d: self._dropout_channels,
            F.batch_norm: batch_normed,
            torch.batch_norm: in_order_of_torch(batch_normed),
            F.instance_norm: instance_normed,
            F.interpolate: interpolate,
            F.upsample: interpolate,
            F.one_hot: one_hot,
            torch.instance_norm: in_order_of_torch(instance_normed),
            F.grouped_mm: partial(_grouped_mm, F.grouped_mm),
            torch._grouped_mm: partial(_grouped_mm, torch._grouped_mm),
            torch.gru: partial(self._recurrent, gru_step),
            torch.lstm: partial(self._recurrent, lstm_step),
            torch.rnn_relu: partial(self._recurrent, relu_step),
            torch.rnn_tanh: partial(self._recurrent, tanh_step),
        }
        self._own = self._replacements.keys() | _LOSSES | _ONE_DTYPE_FUNCTIONS
        self._depth = 0

    def __enter__(self) -> Self:
        """Enter the mode, which is reentrant."""
        if self._depth == 0:
            self._random_ops.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._random_ops.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` or its replacement.

        Raises:
            ImpureOperatorError: if it is a foreign operator that breaks a rule.
            UntracedCallError: if it is another function that no trace holds.
            CollectiveError: if it sends tensors to other ranks as no program can.
        """
        call = self._wrapped(on_one_device(func))
        named_args = dict(kwargs or {})
        if isinstance(self._ranks, TracedRanks) and self._ranks.has_put:
            self._wrapped(self._ranks.settle)()
            args, named_args = self._ranks.settled((args, named_args))
        if is_collective(func):
            return self._wrapped(collective)(func, args, named_args, self._ranks)
        if has_followed(args) or has_followed(named_args):
            on_numbers = on_tensors(func, args, named_args)
            if on_numbers is not None:
                return self._wrapped(on_numbers)()
            if isinstance(self._ranks, TracedRanks) and self._ranks.is_placing(func, args):
                return self._wrapped(self._ranks.placed)(func, args, named_args)
            if getattr(func, "__module__", "") == F.__name__ and func not in self._own:
                return self._inside(call, args, named_args)
            return self.__torch_function__(func, types, with_values(args), with_values(named_args))
        foreign = foreign_operator(func)
        if foreign is not None and self.is_traced:
            return pure_call(foreign, lambda: call(*args, **named_args))
        if func in _ONE_DTYPE_FUNCTIONS:
            args, named_args = self._wrapped(_with_one_dtype)(func, args, named_args)  # type: ignore[misc]
        if func in self._replacements:
            return self._wrapped(self._replacements[func])(*args, **named_args)
        if self.is_traced and isinstance(func, torch._ops.HigherOrderOperator):
            # Within vmap an autograd.Function is called by an operator that computes nothing itself.
            if str(func) == "custom_function_call":
                return call(*args, **named_args)
            raise UntracedCallError(
                f"the higher-order operator {func!s} cannot be traced; use tensor operations such as "
                "torch.where"
            )
        if func is Tensor.backward and self.is_traced:
            raise BackwardCallError(
                "forward calls backward(); return the loss, whose gradients the program computes"
            )
        if func is F.ctc_loss:
            return self._wrapped(reduced_ctc_loss)(*(widened(arg) for arg in args), **named_args)
        if func in _LOSSES:
            return call(
                *(widened(arg) for arg in args), **{k: widened(v) for k, v in named_args.items()}
            )
        if func is F.multi_head_attention_forward:
            return self._inside(call, args, named_args)
        if flattens(func, args, named_args):
            return self._wrapped(partial(multiplied, call))(*args, **named_args)
        if stacks_of(func, args, named_args):
            return self._wrapped(partial(multiplied_stacks, call))(*args, *named_args.values())
        if func in (torch.tensor, torch.as_tensor) and args and are_sizes(args[0]):
            return self._wrapped(on_one_device(tensor_of))(*args, **named_args)
        if func is Tensor.__getitem__ and has_sizes(args[1]):
            return self._wrapped(item_of)(*args)
        if func is F.pad:
            return self._wrapped(partial(padded, call))(*args, **named_args)
        if func in LAYOUT_SENSITIVE:
            return self._wrapped(partial(called_with_settled, call))(args, named_args)
        return call(*args, **named_args)

    def _inside(
        self, call: Function, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Run a function of torch that is Python code under the mode, so that the functions that it calls count."""
        with ExitStack() as stack:
            for name in ("", "_unary", "_variadic"):
                stack.enter_context(mock.patch.object(F, f"has_torch_function{name}", _never))
            stack.enter_context(self)
            return call(*args, **kwargs)

    def _wrapped(self, func: Function) -> Function:
        return func if self._around is None else self._around(func)

    def seed(self) -> Tensor:
        """Return the seed of the next dropout or random operator, i64[1]."""
        if self.sites >= self.seeds.numel():
            raise IndexError(f"random numbers are drawn more often than the {self.sites} seeds")
        self.sites += 1
        return self.seeds[self.sites - 1 : self.sites]

    def _dropout(
        self,
        input: Tensor,  # noqa: A002 - torch's name, which callers may use
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 0 or not (training if train is None else train):
            return input
        result: Tensor = dropout(input, float(p), self.seed())[0]
        return input.copy_(result) if inplace else result

    def _dropout_channels(
        self,
        input: Tensor,  # noqa: A002 - torch's name, which callers may use
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
        mask = self._dropout(input.new_ones(shape), p, training)
        return input.mul_(mask) if inplace else input * mask

    def _recurrent(
        self,
        step: RecurrentStep,
        x: Tensor,
        states: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool | Sequence[Tensor],
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        if not isinstance(
            has_biases, bool
        ):  # packed sequences pass their lengths before the states
            raise NotImplementedError("packed sequences are not supported; pad them")
        return recurrent(
            step,
            x,
            [states] if isinstance(states, Tensor) else states,
            weights,
            has_biases,
            num_layers,
            dropout if train else 0.0,
            bidirectional,
            batch_first,
            self._dropout,
        )

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        has_same_batch = query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
        is_mask_constant = attn_mask is None or not attn_mask.requires_grad
        if query.dim() == 4 and has_same_batch and dropout_p == 0 and is_mask_constant:
            mask = attn_mask
            while mask is not None and mask.dim() < 4:
                mask = mask.unsqueeze(0)
            result: Tensor = attention(query, key, value, mask, is_causal, scale)[0]
            return result
        # Other cases in plain operators: dropout and a gradient of the mask need the scores.
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            size = (query.shape[-2], key.shape[-2])
            attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(scores.float(), -1).to(value.dtype)
        return self._dropout(weights, dropout_p) @ value


def _grouped_mm(
    original: Function, x: Tensor, weight: Tensor, *, offs: Tensor | None = None, **others: object
) -> object:
    """Compute the product of groups in any dtype; unsupported cases are left to torch."""
    is_plain = offs is not None and all(other is None for other in others.values())
    if offs is None or not is_plain or x.dtype is torch.bfloat16 or x.dtype != weight.dtype:
        return original(x, weight, offs=offs, **others)
    return grouped_mm(x, weight, offs)


def _with_one_dtype(
    func: Function, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Round the FP32 tensors among the arguments to the 16-bit dtype of the others, if there is one."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dtypes = {x.dtype for x in tensors}
    if torch.float64 in dtypes and len({x for x in dtypes if x.is_floating_point}) > 1:
        # torch accepts this for fake tensors, and fails when the program runs.
        raise TypeError(
            f"{func.__name__} mixes float64 with narrower tensors; parameters have the dtype of --precision, so "
            "convert what meets them"
        )
    low = next((dtype for dtype in LOW_PRECISION if dtype in dtypes), None)
    if low is None or torch.float32 not in dtypes:
        return args, kwargs

    def rounded(x: Tensor) -> Tensor:
        return x.to(low) if x.dtype == torch.float32 else x

    return (
        tuple(pytree.tree_map_only(Tensor, rounded, arg) for arg in args),
        {key: pytree.tree_map_only(Tensor, rounded, arg) for key, arg in kwargs.items()},
    )


def _never(*_: object) -> bool:
    return False


@contextlib.contextmanager
def neutral_ops(seeds: Tensor) -> Iterator[NeutralOps]:
    """Run eager PyTorch with the operators of traced programs; ``seeds`` is i64[sites], one per random operator.

    The seeds are used in call order, starting with the first, so enter this once per forward.
    """
    with tracing_conditions(), NeutralOps(seeds) as mode:
        yield mode
