"""The CTC loss as one operator pair whose result types do not depend on the values of the lengths.

The size of the tensor that torch's operator saves for the backward depends on the longest target, so it reads the
lengths while a model is traced. This one uses the longest possible target, and calls torch's kernels.

Tensors: log probabilities ``(steps, batch, classes)``; targets ``(batch, longest)``, or concatenated; lengths i64
``(batch,)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroir.torch_ops.define import define, differentiate, fake

aten = torch.ops.aten


def ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each sequence (batch,), and the saved tensor alpha (batch, steps, 2 × longest + 1).

    Torch leaves alpha undefined after the end of a sequence and of its target. Here it is minus infinity, so that equal
    inputs save equal tensors.
    """
    loss, alpha = aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    alpha = F.pad(alpha, (0, 2 * targets.shape[-1] + 1 - alpha.shape[-1]))
    steps = torch.arange(alpha.shape[1], device=alpha.device)
    states = torch.arange(alpha.shape[2], device=alpha.device)
    is_behind_sequence = steps >= input_lengths.to(alpha.device)[:, None]
    is_behind_target = states > 2 * target_lengths.to(alpha.device)[:, None]
    is_undefined = is_behind_sequence[:, :, None] | is_behind_target[:, None, :]
    return loss, alpha.masked_fill(is_undefined, -torch.inf)


def ctc_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Compute the gradient of the log probabilities, in their layout."""
    longest = int(target_lengths.max()) if target_lengths.numel() else 0
    gradient: Tensor = aten._ctc_loss_backward.Tensor(
        grad,
        log_probs,
        targets,
        input_lengths,
        target_lengths,
        loss,
        alpha[..., : 2 * longest + 1].contiguous(),
        blank,
        zero_infinity,
    )
    return torch.empty_like(log_probs).copy_(gradient)


ctc_loss = define("zeroir::ctc_loss", ctc)
ctc_loss_backward = define("zeroir::ctc_loss_backward", ctc_backward)


@fake("zeroir::ctc_loss")
def _(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * targets.shape[-1] + 1)


@fake("zeroir::ctc_loss_backward")
def _(_: Tensor, log_probs: Tensor, *__: object) -> Tensor:
    return torch.empty_like(log_probs)


differentiate(
    "zeroir::ctc_loss",
    lambda grad, *saved: (ctc_loss_backward(grad.contiguous(), *saved),),
    lambda inputs, results: ((*inputs[:4], *results), inputs[4:]),
)


def reduced_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | tuple[int, ...],
    target_lengths: Tensor | tuple[int, ...],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute ``torch.nn.functional.ctc_loss`` with zeroir's operator; the arguments are the same."""
    is_batched = log_probs.dim() == 3
    steps, lengths = _lengths(input_lengths, log_probs), _lengths(target_lengths, log_probs)
    if not is_batched:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.unsqueeze(0)
    loss: Tensor = ctc_loss(log_probs, targets.long(), steps, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == torch.inf, torch.zeros_like(loss), loss)
    match reduction:
        case "mean":
            return (loss / lengths.to(loss.dtype).clamp(min=1)).mean()
        case "sum":
            return loss.sum()
        case _:
            return loss if is_batched else loss.squeeze(0)


def _lengths(lengths: Tensor | tuple[int, ...] | int, log_probs: Tensor) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.long().reshape(-1)
    numbers = [lengths] if isinstance(lengths, int) else list(lengths)
    return torch.tensor(numbers, dtype=torch.int64, device=log_probs.device)
