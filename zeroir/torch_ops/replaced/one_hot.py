"""One-hot vectors by the operator that refuses a class which does not exist, as eager PyTorch does.

Torch's own decomposition for tensors without data compares each class with all numbers, and has zeros for such a class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.types import IntLikeType

_of_torch: Callable[..., Tensor] = F.one_hot


def one_hot(tensor: Tensor, num_classes: IntLikeType = -1) -> Tensor:
    """Compute ``torch.nn.functional.one_hot`` with these arguments."""
    is_number = isinstance(num_classes, SymInt) or num_classes > 0
    if not is_number or tensor.dtype != torch.int64:
        return _of_torch(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)
