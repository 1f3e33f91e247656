"""Defaults of options that follow from a user's model and data loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zeroir.api.keywords import CompileKeywords, flat_values
from zeroir.errors import UserError
from zeroir.runtime.training.random_states import host_generators_kept

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from zeroir.config import FloatName


def first_batch(loader: DataLoader[Any], rows: int) -> object:
    """Return a batch of a data set's first samples, without changing the data loader and random generators."""
    dataset = cast("Any", loader.dataset)
    collate = loader.collate_fn
    assert collate is not None
    with host_generators_kept():
        if isinstance(dataset, torch.utils.data.IterableDataset):
            samples: Iterable[object] = islice(iter(dataset), rows)
        else:
            samples = (dataset[index] for index in range(min(rows, len(dataset))))
        return collate(list(samples))


def require_effect(
    options: CompileKeywords,
    giver: str,
    *,
    instead: Mapping[str, str],
    decided: Mapping[str, tuple[int, str]],
) -> None:
    """Raise a UserError if a loop of another library would ignore an option; ``giver`` is what takes the options.

    ``instead`` says what to use instead of an option that the loop ignores; ``decided`` has the value of an option that
    the loop determines, and where.
    """
    given = cast("Mapping[str, object]", options)
    try:
        flat = flat_values({name: value for name, value in given.items() if name != "optimizer"})
    except UserError as error:
        raise UserError(f"{giver} takes the keywords of zeroir.compile. {error}") from None
    for name, remedy in instead.items():
        value = {**given, **flat}.get(name)
        if value is not None:
            raise UserError(f"{name}={value!r} of {giver} has no effect: {remedy}.")
    for name, (value, place) in decided.items():
        if flat.get(name, value) != value:
            raise UserError(
                f"{name}={flat[name]!r} of {giver} has no effect: {place}, and that is {value}."
            )


def precision_of(model: nn.Module) -> FloatName:
    """Return ``bf16`` if all floating-point parameters of a model are in bfloat16, otherwise ``fp32``."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return "bf16" if dtypes == {torch.bfloat16} else "fp32"


def multiple_of(collator: object) -> int:
    """Return the number of which a data collator makes every length a multiple."""
    multiple = getattr(collator, "pad_to_multiple_of", None)
    return multiple if isinstance(multiple, int) and multiple > 0 else 1


def most_positions_of(model: nn.Module) -> int | None:
    """Return the greatest length of a model of transformers, if it has one."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
