"""The passes of a ZeRO stage, for tests that need few options and none of their rules."""

from __future__ import annotations

from zeroir.config import CompileOptions
from zeroir.passes.base import Pass
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.pipelines import stage_passes


def for_stage(
    stage: int,
    world_size: int,
    *,
    replicas: int | None = None,
    elide: bool = True,
    bucket: int = 0,
    bucket_gathers: int | None = None,
    distance: int = 1,
    ahead_bytes: int | None = None,
    live: int = 2,
    overlap_update: bool = False,
    select: bool = False,
    recompute: tuple[str, ...] = (),
    unshard: tuple[str, ...] = (),
    unshard_bytes: int | None = None,
    budget: int | None = None,
    accumulate_locally: bool = False,
    order: OrderByLayer | None = None,
    offload: tuple[Pass, ...] = (),
) -> tuple[Pass, ...]:
    """The passes, without those that save the state and plan memory; by default nothing else is optimised.

    ``distance``, ``ahead_bytes`` and ``budget`` say how early parameters are gathered: so many units, bytes, or as the
    memory allows.
    """
    values: dict[str, object] = {
        "stage": stage,
        "world_size": world_size,
        "elide": elide,
        "bucket": bucket,
        "bucket_gathers": bucket_gathers,
        "prefetch": distance,
        "prefetch_bytes": ahead_bytes,
        "prefetch_budget": None if budget is None else str(budget),
        "live_gradients": live,
        "overlap_update": overlap_update,
        "select_saved": select,
        "recompute": recompute,
        "unshard": unshard,
        "unshard_bytes": unshard_bytes,
        "accumulate_locally": accumulate_locally,
    }
    if replicas is not None:
        values["mesh"] = f"replicate={replicas},shard={world_size // replicas}"
    if order is not None:
        batches = order.micro_batches
        values["order"] = f"layer={batches}"
        values["micro_steps"] = batches if order.whole_step else 2 * batches
    return stage_passes(CompileOptions.from_flat(values), offload)
