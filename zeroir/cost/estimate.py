"""An estimate of the memory, communication and activations of training, from a few numbers and without a model.

Model states and communication follow the ZeRO paper (Rajbhandari et al. 2020, §3.1, §5 and §7), activations
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", §4. A compiled program has
exact figures; an estimate serves before there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, assert_never

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zeroir.config import Precision
from zeroir.config.offload_fields import (
    ACTIVATIONS,
    ADAPTIVE,
    GRADIENTS,
    OFFLOADED,
    OPTIMIZER,
    PARAMETERS,
    Offload,
    OffloadFraction,
    OptimizerBits,
)
from zeroir.ir.eight_bit_states import BLOCK_NUMEL

Optimizer = Literal[
    "sgd",
    "momentum",
    "adam",
    "adamw",
    "adam-fp32-master",
    "lion",
    "muon",
    "adafactor",
    "shampoo",
]
STAGES: Final = (0, 1, 2, 3)
COMMUNICATED_PER_PARAMETER: Final = {0: 2, 1: 2, 2: 2, 3: 3}
"""Elements that a rank sends in a step for each parameter, times (N-1)/N on a ring, by stage.

An all-reduce is a reduce-scatter and an all-gather, of Ψ each; stage 3 gathers the parameters twice.
"""

_STATE_BYTES: Final = 4
_QUANTISED: Final = ("momentum", "adam", "adamw", "lion")
"""Optimizers whose states can have 8 bits."""

_QUANTISED_BYTES: Final = 1 + _STATE_BYTES / BLOCK_NUMEL
"""Bytes of a state of 8 bits: each block of elements has one FP32 scale."""

_UNITS_HELD: Final = 2
"""Units with gathered parameters, and units with full gradients, at once: the defaults of the compiler."""


class EstimateOptions(BaseModel):
    """The input of an estimate. The descriptions are the help of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    params: Annotated[float, Field(ge=1, description="Number of parameters, as 7.5e9.")]
    world_size: Annotated[int, Field(ge=1, description="Number of ranks.")] = 1
    optimizer: Annotated[Optimizer, Field(description="The update rule.")] = "adamw"
    precision: Annotated[
        Precision, Field(description="Dtype of parameters, activations and gradients.")
    ] = "bf16"
    master: Annotated[
        bool, Field(description="Whether the optimizer keeps an FP32 copy of 16-bit parameters.")
    ] = True
    ema: Annotated[
        bool, Field(description="Whether a moving average of the weights is kept, in FP32.")
    ] = False
    layers: Annotated[int | None, Field(ge=1, description="Transformer layers.")] = None
    hidden: Annotated[int | None, Field(ge=1, description="Width of a layer.")] = None
    heads: Annotated[int | None, Field(ge=1, description="Attention heads.")] = None
    seq: Annotated[int | None, Field(ge=1, description="Tokens of a sequence.")] = None
    batch: Annotated[int, Field(ge=1, description="Sequences of a rank's micro-batch.")] = 1
    vocab: Annotated[
        int | None, Field(ge=1, description="Entries of the vocabulary, for the logits.")
    ] = None
    recompute: Annotated[
        bool, Field(description="Keep the input of each layer alone, and compute the layer again.")
    ] = False
    flash: Annotated[
        bool, Field(description="Attention that keeps no scores (or computes them again).")
    ] = False
    offload: Offload = ()
    offload_to: Annotated[
        Literal["host", "disk"],
        Field(description="Where it is kept; gradients are always kept in host memory."),
    ] = "host"
    offload_fraction: OffloadFraction = None
    optimizer_bits: OptimizerBits = 32

    @model_validator(mode="after")
    def _shape_is_whole(self) -> Self:
        given = {"layers": self.layers, "hidden": self.hidden, "seq": self.seq}
        needed = {**given, "heads": self.heads}
        if not self.flash and not self.recompute:
            given = needed
        absent = [name for name, value in given.items() if value is None]
        asked = [name for name, value in needed.items() if value is not None]
        asked += [] if self.vocab is None else ["vocab"]
        # Layers alone say how large a unit is.
        if absent and set(asked) - {"layers"}:
            raise ValueError(
                f"activations need {', '.join(f'--{name}' for name in absent)} as well"
            )
        return self

    @model_validator(mode="after")
    def _offload_is_known(self) -> Self:
        if self.offload == (ADAPTIVE,):
            raise ValueError(
                "an estimate knows no budget: --offload takes "
                f"{', '.join(OFFLOADED)}, separated by commas"
            )
        if ACTIVATIONS in self.offload and self.layers is None:
            raise ValueError("--offload activations needs --layers and the shape of a layer")
        if self.optimizer_bits == 8 and self.optimizer not in _QUANTISED:
            raise ValueError(
                f"--optimizer-bits 8 is for {', '.join(_QUANTISED)}, not for {self.optimizer}"
            )
        return self

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of a parameter, a gradient, or an element of an activation."""
        return 4 if self.precision == "fp32" else 2


def states_per_parameter(optimizer: Optimizer) -> tuple[int, int]:
    """The fewest and the most FP32 numbers that an optimizer keeps for each parameter.

    Adafactor keeps the first moment (that of torch and of zeroir does not), and of the second only the sums of rows and
    columns, which are negligible. Shampoo keeps, of an m × n parameter, m × m and n × n statistics, and besides these
    their roots, a moment and a diagonal accumulator where an implementation has them; the numbers are those of square
    parameters.
    """
    match optimizer:
        case "sgd":
            return 0, 0
        case "momentum" | "lion" | "muon":
            return 1, 1
        case "adafactor":
            return 0, 1
        case "adam" | "adamw":
            return 2, 2
        case "adam-fp32-master":
            return 3, 3
        case "shampoo":
            return 2, 6
        case _:
            assert_never(optimizer)


def gathered_bytes_per_parameter(optimizer: Optimizer) -> int:
    """Bytes that the update gathers for each parameter from stage 1 on, because its step needs whole parameters.

    Muon gathers its directions in BF16, Adafactor gradients and parameters in FP32, and Shampoo gradients and two
    statistics (of square parameters).
    """
    return {"muon": 2, "adafactor": 8, "shampoo": 12}.get(optimizer, 0)


def optimizer_bytes_per_parameter(options: EstimateOptions) -> float:
    """K of the ZeRO paper: bytes of optimizer state for each parameter, with master weights and averages."""
    numbers = states_per_parameter(options.optimizer)[1]
    quantised = numbers if options.optimizer_bits == 8 else 0
    numbers += has_master(options) and options.optimizer != "adam-fp32-master"
    numbers += options.ema
    return _STATE_BYTES * (numbers - quantised) + _QUANTISED_BYTES * quantised


def has_master(options: EstimateOptions) -> bool:
    """Whether an FP32 copy of the parameters is among the optimizer's states."""
    is_low = options.itemsize_bytes < _STATE_BYTES
    return options.optimizer == "adam-fp32-master" or (is_low and options.master)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """Bytes that a rank copies in a step of one micro-step, by direction; ``load`` and ``store`` are of the disk."""

    to_host: int
    to_device: int
    load: int
    store: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Bytes of one rank at a stage.

    ``gathered_bytes`` (stage 3, and where parameters are offloaded) and ``gradients_in_flight_bytes`` (stages 2 and 3,
    and where gradients are offloaded) are those of full units beside the shards; they are None where the number of
    layers is unknown. ``host_bytes`` and ``disk_bytes`` are kept there, and in no other figure. ``moved`` is copied in
    a step for them. ``sent_bytes`` is sent by a rank on a ring in a step, with what an optimizer gathers that works on
    whole parameters.
    """

    stage: int
    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int | None
    gradients_in_flight_bytes: int | None
    activations_bytes: int | None
    host_bytes: int
    disk_bytes: int
    moved: MovedBytes
    communicated_per_parameter: int
    sent_bytes: int

    @property
    def model_states_bytes(self) -> int:
        """Parameters, gradients and optimizer state on the device."""
        return self.params_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """All known bytes on the device."""
        unknown = (self.gathered_bytes, self.gradients_in_flight_bytes, self.activations_bytes)
        return self.model_states_bytes + sum(size for size in unknown if size is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activations that a forward saves for its backward, in bytes of one rank.

    All layers save ``layers_bytes``. One layer computes ``recomputed_bytes`` again for its backward. The embedding, the
    last norm and the logits save ``outside_bytes``, where the vocabulary is known.
    """

    layers_bytes: int
    recomputed_bytes: int
    outside_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of all three."""
        return self.layers_bytes + self.recomputed_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimate for the options, stage by stage."""

    options: EstimateOptions
    optimizer_bytes_per_parameter: float
    full_gradient_bytes: int
    activations: Activations | None
    stages: tuple[StageEstimate, ...]


def activation_bytes(options: EstimateOptions) -> Activations | None:
    """Activations of the layers of a transformer by the published formula; None where its shape is unknown.

    In 16 bits a layer saves sbh (34 + 5 as/h) bytes. Of these, 2sbh are the masks of two dropouts and as²b the mask of
    the dropout in attention, one byte an element. With attention that saves no scores a layer saves 34 sbh, and with
    recomputation only its input, 2sbh. Outside the layers, with a vocabulary of v, are saved: sbh for the mask of the
    dropout of the embedding, 2sbh each for the inputs of the last norm and of the output layer, and 4sbv for the FP32
    logits.
    """
    if options.layers is None or options.hidden is None or options.seq is None:
        return None
    item = options.itemsize_bytes
    tokens = options.seq * options.batch
    layer = tokens * options.hidden * (16 * item + 2)
    if not options.flash and options.heads is not None:
        layer += options.heads * options.seq * tokens * (2 * item + 1)
    outside = 0
    if options.vocab is not None:
        outside = tokens * options.hidden * (1 + 2 * item) + 4 * tokens * options.vocab
    kept = tokens * options.hidden * item if options.recompute else layer
    return Activations(
        layers_bytes=options.layers * kept,
        recomputed_bytes=layer if options.recompute else 0,
        outside_bytes=outside,
    )


def estimate(options: EstimateOptions) -> Estimate:
    """The estimate at every stage."""
    activations = activation_bytes(options)
    return Estimate(
        options=options,
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter(options),
        full_gradient_bytes=round(options.itemsize_bytes * options.params),
        activations=activations,
        stages=tuple(_stage(stage, options, activations) for stage in STAGES),
    )


def _stage(stage: int, options: EstimateOptions, activations: Activations | None) -> StageEstimate:
    count, ranks, item = options.params, options.world_size, options.itemsize_bytes
    params = item * count / (ranks if stage >= 3 else 1)
    gradients = item * count / (ranks if stage >= 2 else 1)
    optimizer = optimizer_bytes_per_parameter(options) * count / (ranks if stage >= 1 else 1)
    outside = _outside(stage, options, activations)
    device_params = 0.0 if PARAMETERS in options.offload else params
    device_gradients = 0.0 if GRADIENTS in options.offload else gradients
    device_optimizer = optimizer - (outside.states if OPTIMIZER in options.offload else 0.0)
    whole_units = None
    if options.layers is not None:
        whole_units = round(item * count * min(_UNITS_HELD, options.layers) / options.layers)
    whole = gathered_bytes_per_parameter(options.optimizer) if stage >= 1 else 0
    sent = (COMMUNICATED_PER_PARAMETER[stage] * item + whole) * count * (ranks - 1) / ranks
    has_whole_params = stage >= 3 or PARAMETERS in options.offload
    has_whole_gradients = stage >= 2 or GRADIENTS in options.offload
    return StageEstimate(
        stage=stage,
        params_bytes=round(device_params),
        gradients_bytes=round(device_gradients),
        optimizer_bytes=round(device_optimizer),
        gathered_bytes=whole_units if has_whole_params else 0,
        gradients_in_flight_bytes=whole_units if has_whole_gradients else 0,
        activations_bytes=None if activations is None else _on_device(activations, options),
        host_bytes=round(outside.host),
        disk_bytes=round(outside.disk),
        moved=outside.moved,
        communicated_per_parameter=COMMUNICATED_PER_PARAMETER[stage],
        sent_bytes=round(sent),
    )


def _on_device(activations: Activations, options: EstimateOptions) -> int:
    """Bytes of activations on the device; where they are offloaded, those of the units at work."""
    if ACTIVATIONS not in options.offload or options.layers is None:
        return activations.total_bytes
    held = activations.layers_bytes * min(_UNITS_HELD, options.layers) // options.layers
    return activations.total_bytes - activations.layers_bytes + held


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outside:
    """Bytes of one rank outside its device; ``states`` are those of the optimizer's states among them."""

    host: float
    disk: float
    states: float
    moved: MovedBytes


def _outside(stage: int, options: EstimateOptions, activations: Activations | None) -> _Outside:
    """What is kept outside the device at a stage, and copied for it.

    The gradients of the elements that the host updates go down, and their new parameters come up. Where the parameters
    are offloaded, they come up for the forward and the backward, and go down if the device updates or gathers them.
    """
    count, ranks, item = options.params, options.world_size, options.itemsize_bytes
    owned = count / (ranks if stage >= 1 else 1)
    held = count / (ranks if stage >= 3 else 1)
    gradients = kept = down = up = states = load = store = 0.0
    updated = 0.0
    if OPTIMIZER in options.offload:
        updated = owned * (1.0 if options.offload_fraction is None else options.offload_fraction)
        states = optimizer_bytes_per_parameter(options) * updated
        # Without master weights the host updates a copy of the parameters.
        copied = 0.0 if has_master(options) or PARAMETERS in options.offload else item * updated
        kept += states + copied
        down += item * updated
        load += states + copied
        store += states + copied
        if PARAMETERS not in options.offload or stage in (1, 2):
            up += item * updated
    if GRADIENTS in options.offload:
        gradients = item * owned
        down += item * (owned - updated)
        up += item * (owned - updated)
    if PARAMETERS in options.offload:
        kept += item * held
        # Without master weights the device's update needs them once more.
        up += 2 * item * held + (0.0 if has_master(options) else item * (owned - updated))
        down += item * (held if stage in (1, 2) else held - updated)
        # So does the host's, and in stages 1 and 2 the new parameters are gathered from their home.
        again = (0 if has_master(options) else owned) + (updated if stage in (1, 2) else 0)
        load += item * (2 * held + again)
        store += item * (held + (updated if stage in (1, 2) else 0))
    is_disk = options.offload_to == "disk"
    saved = 0
    if ACTIVATIONS in options.offload and activations is not None:
        saved = activations.layers_bytes
    return _Outside(
        host=gradients + (0.0 if is_disk else kept + saved),
        disk=kept + saved if is_disk else 0.0,
        states=states,
        moved=MovedBytes(
            to_host=round(down + saved),
            to_device=round(up + saved),
            load=round(load + saved) if is_disk else 0,
            store=round(store + saved) if is_disk else 0,
        ),
    )
