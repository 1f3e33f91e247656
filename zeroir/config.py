"""The options of a compilation, validated once and stored in the program as text."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from zeroir import hyper_parameters
from zeroir.errors import UserError
from zeroir.groups import (
    SEPARATOR,
    GroupError,
    GroupSpec,
    group_text,
    parse_groups,
)
from zeroir.hyper_parameters import AdjustLr
from zeroir.ir.amounts import parse_bytes
from zeroir.ir.limits import MOST_BYTES, MOST_COUNT, MOST_RANKS
from zeroir.ir.mesh import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS, Axis, Mesh
from zeroir.ir.ops import Algorithm
from zeroir.schedules import parse_schedule

Precision = Literal["fp32", "bf16", "fp16"]
_IS_WRITTEN: Final = {"is_written": True}
"""The validation context for options that a program carries: an option without effect is no error there."""


def default_world_size(given: dict[str, object]) -> int:
    """The ranks of the mesh if one is given, else of the torchrun job, else the visible GPUs, or 2 without GPUs."""
    # A factory that takes the given values is not called for a help text, where this slow import would be wasted.
    mesh = given.get("mesh")
    if isinstance(mesh, str):
        return _parse_mesh(mesh).world_size
    ranks_of_job = os.environ.get("WORLD_SIZE", "")
    if ranks_of_job.isdecimal() and "RANK" in os.environ:
        return int(ranks_of_job)
    import torch

    return torch.cuda.device_count() or 2


class CompileOptions(BaseModel):
    """The options of a compilation. Each has a default; the descriptions are the command line's help."""

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

    units: Annotated[
        str | None,
        Field(
            description="The submodules that share a flat buffer: a pattern of names (blocks.*), class:NAME or "
            "min:NUMEL. [default: repeated blocks]"
        ),
    ] = None
    keep_fp32: Annotated[
        tuple[str, ...],
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
        tuple[str, ...],
        Field(
            description="What an evaluation yields beside the loss: names in the object or dict that forward, or the "
            "loss function, returns, separated by commas. [default: the second part of a pair (loss, outputs)]"
        ),
    ] = ()

    optimizer: Annotated[
        Algorithm, Field(description="The update rule, with the semantics of torch.optim.")
    ] = Algorithm.ADAMW
    lr: Annotated[float, Field(ge=0, description="Learning rate.")] = 1e-3
    schedule: Annotated[
        str | None,
        Field(
            description="Learning-rate schedule that `zeroir run` follows, such as cosine{warmup=100,total=1000} "
            "(also constant, linear, and DeepSpeed's). [default: none]"
        ),
    ] = None
    momentum: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="Momentum factor (momentum, muon). [default: 0.9, muon 0.95]",
        ),
    ] = None
    dampening: Annotated[float, Field(ge=0, description="Dampening (momentum only).")] = 0.0
    nesterov: Annotated[
        bool | None,
        Field(
            description="Nesterov momentum (momentum, muon). [default: for muon alone]",
        ),
    ] = None
    beta1: Annotated[
        float, Field(ge=0, lt=1, description="Decay of exp_avg (adam, adamw, lion).")
    ] = 0.9
    beta2: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="Decay of exp_avg_sq (adam, adamw), or of exp_avg (lion). [default: 0.999, lion 0.99]",
        ),
    ] = None
    eps: Annotated[
        float | None,
        Field(
            ge=0,
            description="Added to the denominator (adam, adamw) or to eigenvalues (shampoo), or the least denominator "
            "(muon, adafactor). [default: 1e-8, shampoo 1e-4, muon 1e-7, adafactor 2⁻²³]",
        ),
    ] = None
    weight_decay: Annotated[
        float | None,
        Field(ge=0, description="Weight decay. [default: 0.01 for adamw, 0.1 for muon, else 0]"),
    ] = None
    ns_steps: Annotated[
        int | None,
        Field(ge=1, lt=100, description="Newton-Schulz iterations (muon). [default: 5]"),
    ] = None
    ns_coefficients: Annotated[
        tuple[float, float, float] | None,
        Field(
            description="Coefficients of a Newton-Schulz iteration (muon). [default: 3.4445,-4.775,2.0315]"
        ),
    ] = None
    adjust_lr_fn: Annotated[
        AdjustLr | None,
        Field(
            description="How the learning rate depends on the shape of a parameter (muon). [default: original]"
        ),
    ] = None
    beta2_decay: Annotated[
        float | None,
        Field(
            le=0,
            description="Exponent of the decay of the second moment (adafactor). [default: -0.8]",
        ),
    ] = None
    eps2: Annotated[
        float | None,
        Field(
            ge=0,
            description="Least root mean square of a parameter by which its steps are scaled (adafactor). "
            "[default: 1e-3]",
        ),
    ] = None
    d: Annotated[
        float | None,
        Field(
            ge=1,
            description="Largest root mean square of an unscaled step (adafactor). [default: 1]",
        ),
    ] = None
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
        Field(gt=0, description="Largest global L2 norm of the gradient. [default: no clipping]"),
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
        str | None,
        Field(
            description="Gather parameters as early as this amount of device memory allows, such as 80GB, instead of "
            "--prefetch units ahead (stage 3). [default: none]"
        ),
    ] = None
    unshard: Annotated[
        tuple[str, ...],
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
        tuple[str, ...],
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
    memory_budget: Annotated[
        str | None,
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
            description="Loss scale that never changes (fp16). An overflow still skips the step. [default: dynamic]",
        ),
    ] = None
    initial_loss_scale: Annotated[float, Field(gt=0, description="First loss scale (fp16).")] = (
        2.0**16
    )
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
        Field(gt=1, description="Factor by which the loss scale grows and shrinks (fp16)."),
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
    minimum_loss_scale: Annotated[float, Field(gt=0, description="Smallest loss scale (fp16).")] = (
        1.0
    )

    @field_validator("keep_fp32", "outputs", "unshard", "recompute", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            return value
        return tuple(part for item in items for part in item.split(",") if part)

    @field_validator("ns_coefficients", mode="before")
    @classmethod
    def _three_numbers(cls, value: object) -> object:
        if value is None:
            return None
        items = value.split(",") if isinstance(value, str) else value
        try:
            a, b, c = map(float, items if isinstance(items, list | tuple) else ())
        except (TypeError, ValueError):
            example = "three numbers, such as 3.4445,-4.775,2.0315"
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

    @field_validator("memory_budget", "prefetch_budget")
    @classmethod
    def _is_an_amount(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_bytes(value)
            except UserError:
                raise PydanticCustomError(
                    "amount", "an amount of memory, such as 80GB, 512MiB or 1e9"
                ) from None
        return value

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
        return ",".join(f"{axis.name}={axis.size}" for axis in _parse_mesh(value).axes)

    @model_validator(mode="after")
    def _mesh_fits_world_size(self) -> Self:
        if self.mesh is not None and _parse_mesh(self.mesh).world_size != self.world_size:
            ranks = _parse_mesh(self.mesh).world_size
            raise ValueError(
                f"--mesh {self.mesh} has {ranks} ranks, but --world-size is {self.world_size}; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _nesterov_fits_momentum(self) -> Self:
        has_momentum = "momentum" in hyper_parameters.DEFAULTS[self.optimizer]
        if self.nesterov and has_momentum and (self.dampening or not self.effective_momentum):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self

    @model_validator(mode="after")
    def _groups_are_valid(self, info: ValidationInfo) -> Self:
        try:
            specs = parse_groups(self.group)
        except GroupError as error:
            raise ValueError(f"--group {error}") from None
        for spec in specs:
            try:
                self._of_group(spec, info.context)
            except ValidationError as error:
                raise ValueError(f"--group {spec.text}: {_first_problem(error)}") from None
        return self

    @model_validator(mode="after")
    def _all_have_effect(self, info: ValidationInfo) -> Self:
        if not info.context and (problem := self.without_effect) is not None:
            raise ValueError(problem)
        return self

    @property
    def without_effect(self) -> str | None:
        """A sentence on the first option that has no effect beside the others; None if each has one.

        Defaults never count. Turning off a feature that is absent (``--prefetch 0``, ``--no-elide`` below stage 3) is
        no error.
        """
        for name, least in _LEAST_STAGES.items():
            is_off = name == "prefetch" and self.prefetch == 0
            if self.stage < least and self._asks_for(name) and not is_off:
                stages = " or ".join(map(str, range(least, 4)))
                return f"{self._flag(name)} needs --stage {stages}, but the stage is {self.stage}"
        if self.outputs and not self.evaluate:
            return f"{self._flag('outputs')} needs evaluations, but --no-evaluate leaves them out"
        early = [name for name in _GATHERED_EARLY if self._asks_for(name)]
        if len(early) > 1:
            first, second, *_ = map(self._flag, early)
            return f"{first} and {second} both set how early parameters are gathered; leave one of them out"
        for name in ("loss_scale", *_DYNAMIC_LOSS_SCALE):
            if self.precision != "fp16" and self._asks_for(name):
                return f"{self._flag(name)} needs --precision fp16, but the precision is {self.precision}"
        for name in _DYNAMIC_LOSS_SCALE:
            if self.loss_scale is not None and self._asks_for(name):
                return f"{self._flag(name)} is for a dynamic loss scale, but {self._flag('loss_scale')} fixes it"
        if self.has_dynamic_loss_scale and self.initial_loss_scale < self.minimum_loss_scale:
            return (
                f"--minimum-loss-scale {self.minimum_loss_scale:g} would raise the loss scale, which begins with "
                f"--initial-loss-scale {self.initial_loss_scale:g}"
            )
        if self.loss_scale_consecutive_hysteresis and self.loss_scale_hysteresis == 1:
            return "--loss-scale-consecutive-hysteresis needs a --loss-scale-hysteresis above 1"
        if self.accumulate_locally and self.micro_steps == 1:
            return "--accumulate-locally needs --micro-steps above 1, but a step has one micro-step"
        if self.accumulate_locally and self._asks_for("live_gradients"):
            return (
                f"{self._flag('live_gradients')} bounds the full gradients that wait for their reduction, but with "
                "--accumulate-locally none waits"
            )
        for name in hyper_parameters.NAMES:
            if name not in hyper_parameters.DEFAULTS[self.optimizer] and self._asks_for(name):
                users = hyper_parameters.users(name)
                return f"{self._flag(name)} needs --optimizer {users}, but the optimizer is {self.optimizer}"
        decays = (o.effective_weight_decay for o in (self, *map(self.of_group, self.groups)))
        if self.no_decay and not any(decays):
            return "--no-decay needs a --weight-decay above 0"
        return None

    def _asks_for(self, name: str) -> bool:
        value = getattr(self, name)
        return bool(value != type(self).model_fields[name].default)

    def _flag(self, name: str) -> str:
        return f"--{name.replace('_', '-')} {_text(getattr(self, name))}"

    @property
    def device_mesh(self) -> Mesh:
        """The axes of the ranks: ``replicate`` and ``shard`` where a mesh is given, else ``dp``."""
        if self.mesh is not None:
            return _parse_mesh(self.mesh)
        return Mesh(axes=(Axis(name=DATA_AXIS, size=self.world_size),))

    @property
    def replicas(self) -> int | None:
        """The number of groups of ranks that hold the same shards; None without a mesh."""
        return None if self.mesh is None else _parse_mesh(self.mesh).size(REPLICATE_AXIS)

    def for_world_size(self, world_size: int) -> CompileOptions:
        """The options for another number of ranks. The groups of a mesh keep their size, and their number changes.

        Raises:
            UserError: if the number of ranks is no multiple of the size of a group.
        """
        mesh = None
        if self.mesh is not None:
            shard = self.device_mesh.size(SHARD_AXIS)
            if world_size % shard:
                raise UserError(
                    f"The mesh {self.mesh} has groups of {shard} ranks, so {world_size} ranks leave a part of a group "
                    f"over: start a multiple of {shard} ranks, or compile with another --mesh."
                )
            mesh = f"{REPLICATE_AXIS}={world_size // shard},{SHARD_AXIS}={shard}"
        values = {**self.model_dump(), "world_size": world_size, "mesh": mesh}
        return make_options(values, context=_IS_WRITTEN)

    def for_micro_steps(self, micro_steps: int) -> CompileOptions:
        """The options for another number of micro-steps."""
        values = {**self.model_dump(), "micro_steps": micro_steps}
        return make_options(values, context=_IS_WRITTEN)

    @property
    def is_update_overlapped(self) -> bool:
        """Whether the update begins in the backward, which is possible if no decision waits for all gradients."""
        return self.overlap_update and self.clip is None and self.precision != "fp16"

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.precision == "fp16" and self.loss_scale is None

    @property
    def first_loss_scale(self) -> float:
        """The loss scale of the first step; 1 where there is none."""
        if self.precision != "fp16":
            return 1.0
        return self.initial_loss_scale if self.loss_scale is None else self.loss_scale

    @property
    def prefetch_budget_bytes(self) -> int | None:
        """The device memory that early gathers may fill; None if ``prefetch`` sets the distance instead."""
        return None if self.prefetch_budget is None else parse_bytes(self.prefetch_budget)

    def hyper_parameter(self, name: str) -> hyper_parameters.Value:
        """The value of a hyper-parameter of the optimizer, torch's default unless given; 0 where it has none."""
        defaults = hyper_parameters.DEFAULTS[self.optimizer]
        if name not in defaults:
            return 0.0
        given: hyper_parameters.Value | None = getattr(self, name)
        return defaults[name] if given is None else given

    @property
    def effective_momentum(self) -> float:
        """The momentum factor; 0 for an optimizer that has none."""
        return self._number("momentum")

    @property
    def effective_weight_decay(self) -> float:
        """The weight decay: torch's default of the optimizer unless given."""
        return self._number("weight_decay")

    def _number(self, name: str) -> float:
        """A hyper-parameter as ``%hyper`` holds it."""
        option, _, index = name.partition(".")
        value = self.hyper_parameter(option)
        if isinstance(value, tuple):
            return value[int(index)]
        return hyper_parameters.ADJUST_LR_FNS[value] if isinstance(value, str) else float(value)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups of ``group``, which the parameters that match no other group are not in."""
        return parse_groups(self.group)

    def of_group(self, spec: GroupSpec) -> CompileOptions:
        """The options of a group's parameters.

        A group with another optimizer takes over the learning rate and the weight decay alone.
        """
        return self._of_group(spec, _IS_WRITTEN)

    def with_adamw(self) -> CompileOptions:
        """The options of parameters that another optimizer does not take: AdamW's, and the same learning rate.

        The weight decay is the same, too, where it is given.
        """
        values = {"lr": self.lr, "weight_decay": self.weight_decay, "world_size": 1}
        return CompileOptions.model_validate(values, context=_IS_WRITTEN)

    def without_decay(self) -> CompileOptions:
        """The same options with a weight decay of 0."""
        return self.model_copy(update={"weight_decay": 0.0})

    def _of_group(self, spec: GroupSpec, context: Mapping[str, bool] | None) -> CompileOptions:
        names = ("optimizer", "lr", *hyper_parameters.NAMES)
        values = {name: getattr(self, name) for name in names}
        if spec.settings.get("optimizer", self.optimizer) != self.optimizer:
            values = {name: values[name] for name in ("lr", "weight_decay")}
        update = {**values, **spec.settings, "world_size": 1}
        return CompileOptions.model_validate(update, context=context)

    @property
    def hyper(self) -> tuple[float, ...]:
        """The contents of ``%hyper``, in the order of ``Algorithm.hyper_names``."""
        return tuple(self._number(name) for name in self.optimizer.hyper_names)

    def to_pairs(self) -> tuple[tuple[str, str], ...]:
        """The options as a program stores them: names and texts, sorted by name, without options that are not set."""
        values = sorted(self.model_dump().items())
        texts = ((name, _text(value, _SEPARATORS.get(name, ","))) for name, value in values)
        are_set = (value not in (None, ()) for _, value in values)
        return tuple(compress(texts, are_set))


_SEPARATORS: Final = {"group": SEPARATOR}
"""Separators of options that are lists, where commas are part of an item."""


class GivenOptions(CompileOptions):
    """Options from one of several places, such as the command line: each is valid in itself, not yet with others."""

    @model_validator(mode="after")
    def _mesh_fits_world_size(self) -> Self:
        return self

    @model_validator(mode="after")
    def _nesterov_fits_momentum(self) -> Self:
        return self

    @model_validator(mode="after")
    def _groups_are_valid(self) -> Self:
        return self

    @model_validator(mode="after")
    def _loss_scale_is_above_minimum(self) -> Self:
        return self

    @model_validator(mode="after")
    def _all_have_effect(self) -> Self:
        return self

    @property
    def given(self) -> dict[str, object]:
        """The options that were set, by name."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set
        }


_LEAST_STAGES: Final = {
    "accumulate_locally": 2,
    "bucket_gathers": 1,
    "live_gradients": 2,
    "prefetch": 3,
    "prefetch_bytes": 3,
    "prefetch_budget": 3,
    "unshard": 3,
    "unshard_bytes": 3,
}
"""The lowest stage at which each of these options has an effect."""

_GATHERED_EARLY: Final = ("prefetch", "prefetch_bytes", "prefetch_budget")
"""Options of which one sets how early parameters are gathered."""

_DYNAMIC_LOSS_SCALE: Final = (
    "initial_loss_scale",
    "loss_scale_window",
    "loss_scale_factor",
    "loss_scale_hysteresis",
    "loss_scale_consecutive_hysteresis",
    "minimum_loss_scale",
)


def _parse_mesh(text: str) -> Mesh:
    """The mesh that the text describes.

    Raises:
        PydanticCustomError: if the text is no mesh; it names the mistake.
    """
    names = (REPLICATE_AXIS, SHARD_AXIS)
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in names:
            raise _mesh_error(f"'{name}' is not an axis of it")
        if name in sizes:
            raise _mesh_error(f"{name} is given twice")
        if not (size.isdecimal() and size.isascii() and len(size) <= len(str(MOST_RANKS))):
            raise _mesh_error(f"the size of {name} must be a number of ranks")
        sizes[name] = int(size)
        if sizes[name] < 1:
            raise _mesh_error(f"the size of {name} must be at least 1")
    for name in names:
        if name not in sizes:
            raise _mesh_error(f"{name} is missing")
    mesh = Mesh(axes=tuple(Axis(name=name, size=sizes[name]) for name in names))
    if mesh.world_size > MOST_RANKS:
        raise _mesh_error(f"it has at most {MOST_RANKS} ranks")
    return mesh


def _mesh_error(problem: str) -> PydanticCustomError:
    example = f"{REPLICATE_AXIS}=2,{SHARD_AXIS}=4"
    return PydanticCustomError(
        "mesh", "written like {example}: {problem}", {"example": example, "problem": problem}
    )


def _text(value: object, separator: str = ",") -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return separator.join(map(str, value))
        case _:
            return str(value)


def make_options(
    values: Mapping[str, object], *, context: Mapping[str, bool] | None = None
) -> CompileOptions:
    """Validate options; a UserError names the first wrong one, its value and the expected values."""
    try:
        return CompileOptions.model_validate(dict(values), context=context)
    except ValidationError as error:
        raise UserError(explain_validation(error)) from None


def make_given_options(values: Mapping[str, object]) -> GivenOptions:
    """Validate each option by itself; UserError as for ``make_options``."""
    try:
        return GivenOptions.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(explain_validation(error)) from None


def options_from_pairs(pairs: Iterable[tuple[str, str]]) -> CompileOptions:
    """The inverse of ``CompileOptions.to_pairs``; UserError as for ``make_options``.

    Files of earlier versions have the options of every optimizer; those of other optimizers are left out.
    """
    values = dict(pairs)
    optimizer = values.get("optimizer")
    if optimizer in set(Algorithm):
        own = hyper_parameters.DEFAULTS[Algorithm(optimizer)]
        for name in hyper_parameters.NAMES:
            if name not in own:
                values.pop(name, None)
    try:
        return CompileOptions.model_validate_strings(values, context=_IS_WRITTEN)
    except ValidationError as error:
        raise UserError(explain_validation(error)) from None


def explain_validation(error: ValidationError, *, command: str = "compile") -> str:
    """One sentence on the first wrong option: its name, its value and the expected values."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        problem = first["msg"].removeprefix("Value error, ")
        if problem.startswith("--group "):
            return f"{problem}."
        return f"These options do not go together: {problem}."
    name = str(first["loc"][0]).replace("_", "-")
    if first["type"] == "extra_forbidden":
        options = (option.replace("_", "-") for option in CompileOptions.model_fields)
        nearest = difflib.get_close_matches(name, options, n=1)
        hint = f" did you mean --{nearest[0]}?" if nearest and command == "compile" else ""
        return f"There is no option --{name};{hint} `zeroir {command} --help` lists them."
    expected = first["msg"].removeprefix("Input should be ")
    return f"--{name} is {first['input']!s}, but should be {expected}."


def _first_problem(error: ValidationError) -> str:
    """The first problem of a group's settings, as the end of a sentence."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    expected = first["msg"].removeprefix("Input should be ")
    return f"{first['loc'][0]} is {first['input']!s}, but should be {expected}"
