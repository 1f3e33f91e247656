"""DeepSpeed's rule: train_batch_size = micro-batch size × accumulation steps × ranks; two determine the third."""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.errors import UserError

_RULE = "train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes in samples, of a step over all ranks and of one rank's micro-batch, and the micro-steps of a step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch_sizes(
    *,
    train: int | None,
    micro: int | None,
    accumulation: int | None,
    world_size: int,
    example: int,
) -> BatchSizes:
    """Compute the batch sizes from the given ones.

    With ``train`` alone there is no accumulation, as in DeepSpeed. Without ``train`` and ``micro``, where DeepSpeed
    fails, the micro-batch is the ``example``.

    Raises:
        UserError: if they contradict each other, or the third is not a whole number.
    """
    if train is None:
        micro = example if micro is None else micro
        accumulation = accumulation or 1
        return BatchSizes(
            train=micro * accumulation * world_size, micro=micro, accumulation=accumulation
        )
    if micro is None:
        accumulation = accumulation or 1
        micro = _divided(train, accumulation * world_size, "gradient_accumulation_steps × ranks")
    elif accumulation is None:
        accumulation = _divided(train, micro * world_size, "train_micro_batch_size_per_gpu × ranks")
    if train != micro * accumulation * world_size:
        raise UserError(
            f"train_batch_size is {train}, but {micro} × {accumulation} × {world_size} is "
            f"{micro * accumulation * world_size}: {_RULE}."
        )
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)


def _divided(train: int, divisor: int, words: str) -> int:
    if train % divisor:
        raise UserError(
            f"train_batch_size is {train}, which is no multiple of {words} = {divisor}: {_RULE}."
        )
    return train // divisor
