"""The ZeRO stages as pipelines: each is the stage below plus one pass, and stage 3 plus a few.

With gradients that accumulate on each rank, stages 2 and 3 do without the pass that keeps them as shards.
"""

from __future__ import annotations

from dataclasses import replace

from zeroir.config import CompileOptions
from zeroir.config.offload_fields import OPTIMIZER
from zeroir.errors import InternalError, UserError
from zeroir.ir.program import Program
from zeroir.passes.all_reduce_gradients import AllReduceGradients
from zeroir.passes.base import Pass
from zeroir.passes.bound_gradients import BoundGradients
from zeroir.passes.bucket import Bucket
from zeroir.passes.catalogue import PASSES, parse_spec
from zeroir.passes.insert_gathers import InsertGathers
from zeroir.passes.insert_releases import InsertReleases
from zeroir.passes.manager import Proof, prove
from zeroir.passes.offload_activations import OffloadActivations
from zeroir.passes.offload_gradients import OffloadGradients
from zeroir.passes.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload_parameters import OffloadParameters
from zeroir.passes.offload_to_disk import OffloadToDisk
from zeroir.passes.order_by_layer import OrderByLayer
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.overlap_uploads import OverlapUploads
from zeroir.passes.page_optimizer import PageOptimizer
from zeroir.passes.plan_memory import PlanMemory
from zeroir.passes.prefetch import PrefetchGathers
from zeroir.passes.recompute import Recompute
from zeroir.passes.replicate_shards import ReplicateShards
from zeroir.passes.save_state import SaveState
from zeroir.passes.select_saved import SelectSaved
from zeroir.passes.shard_gradients import ShardGradients
from zeroir.passes.shard_optimizer import ShardOptimizer
from zeroir.passes.shard_parameters import ShardParameters
from zeroir.passes.speculate_update import SpeculateUpdate
from zeroir.passes.unshard import Unshard

__all__ = ["PASSES", "for_options", "for_stage", "lower", "lower_with_proof", "parse_spec"]


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
    """The passes of a ZeRO stage, 0 to 3, on that many ranks.

    With ``replicas`` these are as many groups, each of which holds all shards. Collectives are merged up to
    ``bucket`` bytes, gathers up to ``bucket_gathers`` if that is given, and with ``overlap_update`` the update runs in
    the backward. With ``select`` the program is first made to save less for its backward. The units that
    ``recompute`` names are computed once more before their backward, and those of ``unshard``, or with uses at most
    ``unshard_bytes`` apart, are gathered once. With ``ahead_bytes`` at most these bytes are gathered ahead, and with a
    ``budget`` in bytes as early as it allows, instead of ``distance`` units ahead. With
    ``accumulate_locally`` whole gradients are added up, and reduced in the last micro-step. An ``order`` of a whole
    step adds them up, too, but in stages 2 and 3 their sums live only until they are reduced. The passes of ``offload``
    come when all else has its place.
    """
    if world_size % (replicas or 1):
        raise UserError(f"{world_size} ranks do not make {replicas} groups of equal size.")
    replicate: tuple[Pass, ...] = (AllReduceGradients(dp=world_size // (replicas or 1)),)
    if not 0 <= stage <= 3:
        raise UserError(f"There is no stage {stage}; the ZeRO stages are 0, 1, 2 and 3.")
    is_whole_step = order is not None and order.whole_step
    has_gradient_shards = stage >= 2 and (is_whole_step or not accumulate_locally)
    shard: tuple[Pass, ...] = (
        *((ShardOptimizer(),) if stage >= 1 else ()),
        *((ShardGradients(),) if has_gradient_shards else ()),
        *((ShardParameters(),) if stage == 3 else ()),
    )
    gather: tuple[Pass, ...] = (
        InsertGathers(elide=elide),
        *(
            (Unshard(units=unshard or None, within=unshard_bytes),)
            if unshard or unshard_bytes is not None
            else ()
        ),
        InsertReleases(),
    )
    # Before gathers are issued ahead: a bucket is gathered as one.
    is_merged = bucket or bucket_gathers
    merge: tuple[Pass, ...] = (Bucket(bytes=bucket, gathers=bucket_gathers),) if is_merged else ()
    at = PrefetchGathers(distance=distance if ahead_bytes is None else None, bytes=ahead_bytes)
    ahead: tuple[Pass, ...] = (at,) if budget is None else ()
    bound: tuple[Pass, ...] = (BoundGradients(live=live),)
    # After the others, which work along one axis: it adds a second one.
    across: tuple[Pass, ...] = () if replicas is None else (ReplicateShards(replicas=replicas),)
    # After all passes that take memory: it uses the rest of the budget.
    early: tuple[Pass, ...] = () if budget is None else (PrefetchGathers(budget=budget),)
    return (
        ((SelectSaved(),) if select else ())
        # After it, so that only values that are still saved are recomputed.
        + ((Recompute(units=recompute),) if recompute else ())
        # After both, which choose what one micro-batch keeps for its backward.
        + (() if order is None else (order,))
        + replicate
        + shard
        + (gather if stage == 3 else ())
        + merge
        + (ahead if stage == 3 else ())
        + (bound if has_gradient_shards else ())
        + across
        + ((OverlapUpdate(),) if overlap_update else ())
        + offload
        + (early if stage == 3 else ())
    )


def for_options(options: CompileOptions) -> tuple[Pass, ...]:
    """The passes that a user's choices amount to; the last one plans the memory of what the others made."""
    return (
        *for_stage(
            options.stage,
            options.world_size,
            replicas=options.replicas,
            elide=options.elide,
            distance=options.prefetch,
            ahead_bytes=options.prefetch_bytes,
            bucket=options.bucket,
            bucket_gathers=options.bucket_gathers,
            live=options.live_gradients,
            overlap_update=options.is_update_overlapped,
            select=options.select_saved,
            recompute=options.recompute,
            unshard=options.unshard,
            unshard_bytes=options.unshard_bytes,
            budget=options.prefetch_budget_bytes,
            accumulate_locally=options.accumulate_locally,
            order=_order(options),
            offload=_offload(options),
        ),
        # After all passes that change what the state of the training is.
        SaveState(),
        PlanMemory(),
    )


def _order(options: CompileOptions) -> OrderByLayer | None:
    """The pass that runs several micro-batches unit by unit."""
    micro_batches = options.interleaved
    if micro_batches == 1:
        return None
    return OrderByLayer(micro_batches=micro_batches, whole_step=options.is_step_interleaved)


def _offload(options: CompileOptions) -> tuple[Pass, ...]:
    """The passes that keep state or activations outside device memory."""
    made: list[Pass] = []
    if options.page_optimizer_bytes is not None:
        made.append(
            PageOptimizer(
                device_bytes=options.page_optimizer_bytes, page_bytes=options.page_size_bytes
            )
        )
    for kind in options.offload:
        units = options.offloaded_units(kind) or None
        match kind:
            case "optimizer":
                made.append(OffloadOptimizer(units=units, fraction=options.offload_fraction))
            case "gradients":
                made.append(OffloadGradients(units=units))
            case "parameters":
                made.append(OffloadParameters(units=units))
            case "activations":
                made.append(OffloadActivations(units=units))
            case _:
                raise InternalError(f"There is no pass that offloads {kind}.")
    if options.speculate and "optimizer" in options.offload:
        made.append(SpeculateUpdate())
    if options.kept_on_disk:
        made.append(OffloadToDisk(what=options.kept_on_disk, cache_bytes=options.host_cache_bytes))
    if OPTIMIZER in options.offload:
        made.append(OverlapUploads())
    return tuple(made)


def lower(logical: Program, options: CompileOptions) -> Program:
    """The scheduled program: the logical one after the passes that the options ask for, each verified."""
    return lower_with_proof(logical, options).program


def lower_with_proof(logical: Program, options: CompileOptions) -> Proof:
    """The scheduled program as in ``lower``, with the report on that very program."""
    return prove(replace(logical, options=options.to_pairs()), for_options(options))
