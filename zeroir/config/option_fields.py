"""The options of a compilation, each by itself: types, limits, defaults and the texts of the command line's help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from zeroir.config.field_types import STEP, Names, OptionalAmount, Order
from zeroir.config.groups import SEPARATOR, GroupError, group_text
from zeroir.config.meshes import default_world_size, parse_mesh
from zeroir.config.offload_fields import (
    HOST,
    PAGE_BYTES,
    HostCache,
    Offload,
    OffloadFraction,
    OffloadTo,
    OffloadUnits,
    OptimizerBits,
    PageBytes,
    PageOptimizer,
    Speculate,
)
from zeroir.errors import UserError
from zeroir.ir.limits import LARGEST_SCALAR, MOST_BYTES, MOST_COUNT, MOST_RANKS
from zeroir.ir.optimizers.catalogue import OPTIONS, USUAL, Algorithm
from zeroir.schedules import parse_schedule

Precision = Literal["fp32", "bf16", "fp16"]


AdjustLr = Literal["original", "match_rms_adamw"]


def _setting(name: str, *, shows_default: bool = True) -> FieldInfo:
    """The limits and the description of an option that is a setting of some optimizers."""
    option = OPTIONS[name]
    default = f" [default: {option.default_text}]" if shows_default else ""
    start, stop = option.limits.at_least, option.limits.at_most
    if option.kind in (int, float):
        start = -LARGEST_SCALAR if start is None and option.limits.above is None else start
        stop = LARGEST_SCALAR if stop is None and option.limits.below is None else stop
    info: FieldInfo = Field(
        ge=start,
        gt=option.limits.above,
        le=stop,
        lt=option.limits.below,
        description=option.effect + default,
    )
    return info


class OptionFields(BaseModel):
    """The options, each valid in itself. Each has a default; the descriptions are the command line's help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stage: Annotated[
        int,
        Field(
            ge=0,
            le=3,
            description="ZeRO stage: 0 shards nothing, 1 the optimizer, 2 the gradients too, 3 the parameters too.",
        ),
    ] = 3
    mesh: Annotated[
        str | None,
        Field(
            description="Hybrid sharding, such as replicate=2,shard=4: groups of 4 ranks hold all shards, and "
            "gradients are also summed over the 2 groups. [default: one group]"
        ),
    ] = None
    world_size: int = Field(
        ge=1,
        le=MOST_RANKS,
        default_factory=default_world_size,
        description="Number of ranks. [default: the ranks of the mesh, else of the torchrun job, else the visible "
        "GPUs, or 2 without GPUs]",
    )
    precision: Annotated[
        Precision, Field(description="Dtype of parameters, activations and gradients.")
    ] = "fp32"
    micro_steps: Annotated[
        int,
        Field(
            ge=1,
            le=MOST_COUNT,
            description="Micro-steps over which a gradient accumulates. With more than 1 a program is compiled for any "
            "number of them.",
        ),
    ] = 1
    accumulate_locally: Annotated[
        bool,
        Field(
            description="Add whole FP32 gradients on each rank and reduce them once, in the last micro-step: less "
            "traffic, more memory (stages 2, 3 with --micro-steps above 1)."
        ),
    ] = False
    order: Annotated[
        Order,
        Field(
            description="What runs next: each micro-batch through all units (step), or each unit on all micro-batches "
            "of a step (layer), so that its parameters are gathered or copied to the device once for them, and "
            "activations of all are kept. layer=4: in groups of 4 micro-batches."
        ),
    ] = STEP

    units: Annotated[
        str | None,
        Field(
            description="The submodules that share a flat buffer: patterns of names (blocks.*), class:NAME or "
            "min:NUMEL, separated by commas. [default: repeated blocks]"
        ),
    ] = None
    keep_fp32: Annotated[
        Names,
        Field(
            description="Modules or parameters that stay FP32: patterns of names, separated by commas."
        ),
    ] = ()

    evaluate: Annotated[
        bool,
        Field(
            description="Capture the model under eval(), too: the program can evaluate between training steps."
        ),
    ] = True
    outputs: Annotated[
        Names,
        Field(
            description="What an evaluation yields beside the loss: names in the object or dict that forward, or the "
            "loss function, returns, separated by commas. [default: the second part of a pair (loss, outputs)]"
        ),
    ] = ()

    optimizer: Annotated[
        Algorithm, Field(description="The update rule, with the semantics of torch.optim.")
    ] = USUAL
    lr: Annotated[float, Field(ge=0, le=LARGEST_SCALAR, description="Learning rate.")] = 1e-3
    schedule: Annotated[
        str | None,
        Field(
            description="Learning-rate schedule that `zeroir run` follows, such as cosine{warmup=100,total=1000} "
            "(also constant, linear, and DeepSpeed's). [default: none]"
        ),
    ] = None
    momentum: Annotated[float | None, _setting("momentum")] = None
    dampening: Annotated[float, _setting("dampening", shows_default=False)] = 0.0
    nesterov: Annotated[bool | None, _setting("nesterov")] = None
    beta1: Annotated[float, _setting("beta1", shows_default=False)] = 0.9
    beta2: Annotated[float | None, _setting("beta2")] = None
    eps: Annotated[float | None, _setting("eps")] = None
    weight_decay: Annotated[float | None, _setting("weight_decay")] = None
    ns_steps: Annotated[int | None, _setting("ns_steps")] = None
    ns_coefficients: Annotated[tuple[float, float, float] | None, _setting("ns_coefficients")] = (
        None
    )
    adjust_lr_fn: Annotated[AdjustLr | None, _setting("adjust_lr_fn")] = None
    beta2_decay: Annotated[float | None, _setting("beta2_decay")] = None
    eps2: Annotated[float | None, _setting("eps2")] = None
    d: Annotated[float | None, _setting("d")] = None
    group: Annotated[
        tuple[str, ...],
        Field(
            description="Settings for some parameters: PATTERN:KEY=VALUE,..., such as head.*:lr=1e-4,weight_decay=0, "
            "where the pattern is of names of parameters or modules and the keys are the options of the optimizer. "
            "A parameter is in the first group that matches it."
        ),
    ] = ()
    no_decay: Annotated[
        bool,
        Field(
            description="No weight decay for parameters of fewer than two dimensions: norms and biases."
        ),
    ] = False
    clip: Annotated[
        float | None,
        Field(
            gt=0,
            le=LARGEST_SCALAR,
            description="Largest global L2 norm of the gradient. [default: no clipping]",
        ),
    ] = None
    ema: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="Decay of an exponential moving average of the weights, such as 0.999, which is kept beside "
            "them. [default: no average]",
        ),
    ] = None

    prefetch: Annotated[
        int,
        Field(
            ge=0,
            le=MOST_COUNT,
            description="Number of units that parameters are gathered ahead of their use (stage 3).",
        ),
    ] = 1
    prefetch_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            le=MOST_BYTES,
            description="Gather parameters ahead of their use while those ahead have at most this number of bytes, "
            "instead of --prefetch units ahead (stage 3). [default: none]",
        ),
    ] = None
    prefetch_budget: Annotated[
        OptionalAmount,
        Field(
            description="Gather parameters as early as this amount of device memory allows, such as 80GB, instead of "
            "--prefetch units ahead (stage 3). [default: none]"
        ),
    ] = None
    unshard: Annotated[
        Names,
        Field(
            description="Units whose parameters are kept from forward to backward instead of gathered twice: names or "
            "patterns; * means all repeated units (stage 3)."
        ),
    ] = ()
    unshard_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            le=MOST_BYTES,
            description="Keep the gathered parameters of a unit until its next use if the parameters used in between "
            "have at most this number of bytes (stage 3). [default: none]",
        ),
    ] = None
    recompute: Annotated[
        Names,
        Field(
            description="Units whose forward is recomputed before their backward instead of saving its values "
            "(activation checkpointing): names or patterns; * means all repeated units."
        ),
    ] = ()
    live_gradients: Annotated[
        int,
        Field(
            ge=1,
            le=MOST_COUNT,
            description="Largest number of units whose full gradients exist at once (stages 2, 3).",
        ),
    ] = 2
    select_saved: Annotated[
        bool,
        Field(
            description="Save the fewest bytes for the backward, and recompute cheap values there."
        ),
    ] = True
    bucket: Annotated[
        int,
        Field(
            ge=0,
            le=MOST_BYTES,
            description="Merge neighbouring collectives up to this number of bytes; 0 merges none.",
        ),
    ] = 0
    bucket_gathers: Annotated[
        int | None,
        Field(
            ge=0,
            le=MOST_BYTES,
            description="Another limit than --bucket for gathers of parameters (stages 1 to 3). [default: --bucket]",
        ),
    ] = None
    overlap_update: Annotated[
        bool,
        Field(
            description="Update each unit as soon as its gradient is reduced (without --clip and fp16)."
        ),
    ] = True
    offload: Offload = ()
    offload_to: OffloadTo = HOST
    host_cache: HostCache = None
    offload_units: OffloadUnits = ()
    offload_fraction: OffloadFraction = None
    speculate: Speculate = None
    page_optimizer: PageOptimizer = None
    page_bytes: PageBytes = PAGE_BYTES
    optimizer_bits: OptimizerBits = 32
    memory_budget: Annotated[
        OptionalAmount,
        Field(
            description="Device memory of a rank, such as 80GB: a program that needs more is refused (Z301). "
            "[default: no budget]"
        ),
    ] = None
    elide: Annotated[
        bool,
        Field(
            description="Leave out gathers that no op reads, or that would follow their own release."
        ),
    ] = True

    loss_scale: Annotated[
        float | None,
        Field(
            gt=0,
            le=LARGEST_SCALAR,
            description="Loss scale that never changes (fp16). An overflow still skips the step. [default: dynamic]",
        ),
    ] = None
    initial_loss_scale: Annotated[
        float, Field(gt=0, le=LARGEST_SCALAR, description="First loss scale (fp16).")
    ] = 2.0**16
    loss_scale_window: Annotated[
        int,
        Field(
            ge=1,
            le=MOST_COUNT,
            description="Steps without overflow after which the loss scale grows (fp16).",
        ),
    ] = 1000
    loss_scale_factor: Annotated[
        float,
        Field(
            gt=1,
            le=LARGEST_SCALAR,
            description="Factor by which the loss scale grows and shrinks (fp16).",
        ),
    ] = 2.0
    loss_scale_hysteresis: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT, description="Overflows before the loss scale shrinks (fp16)."),
    ] = 2
    loss_scale_consecutive_hysteresis: Annotated[
        bool,
        Field(
            description="Count only consecutive overflows for the hysteresis, instead of all since the loss scale grew "
            "last (fp16)."
        ),
    ] = False
    minimum_loss_scale: Annotated[
        float, Field(gt=0, le=LARGEST_SCALAR, description="Smallest loss scale (fp16).")
    ] = 1.0

    @field_validator("ns_coefficients", mode="before")
    @classmethod
    def _three_numbers(cls, value: object) -> object:
        if value is None:
            return None
        items = value.split(",") if isinstance(value, str) else value
        try:
            a, b, c = map(float, items if isinstance(items, list | tuple) else ())
            if max(abs(a), abs(b), abs(c)) > LARGEST_SCALAR:
                raise ValueError
        except (TypeError, ValueError):
            example = "three numbers of FP32, such as 3.4445,-4.775,2.0315"
            raise PydanticCustomError("coefficients", example) from None
        return a, b, c

    @field_validator("group", mode="before")
    @classmethod
    def _as_texts(cls, value: object) -> object:
        """A text with one or more groups, a list of such texts, or a mapping from patterns to settings."""
        if isinstance(value, Mapping):
            try:
                return tuple(group_text(patterns, dict(s)) for patterns, s in value.items())
            except GroupError as error:
                raise PydanticCustomError(
                    "group", "a group: {problem}", {"problem": str(error)}
                ) from None
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            return value
        texts = (part.strip() for item in items for part in item.split(SEPARATOR))
        return tuple(text for text in texts if text)

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return parse_schedule(value).text()
        except UserError as error:
            problem = str(error).removesuffix(".")
            raise PydanticCustomError(
                "schedule",
                "a schedule such as {example}: {problem}",
                {"example": "cosine{warmup=100}", "problem": problem},
            ) from None

    @field_validator("mesh")
    @classmethod
    def _in_canonical_order(cls, value: str | None) -> str | None:
        if value is None:
            return None
        return ",".join(f"{axis.name}={axis.size}" for axis in parse_mesh(value).axes)


class GivenOptions(OptionFields):
    """Options from one of several places, such as the command line: each is valid in itself, not yet with others."""

    @property
    def given(self) -> dict[str, object]:
        """The options that were set, by name."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set
        }
