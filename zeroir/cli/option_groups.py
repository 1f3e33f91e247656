"""The groups in which ``--help`` lists the options of a compilation and of a run."""

from __future__ import annotations

from typing import Final, TypeVar

from cyclopts import Group, Parameter
from pydantic import BaseModel

from zeroir.config import GivenOptions
from zeroir.config.offload_fields import GivenOffload

__all__ = [
    "CHECKPOINTS",
    "JOB",
    "OPTION_GROUPS",
    "REPORTS",
    "TRAINING",
    "OffloadOptions",
    "Options",
]

TRAINING: Final = Group.create_ordered("Training")
CHECKPOINTS: Final = Group.create_ordered("Checkpoints")
REPORTS: Final = Group.create_ordered("Reports")
JOB: Final = Group.create_ordered("Job and kernels")

OPTION_GROUPS: Final = {
    "Sharding": "stage mesh world_size units",
    "Precision": "precision keep_fp32",
    "Steps": "micro_steps order accumulate_locally evaluate outputs",
    "Optimizer": "optimizer lr schedule weight_decay no_decay group clip ema optimizer_bits",
    "Settings of single optimizers": "momentum dampening nesterov beta1 beta2 eps ns_steps ns_coefficients "
    "adjust_lr_fn beta2_decay eps2 d",
    "Communication": "prefetch prefetch_bytes prefetch_budget bucket bucket_gathers overlap_update elide",
    "Memory": "memory_budget recompute select_saved unshard unshard_bytes live_gradients",
    "Offloading": "offload offload_to offload_units offload_fraction host_cache page_optimizer page_bytes "
    "speculate",
    "Loss scale (fp16)": "loss_scale initial_loss_scale loss_scale_window loss_scale_factor loss_scale_hysteresis "
    "loss_scale_consecutive_hysteresis minimum_loss_scale",
}
"""The names of the options of each group, in the order of the groups; the fields say the order within a group."""

OptionsT = TypeVar("OptionsT", bound=BaseModel)


def _grouped(options: type[OptionsT]) -> type[OptionsT]:
    """A class of options whose fields have groups; those of the classes that it inherits from have none."""
    for title, names in OPTION_GROUPS.items():
        group = Group.create_ordered(title)
        for name in names.split():
            if name in options.model_fields:
                options.model_fields[name].metadata.append(Parameter(group=group))
    return options


@_grouped
class Options(GivenOptions):
    """The options of ``zeroir compile``."""


@_grouped
class OffloadOptions(GivenOffload):
    """The options of ``zeroir run`` by which it lowers a program again."""
