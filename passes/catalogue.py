"""All passes: the closed list that specs refer to."""

from __future__ import annotations

from zeroir.errors import UserError
from zeroir.passes.base import Pass, build, split_spec
from zeroir.passes.communication.bound_gradients import BoundGradients
from zeroir.passes.communication.bucket import Bucket
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.communication.prefetch import PrefetchGathers
from zeroir.passes.communication.unshard import Unshard
from zeroir.passes.communication.widen_reductions import WidenReductions
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

PASSES: tuple[type[Pass], ...] = (
    SelectSaved,
    Recompute,
    OrderByLayer,
    AllReduceGradients,
    ShardOptimizer,
    ShardGradients,
    ShardParameters,
    InsertGathers,
    Unshard,
    InsertReleases,
    Bucket,
    PrefetchGathers,
    BoundGradients,
    ReplicateShards,
    OverlapUpdate,
    PageOptimizer,
    OffloadOptimizer,
    OffloadGradients,
    OffloadParameters,
    OffloadActivations,
    SpeculateUpdate,
    OffloadToDisk,
    OverlapUploads,
    WidenReductions,
    SaveState,
    PlanMemory,
)


def parse_spec(text: str) -> Pass:
    """Return the pass of a spec such as ``prefetch{distance=1}``; UserError says what is wrong with it."""
    name, options = split_spec(text)
    for kind in PASSES:
        if kind.name == name:
            return build(kind, options)
    names = ", ".join(kind.name for kind in PASSES)
    raise UserError(f"There is no pass `{name}`; the passes are {names}.")
