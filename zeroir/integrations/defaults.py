"""What a user's model and data loader say about the program, where no option does."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zeroir.errors import UserError
from zeroir.runtime.random_states import host_generators_kept

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from zeroir.api.keywords import CompileKeywords
    from zeroir.config import Precision


def first_batch(loader: DataLoader[Any], rows: int) -> object:
    """A batch of the first samples of a data set; it leaves the data loader and random generators as they are."""
    dataset = cast("Any", loader.dataset)
    collate = loader.collate_fn
    assert collate is not None
    with host_generators_kept():
        if isinstance(dataset, torch.utils.data.IterableDataset):
            samples: Iterable[object] = islice(iter(dataset), rows)
        else:
            samples = (dataset[index] for index in range(min(rows, len(dataset))))
        return collate(list(samples))


def require_no_optimizer(options: CompileKeywords, giver: str, remedy: str) -> None:
    """Raise UserError where options for the compiler name an optimizer, since the user gives one in another place."""
    if "optimizer" in options:
        raise UserError(
            f"optimizer={options['optimizer']!r} of {giver} has no effect: name the optimizer in {remedy}."
        )


def precision_of(model: nn.Module) -> Precision:
    """``bf16`` for a model all of whose floating-point parameters are in bfloat16, and ``fp32`` for another one."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return "bf16" if dtypes == {torch.bfloat16} else "fp32"
