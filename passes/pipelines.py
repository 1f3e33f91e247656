"""The ZeRO stages as pipelines: each is the stage below plus one pass, and stage 3 plus a few.

Where gradients accumulate on each rank, stages 2 and 3 omit the pass that keeps them as shards.
"""

from __future__ import annotations

from dataclasses import replace

from zeroir.config import CompileOptions
from zeroir.config.offload_places import OPTIMIZER
from zeroir.errors import InternalError
from zeroir.ir.program import Program
from zeroir.passes.base import Pass
from zeroir.passes.catalogue import PASSES, parse_spec
from zeroir.passes.communication.bound_gradients import BoundGradients
from zeroir.passes.communication.bucket import Bucket
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.communication.prefetch import PrefetchGathers
from zeroir.passes.communication.unshard import Unshard
from zeroir.passes.communication.widen_reductions import WidenReductions
from zeroir.passes.manager import Proof, prove
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.recompute import Recompute
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.memory.select_saved import SelectSaved
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.passes.offload.overlap_uploads import OverlapUploads
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.stages.all_reduce_gradients import AllReduceGradients
from zeroir.passes.stages.insert_gathers import InsertGathers
from zeroir.passes.stages.insert_releases import InsertReleases
from zeroir.passes.stages.replicate_shards import ReplicateShards
from zeroir.passes.stages.shard_gradients import ShardGradients
from zeroir.passes.stages.shard_optimizer import ShardOptimizer
from zeroir.passes.stages.shard_parameters import ShardParameters

__all__ = [
    "PASSES",
    "for_options",
    "lower",
    "lower_with_proof",
    "offload_passes",
    "parse_spec",
    "stage_passes",
]


def for_options(options: CompileOptions) -> tuple[Pass, ...]:
    """Return the passes for a user's options; the last one plans the memory of the others' result."""
    # The training state is saved after all passes that change what it consists of.
    return (*stage_passes(options, offload_passes(options)), SaveState(), PlanMemory())


def stage_passes(options: CompileOptions, offload: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Return the passes of a ZeRO stage with the options that change it; those of ``offload`` come last.

    An order of a whole step adds whole gradients, as ``accumulate_locally`` does, but in stages 2 and 3 their sums live
    only until they are reduced.
    """
    stage, replicas = options.stage, options.replicas or 1
    steps, prefetch, unshard = options.micro_steps, options.prefetch, options.unshard
    has_gradient_shards = stage >= 2 and (steps.is_step_interleaved or not steps.accumulate_locally)
    made: list[Pass] = []
    if options.recompute.select_saved:
        made.append(SelectSaved())
    if options.recompute.units:
        # After it, so that only values that are still saved are recomputed.
        made.append(Recompute(units=options.recompute.units))
    if steps.interleaved > 1:
        # After both, which choose what one micro-batch keeps for its backward.
        made.append(
            OrderByLayer(micro_batches=steps.interleaved, whole_step=steps.is_step_interleaved)
        )
    made.append(AllReduceGradients(dp=options.world_size // replicas))
    if stage >= 1:
        made.append(ShardOptimizer())
    if has_gradient_shards:
        made.append(ShardGradients())
    if stage == 3:
        made += [ShardParameters(), InsertGathers(elide=options.communication.elide)]
        if unshard.units or unshard.most_bytes is not None:
            made.append(Unshard(units=unshard.units or None, within=unshard.most_bytes))
        made.append(InsertReleases())
    collectives = options.communication
    if collectives.bucket or collectives.bucket_gathers:
        # Before gathers are issued ahead: a bucket is gathered as one.
        made.append(Bucket(bytes=collectives.bucket, gathers=collectives.bucket_gathers))
    if stage == 3 and prefetch.memory is None:
        distance = prefetch.units if prefetch.most_bytes is None else None
        made.append(PrefetchGathers(distance=distance, bytes=prefetch.most_bytes))
    if has_gradient_shards:
        made.append(BoundGradients(live=collectives.live_gradients))
    if options.replicas is not None:
        # After the others, which work along one axis: it adds a second one.
        made.append(ReplicateShards(replicas=options.replicas))
    if options.is_update_overlapped:
        made.append(OverlapUpdate())
    made += offload
    if options.precision.reduce_dtype is not None:
        made.append(WidenReductions())
    if stage == 3 and prefetch.memory is not None:
        # After all passes that take memory: it uses the rest of the budget.
        made.append(PrefetchGathers(budget=prefetch.memory_bytes))
    return tuple(made)


def offload_passes(options: CompileOptions) -> tuple[Pass, ...]:
    """Return the passes that keep state or activations outside device memory."""
    offload = options.offload
    made: list[Pass] = []
    if offload.page_optimizer_bytes is not None:
        made.append(
            PageOptimizer(
                device_bytes=offload.page_optimizer_bytes, page_bytes=offload.page_size_bytes
            )
        )
    for kind in offload.what:
        units = offload.units_of(kind) or None
        match kind:
            case "optimizer":
                made.append(OffloadOptimizer(units=units, fraction=offload.fraction))
            case "gradients":
                made.append(OffloadGradients(units=units))
            case "parameters":
                made.append(OffloadParameters(units=units))
            case "activations":
                made.append(OffloadActivations(units=units))
            case _:
                raise InternalError(f"There is no pass that offloads {kind}.")
    if offload.speculate and "optimizer" in offload.what:
        made.append(SpeculateUpdate())
    if offload.kept_on_disk:
        made.append(OffloadToDisk(what=offload.kept_on_disk, cache_bytes=offload.host_cache_bytes))
    if OPTIMIZER in offload.what:
        made.append(OverlapUploads())
    return tuple(made)


def lower(logical: Program, options: CompileOptions) -> Program:
    """Return the scheduled program: the logical one after the passes for the options, each verified."""
    return lower_with_proof(logical, options).program


def lower_with_proof(logical: Program, options: CompileOptions) -> Proof:
    """Return the scheduled program as ``lower`` does, with the report on that program."""
    return prove(replace(logical, options=options), for_options(options))
