"""The ops between segments: a closed union of frozen dataclasses.

Every op runs on a named stream, in the stream's order, and may signal an ``event`` when it is done. Ops name regions
and views of buffers, never tensors. What an op does to memory, streams and communicators is in ``effects``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from zeroir.ir.buffers import Region, View
from zeroir.ir.dtypes import DType


class Mode(StrEnum):
    """How a result meets its destination: replaces it, or is added to it."""

    WRITE = "write"
    ACCUMULATE = "accumulate"


class Reduction(StrEnum):
    """How a collective combines contributions. Sums are taken in FP32, in rank order, and rounded once."""

    SUM = "sum"
    MAX = "max"


class Algorithm(StrEnum):
    """Element-wise optimizers, each with torch's semantics of the same name."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"

    @property
    def state_names(self) -> tuple[str, ...]:
        """The FP32 states kept per parameter, named as torch.optim names them."""
        return _STATE_NAMES[self]


_STATE_NAMES = {
    Algorithm.SGD: (),
    Algorithm.MOMENTUM: ("momentum_buffer",),
    Algorithm.ADAM: ("exp_avg", "exp_avg_sq"),
    Algorithm.ADAMW: ("exp_avg", "exp_avg_sq"),
}


# ---------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc:
    """Begin a temporary buffer. Its elements are undefined (the reference runtime fills them with NaN)."""

    buffer: str
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """End a temporary buffer. Every use of it must happen before."""

    buffer: str
    stream: str
    event: str | None = None


# ----------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Source and destination of one contiguous piece of a collective."""

    source: Region
    destination: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Concatenate, in coordinate order, every rank's source into every rank's destination.

    Per pair: destination local numel = source local numel × axis size. All pairs are one launch. ``wire_dtype`` is
    the element type that travels, the source's when None. ``staging`` is a region that the backend may use as scratch.
    """

    pairs: tuple[Pair, ...]
    comm: str
    stream: str
    event: str | None = None
    wire_dtype: DType | None = None
    staging: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """An all-gather issued ahead of need: the same effects under its own name, so that it is seen."""

    pairs: tuple[Pair, ...]
    comm: str
    stream: str
    event: str | None = None
    wire_dtype: DType | None = None
    staging: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter:
    """Combine every rank's source; each rank's destination gets the slice of its coordinate.

    Per pair: source local numel = destination local numel × axis size.
    """

    pairs: tuple[Pair, ...]
    comm: str
    stream: str
    reduction: Reduction = Reduction.SUM
    event: str | None = None
    wire_dtype: DType | None = None
    staging: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Combine every rank's source into every rank's destination, of equal numel; both may be the same region."""

    pairs: tuple[Pair, ...]
    comm: str
    stream: str
    reduction: Reduction = Reduction.SUM
    event: str | None = None
    wire_dtype: DType | None = None
    staging: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Copy the source of the rank at coordinate ``root`` of the axis to every rank's destination."""

    pairs: tuple[Pair, ...]
    comm: str
    stream: str
    root: int = 0
    event: str | None = None
    wire_dtype: DType | None = None
    staging: Region | None = None


# ------------------------------------------------------------------------------------------------- synchronisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Order everything later on ``on`` (a stream, or ``host``) after the op that signals ``event``."""

    waited: str
    on: str


# --------------------------------------------------------------------------------------------------------- compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """What a segment input is bound to. ``parameter`` names the parameter whose current value it must hold."""

    view: View
    parameter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a segment output goes. ``gradient`` names the parameter whose gradient the output contributes to."""

    view: View
    mode: Mode = Mode.WRITE
    gradient: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Call a segment: arguments in the order of its inputs, destinations in the order of its outputs.

    A destination of None drops the output.
    """

    segment: str
    arguments: tuple[Argument, ...]
    destinations: tuple[Destination | None, ...]
    unit: str
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Convert the source to the destination's dtype (rounding to nearest even), replacing or adding to it.

    Within one dtype and space it is a copy; adding happens in the destination's dtype.
    """

    source: Region
    destination: Region
    stream: str
    mode: Mode = Mode.WRITE
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Set every element of the region to one value."""

    destination: Region
    value: float
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Multiply the region, in place, by a one-element region of a scalar buffer."""

    region: Region
    by: Region
    stream: str
    event: str | None = None


# ---------------------------------------------------------------------------------------------------------- update


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNorm:
    """Write the FP32 sum of squares of this rank's sources, added in the order given, to a one-element f32 region.

    It is a partial sum until an all_reduce over every axis that cuts the sources makes it global.
    """

    sources: tuple[Region, ...]
    destination: Region
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinite:
    """Write 1 to a one-element f32 region if any element of this rank's sources is infinite or NaN, else 0.

    It is a partial answer until an all_reduce makes it global.
    """

    sources: tuple[Region, ...]
    destination: Region
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Take the one decision of an update, alike on every rank, and advance the step count.

    ``overflow`` (f32[1], from check_finite) and ``norm`` (f32[1], a sum of squares of scaled, summed gradients) are
    global by now, or None where the program does not need them. With S = ``divisor`` × the loss scale
    (``loss_scale[0]``, 1 when None):

    * ``skip`` (f32[1], only with ``overflow``): 1 when overflow > 0, else 0;
    * ``gradient_divisor`` (f32[1]): S / c, with c = min(1, max_norm / (sqrt(norm) / S + 1e-6)) when ``max_norm`` is
      given, as torch.nn.utils.clip_grad_norm_ has it, else 1;
    * ``step`` (f32[1]): + 1 − skip.

    ``divisor`` = world size × micro-steps.
    """

    step: Region
    gradient_divisor: Region
    divisor: int
    stream: str
    overflow: Region | None = None
    norm: Region | None = None
    loss_scale: Region | None = None
    skip: Region | None = None
    max_norm: float | None = None
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Update ``param`` (and ``states``) in place with ``grad`` / gradient_divisor, all of one numel and dtype.

    ``grad`` is used up: torch's fused kernels store the divided gradient there, and nothing may read it afterwards.

    ``states`` are in the order of ``algorithm.state_names``. ``lr`` is a one-element f64 region on the device,
    ``hyper`` an f64 region on the host: (momentum, dampening, nesterov, weight_decay) for sgd and momentum,
    (beta1, beta2, eps, weight_decay) for adam and adamw. Where ``skip`` is 1 nothing changes. ``step`` is the count
    that ``decide`` advanced.
    """

    algorithm: Algorithm
    param: Region
    grad: Region
    states: tuple[Region, ...]
    step: Region
    lr: Region
    hyper: Region
    gradient_divisor: Region
    stream: str
    skip: Region | None = None
    group: str = "default"
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateScale:
    """Dynamic loss scaling: ``state`` is f32[3] = (scale, steps since the last change, hysteresis left).

    On overflow (skip = 1): with hysteresis left ≤ 1 the scale becomes max(scale / factor, minimum), else the
    hysteresis drops by one; the step counter restarts. Otherwise after ``window`` steps without overflow the scale
    grows by ``factor`` and the hysteresis is restored. These are DeepSpeed's semantics.
    """

    state: Region
    skip: Region
    stream: str
    window: int = 1000
    factor: float = 2.0
    hysteresis: int = 2
    minimum: float = 1.0
    event: str | None = None


# -------------------------------------------------------------------------------------------------------- transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ToHost:
    """Copy a device region to a host region of the same numel and dtype."""

    source: Region
    destination: Region
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToDevice:
    """Copy a host region to a device region of the same numel and dtype."""

    source: Region
    destination: Region
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read a disk region into a host region of the same numel and dtype."""

    source: Region
    destination: Region
    stream: str
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Write a host region to a disk region of the same numel and dtype."""

    source: Region
    destination: Region
    stream: str
    event: str | None = None


Memory = Alloc | Release
Collective = AllGather | Prefetch | ReduceScatter | AllReduce | Broadcast
Update = GradNorm | CheckFinite | Decide | OptimizerStep | UpdateScale
Transfer = ToHost | ToDevice | Load | Store
Op = Memory | Collective | Wait | Compute | Cast | Fill | Scale | Update | Transfer
"""Every op there is. Handle it with ``match`` and ``assert_never``."""


def op_name(kind: type) -> str:
    """The keyword, in the text, of a class of ops: ``AllGather`` is ``all_gather``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
