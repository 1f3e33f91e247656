"""An estimate of the memory, communication and activations of training, from a few numbers and without a model.

Model states and communication follow the ZeRO paper (Rajbhandari et al. 2020, §3.1, §5 and §7), activations Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", §4. A compiled program has exact figures;
an estimate is for the time before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from zeroir.config.offload_places import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from zeroir.cost.estimate_options import (
    EstimateOptions,
    gathered_bytes_per_parameter,
    optimizer_bytes_per_parameter,
)
from zeroir.cost.estimate_outside import (
    UNITS_HELD,
    MovedBytes,
    outside_at,
    paged_at,
    staging_at,
)

STAGES: Final = (0, 1, 2, 3)
COMMUNICATED_PER_PARAMETER: Final = {0: 2, 1: 2, 2: 2, 3: 3}
"""Elements that a rank sends in a step for each parameter, times (N-1)/N on a ring, by stage.

An all-reduce is a reduce-scatter and an all-gather, of Ψ each; stage 3 gathers the parameters twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Bytes of one rank at a stage.

    ``gathered_bytes`` (stage 3, and where parameters are offloaded) and ``gradients_in_flight_bytes`` (stages 2 and 3,
    and where gradients are offloaded) are those of full units in addition to the shards; they are None if the number
    of layers is unknown. The same holds for ``device_staging_bytes`` and ``host_staging_bytes``, the buffers for
    copies. ``host_bytes`` and ``disk_bytes`` are kept there, and are in no other figure. ``moved`` is copied for them
    in a step. ``sent_bytes`` is sent by a rank on a ring in a step, including the parts gathered for an optimizer that
    works on whole parameters.
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
    device_staging_bytes: int | None
    host_staging_bytes: int | None
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
        unknown = (
            self.gathered_bytes,
            self.gradients_in_flight_bytes,
            self.activations_bytes,
            self.device_staging_bytes,
        )
        return self.model_states_bytes + sum(size for size in unknown if size is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activations that a forward saves for its backward, in bytes of one rank.

    All layers save ``layers_bytes``. One layer recomputes ``recomputed_bytes`` for its backward. The embedding, the
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
class BatchesEstimate:
    """Figures of a step whose ranks draw the sizes of their batches for themselves.

    ``tokens``, ``activations_bytes`` and ``flops`` are the means of a rank, the others with ``largest`` those of the
    largest batch. ``flops`` are the operations of products with parameters and of attention. ``wait_share`` is the
    part of a step that a rank waits for the slowest one, on average, if time is in proportion to ``flops``. ``moved``
    are the mean bytes that a rank copies in a step, by stage.
    """

    batches: int
    shapes: int
    sizes: Mapping[str, int] | None
    tokens: float
    largest_tokens: int
    activations_bytes: float
    largest_activations_bytes: int
    flops: float
    largest_flops: int
    wait_share: float
    moved: tuple[MovedBytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimate for the options, stage by stage; ``batches`` is that of other sizes of batches, if asked for."""

    options: EstimateOptions
    optimizer_bytes_per_parameter: float
    full_gradient_bytes: int
    activations: Activations | None
    stages: tuple[StageEstimate, ...]
    batches: BatchesEstimate | None = None


def activation_bytes(options: EstimateOptions) -> Activations | None:
    """Return activations of the layers of a transformer by the published formula; None if its shape is unknown.

    In 16 bits a layer saves sbh (34 + 5 as/h) bytes. Of these, 2sbh are the masks of two dropouts and as²b the mask of
    the dropout in attention, one byte an element. With attention that saves no scores a layer saves 34 sbh, and with
    recomputation only its input, 2sbh. Outside the layers, with a vocabulary of v, the model saves sbh for the mask of
    the dropout of the embedding, 2sbh each for the inputs of the last norm and of the output layer, and 4sbv for the
    FP32 logits.
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
    """Return the estimate at every stage."""
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
    outside = outside_at(stage, options, 0 if activations is None else activations.layers_bytes)
    paged = paged_at(stage, options)
    staging = staging_at(stage, options)
    device_params = 0.0 if PARAMETERS in options.offload.what else params
    device_gradients = 0.0 if GRADIENTS in options.offload.what else gradients
    device_optimizer = optimizer - (outside.states if OPTIMIZER in options.offload.what else 0.0)
    device_optimizer -= paged.host
    whole_units = None
    if options.layers is not None:
        whole_units = round(item * count * min(UNITS_HELD, options.layers) / options.layers)
    whole = gathered_bytes_per_parameter(options.optimizer) if stage >= 1 else 0
    sent = (COMMUNICATED_PER_PARAMETER[stage] * item + whole) * count * (ranks - 1) / ranks
    has_whole_params = stage >= 3 or PARAMETERS in options.offload.what
    has_whole_gradients = stage >= 2 or GRADIENTS in options.offload.what
    return StageEstimate(
        stage=stage,
        params_bytes=round(device_params),
        gradients_bytes=round(device_gradients),
        optimizer_bytes=round(device_optimizer),
        gathered_bytes=whole_units if has_whole_params else 0,
        gradients_in_flight_bytes=whole_units if has_whole_gradients else 0,
        activations_bytes=None if activations is None else _on_device(activations, options),
        host_bytes=round(outside.host + paged.host),
        disk_bytes=round(outside.disk),
        device_staging_bytes=None if staging is None else round(staging.device + paged.slots),
        host_staging_bytes=None if staging is None else round(staging.host),
        moved=replace(
            outside.moved,
            to_host=outside.moved.to_host + round(paged.host),
            to_device=outside.moved.to_device + round(paged.host),
        ),
        communicated_per_parameter=COMMUNICATED_PER_PARAMETER[stage],
        sent_bytes=round(sent),
    )


def _on_device(activations: Activations, options: EstimateOptions) -> int:
    """Return the bytes of activations on the device; where they are offloaded, those of the units at work."""
    if ACTIVATIONS not in options.offload.what or options.layers is None:
        return activations.total_bytes
    held = activations.layers_bytes * min(UNITS_HELD, options.layers) // options.layers
    return activations.total_bytes - activations.layers_bytes + held
