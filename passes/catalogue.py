"""Every pass there is: the closed list that specs name."""

from __future__ import annotations

from zeroir.errors import UserError
from zeroir.passes.all_reduce_gradients import AllReduceGradients
from zeroir.passes.base import Pass, build, split_spec
from zeroir.passes.bound_gradients import BoundGradients
from zeroir.passes.bucket import Bucket
from zeroir.passes.insert_gathers import InsertGathers
from zeroir.passes.insert_releases import InsertReleases
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
    SaveState,
    PlanMemory,
)


def parse_spec(text: str) -> Pass:
    """The pass that a spec such as ``prefetch{distance=1}`` names; UserError says what is wrong with it."""
    name, options = split_spec(text)
    for kind in PASSES:
        if kind.name == name:
            return build(kind, options)
    names = ", ".join(kind.name for kind in PASSES)
    raise UserError(f"There is no pass `{name}`; the passes are {names}.")
