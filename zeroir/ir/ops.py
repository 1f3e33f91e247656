"""The ops between segments: a closed union of frozen dataclasses that declare themselves.

Every op runs on a named stream, in the stream's order, and may signal an ``event`` when it is done. Ops name regions
and views of buffers, never tensors. Each field declares what the op does with it (see ``op_fields``), and class
constants the rest; effects, text, labels and reports follow from that. An op's kind is its base class: consumers
match on kinds (``case ops.Transfer()``), and on single ops only where each has a rule of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import ClassVar, Final, get_args

from zeroir.ir.buffers import Region, Space, View
from zeroir.ir.contents import FACTORS, PRECONDITIONERS
from zeroir.ir.dtypes import DType
from zeroir.ir.op_fields import (
    Accumulated,
    Attribute,
    Awaited,
    Begun,
    CommName,
    Ended,
    Read,
    Result,
    SegmentName,
    Signalled,
    StreamName,
    Written,
)


class Mode(StrEnum):
    """The effect of a result on its destination: it replaces it, or is added to it."""

    WRITE = "write"
    ACCUMULATE = "accumulate"


class Reduction(StrEnum):
    """The combination of contributions by a collective. Sums are taken in FP32, in rank order, and rounded once."""

    SUM = "sum"
    MAX = "max"


class Refill(StrEnum):
    """The moment at which the hysteresis of loss scaling is restored.

    ``WINDOW``: when the scale grows. ``STEP``: after every step without overflow, so that only consecutive overflows
    count (DeepSpeed's ``consecutive_hysteresis``).
    """

    WINDOW = "window"
    STEP = "step"


class Algorithm(StrEnum):
    """Optimizers, each with torch's semantics of the same name.

    torch has no Lion (arXiv 2302.06675, algorithm 2) and no Shampoo (arXiv 1802.09568, algorithm 1).
    """

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    LION = "lion"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    SHAMPOO = "shampoo"

    @property
    def state_names(self) -> tuple[str, ...]:
        """The FP32 states kept per parameter, named as torch.optim names them."""
        return _STATE_NAMES[self]

    @property
    def direction_dtype(self) -> DType | None:
        """The dtype of the directions of an optimizer that works on whole parameters; None for the others.

        Its step is two ops: ``direction`` computes an element's direction from that element's gradient and states, and
        ``optimizer_step`` reads the directions of the whole flat.
        """
        return _DIRECTION_DTYPES.get(self)

    @property
    def factors_name(self) -> str | None:
        """The FP32 state of whole parameters, in coordinates of its own (``zeroir/ir/factors.py``), if it keeps one."""
        return _FACTORS.get(self)

    @property
    def takes_matrices_alone(self) -> bool:
        """Whether it updates only parameters of two dimensions."""
        return self in (Algorithm.MUON, Algorithm.SHAMPOO)

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The elements of ``OptimizerStep.hyper``, in order."""
        return _HYPER_NAMES[self]


_STATE_NAMES = {
    Algorithm.SGD: (),
    Algorithm.MOMENTUM: ("momentum_buffer",),
    Algorithm.ADAM: ("exp_avg", "exp_avg_sq"),
    Algorithm.ADAMW: ("exp_avg", "exp_avg_sq"),
    Algorithm.LION: ("exp_avg",),
    Algorithm.MUON: ("momentum_buffer",),
    Algorithm.ADAFACTOR: (),
    Algorithm.SHAMPOO: (),
}

# Muon's iteration begins by rounding to BF16, so no more is gathered.
_DIRECTION_DTYPES = {
    Algorithm.MUON: DType.BF16,
    Algorithm.ADAFACTOR: DType.F32,
    Algorithm.SHAMPOO: DType.F32,
}

_FACTORS = {Algorithm.ADAFACTOR: FACTORS, Algorithm.SHAMPOO: PRECONDITIONERS}

_HYPER_NAMES = {
    Algorithm.SGD: ("momentum", "dampening", "nesterov", "weight_decay"),
    Algorithm.MOMENTUM: ("momentum", "dampening", "nesterov", "weight_decay"),
    Algorithm.ADAM: ("beta1", "beta2", "eps", "weight_decay"),
    Algorithm.ADAMW: ("beta1", "beta2", "eps", "weight_decay"),
    Algorithm.LION: ("beta1", "beta2", "weight_decay"),
    Algorithm.MUON: (
        "momentum",
        "nesterov",
        "weight_decay",
        "eps",
        "ns_steps",
        "ns_coefficients.0",
        "ns_coefficients.1",
        "ns_coefficients.2",
        "adjust_lr_fn",
    ),
    Algorithm.ADAFACTOR: ("beta2_decay", "eps", "eps2", "d", "weight_decay"),
    Algorithm.SHAMPOO: ("eps", "weight_decay"),
}


class Operation:
    """The declarations of a class of ops beside its fields.

    * ``syntax`` is the op's line of text after its keyword: words, and the names of fields in braces. ``|`` begins the
      column of attributes. A part in square brackets is left out where its field has the default. Every op has
      ``!event =`` before the keyword and ``stream=`` at the end, so that ``syntax`` does not repeat them.
    * ``participle`` says what the op does to the regions that it writes, for the histories of buffers: ``copied``.
    * ``is_asynchronous`` says that other streams see its results only after a wait.
    * ``same_elements`` names fields whose regions correspond element by element.
    """

    __slots__ = ()

    syntax: ClassVar[str]
    participle: ClassVar[str] = "written"
    is_asynchronous: ClassVar[bool] = False
    same_elements: ClassVar[tuple[str, ...]] = ()


# ---------------------------------------------------------------------------------------------------------- memory


class Memory(Operation):
    """The kind of ops that begin or end a buffer."""

    __slots__ = ()

    syntax = "{buffer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc(Memory):
    """Begin a temporary buffer. Its elements are undefined (the reference runtime fills them with NaN)."""

    buffer: Begun[str]
    stream: StreamName[str]
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Memory):
    """End a temporary buffer. Every use of it must happen before."""

    buffer: Ended[str]
    stream: StreamName[str]
    event: Signalled[str] | None = None


# ----------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Source and destination of one contiguous piece of a collective."""

    syntax: ClassVar[str] = "{source} -> {destination}"

    source: Read[Region]
    destination: Written[Region]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Operation):
    """The kind of ops in which the ranks of a communicator take part together.

    All pairs are one launch. ``wire_dtype`` is the element type that travels, the source's when None. ``staging`` is
    a region that the backend may use as scratch.
    """

    syntax = "{pairs} | comm={comm} [wire={wire_dtype}] [staging={staging}]"
    is_asynchronous = True

    pairs: tuple[Pair, ...]
    comm: CommName[str]
    stream: StreamName[str]
    event: Signalled[str] | None = None
    wire_dtype: Attribute[DType] | None = None
    staging: Written[Region] | None = None


class Gather(Collective):
    """The kind of collectives that concatenate the ranks' slices."""

    __slots__ = ()

    participle = "gathered"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(Gather):
    """Concatenate, in coordinate order, every rank's source into every rank's destination.

    Per pair: destination local numel = source local numel × axis size.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Gather):
    """An all-gather issued ahead of need: the same effects under its own name, so that it is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(Collective):
    """Combine every rank's source; each rank's destination gets the slice of its coordinate.

    Per pair: source local numel = destination local numel × axis size.
    """

    syntax = "{pairs} | comm={comm} [reduction={reduction}] [wire={wire_dtype}] [staging={staging}]"
    participle = "reduced"

    reduction: Attribute[Reduction] = Reduction.SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Collective):
    """Combine every rank's source into every rank's destination, of equal numel; both may be the same region."""

    syntax = "{pairs} | comm={comm} [reduction={reduction}] [wire={wire_dtype}] [staging={staging}]"
    participle = "reduced"

    reduction: Attribute[Reduction] = Reduction.SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Collective):
    """Copy the source of the rank at coordinate ``root`` of the axis to every rank's destination."""

    syntax = "{pairs} | comm={comm} root={root} [wire={wire_dtype}] [staging={staging}]"
    participle = "broadcast"

    root: Attribute[int] = 0


# ------------------------------------------------------------------------------------------------- synchronisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Operation):
    """Order everything later on ``on`` (a stream, or ``host``) after the op that signals ``event``."""

    syntax = "{waited} | on={on}"

    waited: Awaited[str]
    on: StreamName[str]


# --------------------------------------------------------------------------------------------------------- compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """The view that a segment input is bound to; it holds the current value of ``parameter``, where one is named."""

    view: Read[View]
    parameter: Attribute[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The destination of a segment output, which may contribute to the gradient of the parameter ``gradient``."""

    view: Result[View]
    mode: Attribute[Mode] = Mode.WRITE
    gradient: Attribute[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Operation):
    """Call a segment: arguments in the order of its inputs, destinations in the order of its outputs.

    A destination of None drops the output.
    """

    syntax = "{segment}({arguments}) -> ({destinations}) | unit={unit}"

    segment: SegmentName[str]
    arguments: tuple[Argument, ...]
    destinations: tuple[Destination | None, ...]
    unit: Attribute[str]
    stream: StreamName[str]
    event: Signalled[str] | None = None


# ----------------------------------------------------------------------------------------------------- elementwise


class Elementwise(Operation):
    """The kind of ops that set each element of a region by itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(Elementwise):
    """Convert the source to the destination's dtype (rounding to nearest even), replacing or adding to it.

    Within one dtype and space it is a copy; adding happens in the destination's dtype.
    """

    syntax = "{source} -> {mode}{destination}"
    participle = "cast"
    same_elements = ("source", "destination")

    source: Read[Region]
    destination: Result[Region]
    stream: StreamName[str]
    mode: Attribute[Mode] = Mode.WRITE
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill(Elementwise):
    """Set every element of the region to one value."""

    syntax = "{destination} = {value}"
    participle = "filled"

    destination: Written[Region]
    value: Attribute[float]
    stream: StreamName[str]
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Elementwise):
    """Multiply the region, in place, by a one-element region of a scalar buffer; a factor of 0 clears NaN, too."""

    syntax = "{region} by {by}"
    participle = "scaled"

    region: Accumulated[Region]
    by: Read[Region]
    stream: StreamName[str]
    event: Signalled[str] | None = None


# ---------------------------------------------------------------------------------------------------------- update


class Update(Operation):
    """The kind of ops that the optimizer's step consists of: statistics, the decision, and the changes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNorm(Update):
    """Write the FP32 sum of squares of this rank's sources, added in the order given, to a one-element f32 region.

    It is a partial sum until an all_reduce over every axis that cuts the sources makes it global.
    """

    syntax = "({sources}) -> {destination}"

    sources: tuple[Read[Region], ...]
    destination: Written[Region]
    stream: StreamName[str]
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinite(Update):
    """Write 1 to a one-element f32 region if any element of this rank's sources is infinite or NaN, else 0.

    It is a partial answer until an all_reduce makes it global.
    """

    syntax = "({sources}) -> {destination}"

    sources: tuple[Read[Region], ...]
    destination: Written[Region]
    stream: StreamName[str]
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide(Update):
    """Take the one decision of an update, alike on every rank, and advance the step count.

    ``overflow`` (f32[1], from check_finite) and ``norm`` (f32[1], a sum of squares of scaled, summed gradients) are
    global by now, or None where the program does not need them. With S = ``divisor`` × ``weight`` × the loss scale
    (``loss_scale[0]``; either is 1 when None):

    * ``skip`` (f32[1], with ``overflow`` or ``weight`` alone): 1 when overflow > 0 or the weight is 0, else 0;
    * ``gradient_divisor`` (f32[1]): S / c, with c = min(1, max_norm / (sqrt(norm) / S + 1e-6)) when ``max_norm`` is
      given, as torch.nn.utils.clip_grad_norm_ has it, else 1;
    * ``step`` (f32[1]): + 1 − skip.

    ``weight`` (f32[1]) is the sum of the weights of the step's micro-batches. ``divisor`` is the size of the mesh axes
    that it is not summed over: the world size where each rank counts its own micro-steps, 1 where the weights of all
    ranks are summed. Without ``weight``, ``divisor`` is the world size × the number of micro-steps.
    """

    syntax = (
        "step={step} gradient_divisor={gradient_divisor} divisor={divisor} [overflow={overflow}] [norm={norm}]"
        " [loss_scale={loss_scale}] [skip={skip}] [max_norm={max_norm}] [weight={weight}]"
    )

    step: Accumulated[Region]
    gradient_divisor: Written[Region]
    divisor: Attribute[int]
    stream: StreamName[str]
    overflow: Read[Region] | None = None
    norm: Read[Region] | None = None
    loss_scale: Read[Region] | None = None
    skip: Written[Region] | None = None
    max_norm: Attribute[float] | None = None
    weight: Read[Region] | None = None
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The learning rate and the hyper-parameters of one optimizer group; see ``OptimizerStep``."""

    syntax: ClassVar[str] = "{group} lr={lr} hyper={hyper}"

    group: Attribute[str]
    lr: Read[Region]
    hyper: Read[Region]


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction(Update):
    """Compute the direction of each element from its ``grad`` / gradient_divisor, and move its ``states``.

    It is the element-wise half of the step of an optimizer that works on whole parameters; ``optimizer_step`` is the
    other half. ``grad`` and ``states`` are f32, ``direction`` has ``algorithm.direction_dtype``, all with one numel.

    * muon: momentum_buffer × momentum + gradient × (1 − momentum), and once more in that way with ``nesterov``;
    * adafactor, shampoo: the gradient itself.

    ``grad`` is used up. Where ``skip`` is 1 the states stay as they are, and the direction is never applied. Settings
    and the other fields are those of ``OptimizerStep``.
    """

    syntax = (
        "{algorithm} grad={grad} states=({states}) -> {direction} step={step} lr={lr} hyper={hyper}"
        " gradient_divisor={gradient_divisor} [skip={skip}] | group={group} [others=({others})]"
    )
    participle = "updated"
    same_elements = ("grad", "states", "direction")

    algorithm: Attribute[Algorithm]
    grad: Accumulated[Region]
    states: tuple[Accumulated[Region], ...]
    direction: Written[Region]
    step: Read[Region]
    lr: Read[Region]
    hyper: Read[Region]
    gradient_divisor: Read[Region]
    stream: StreamName[str]
    skip: Read[Region] | None = None
    group: Attribute[str] = "default"
    others: tuple[GroupSettings, ...] = ()
    event: Signalled[str] | None = None

    @property
    def settings(self) -> tuple[GroupSettings, ...]:
        """The settings of every group that the op names."""
        own = GroupSettings(group=self.group, lr=self.lr, hyper=self.hyper)
        return (own, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep(Update):
    """Update ``param`` (and ``states``) in place with ``grad`` / gradient_divisor, all of one numel and dtype.

    ``grad`` is used up: torch's fused kernels store the divided gradient there, and nothing may read it afterwards.

    ``states`` are in the order of ``algorithm.state_names``. ``lr`` is a one-element f64 region on the device,
    ``hyper`` an f64 region on the host with the values of ``algorithm.hyper_names``. Where ``skip`` is 1 nothing
    changes. ``step`` is the count that ``decide`` advanced.

    ``lr`` and ``hyper`` are those of ``group``, and ``others`` those of other groups. Each element is updated with the
    settings of the group whose intervals (``Program.groups``) contain it; without groups, all with the first. An
    element in no group, such as padding between parameters, may stay as it is.

    With an optimizer that works on whole parameters (``algorithm.direction_dtype``) ``grad`` are the directions of the
    whole flat, although ``param`` may be a slice, and ``states`` are those of ``direction``, so none are here. Each
    rank computes the steps of the parameters that meet its slice. Adafactor also reads the parameters as they were:
    ``whole``, the whole flat, unless ``param`` is that already; its ``factors``, second moments, are alike on all
    ranks. Shampoo's ``factors``, sums of products, are sharded; ``whole`` are all of them, unless ``factors`` are.
    """

    syntax = (
        "{algorithm} param={param} grad={grad} states=({states}) step={step} lr={lr} hyper={hyper}"
        " gradient_divisor={gradient_divisor} [skip={skip}] [whole={whole}] [factors={factors}]"
        " | group={group} [others=({others})]"
    )
    participle = "updated"
    same_elements = ("param", "grad", "states")

    algorithm: Attribute[Algorithm]
    param: Accumulated[Region]
    grad: Accumulated[Region]
    states: tuple[Accumulated[Region], ...]
    step: Read[Region]
    lr: Read[Region]
    hyper: Read[Region]
    gradient_divisor: Read[Region]
    stream: StreamName[str]
    skip: Read[Region] | None = None
    group: Attribute[str] = "default"
    others: tuple[GroupSettings, ...] = ()
    whole: Read[Region] | None = None
    factors: Accumulated[Region] | None = None
    event: Signalled[str] | None = None

    @property
    def settings(self) -> tuple[GroupSettings, ...]:
        """The settings of every group that the op names."""
        own = GroupSettings(group=self.group, lr=self.lr, hyper=self.hyper)
        return (own, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(Update):
    """Move the moving average of parameters one step: ``average`` × decay + ``param`` × (1 − decay).

    Both are f32 of one numel, and ``param`` are the parameters that this step's ``optimizer_step`` left. Each of the
    three operations rounds by itself, as in ``torch.optim.swa_utils.get_ema_avg_fn``. Where ``skip`` is 1 nothing
    changes.
    """

    syntax = "{param} -> {average} [skip={skip}] | decay={decay}"
    participle = "averaged"
    same_elements = ("param", "average")

    param: Read[Region]
    average: Accumulated[Region]
    decay: Attribute[float]
    stream: StreamName[str]
    skip: Read[Region] | None = None
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateScale(Update):
    """Dynamic loss scaling: ``state`` is f32[3] = (scale, steps since the last change, hysteresis left).

    On overflow (skip = 1): with hysteresis left ≤ 1 the scale becomes max(scale / factor, minimum), else the
    hysteresis drops by one; the step counter restarts. Otherwise after ``window`` steps without overflow the scale
    grows by ``factor`` and the hysteresis is restored, earlier where ``refill`` says so. These are DeepSpeed's
    semantics. Where ``weight`` (f32[1]) is given and 0, the step was skipped because it has no data: nothing changes.
    """

    syntax = (
        "{state} skip={skip} window={window} factor={factor} hysteresis={hysteresis} minimum={minimum}"
        " [refill={refill}] [weight={weight}]"
    )

    state: Accumulated[Region]
    skip: Read[Region]
    stream: StreamName[str]
    window: Attribute[int] = 1000
    factor: Attribute[float] = 2.0
    hysteresis: Attribute[int] = 2
    minimum: Attribute[float] = 1.0
    refill: Attribute[Refill] = Refill.WINDOW
    weight: Read[Region] | None = None
    event: Signalled[str] | None = None


# -------------------------------------------------------------------------------------------------------- transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Operation):
    """The kind of ops that copy a region, unchanged, to one of the same numel and dtype.

    ``from_space`` and ``to_space`` say where the source and the destination must be.
    """

    from_space: ClassVar[Space]
    to_space: ClassVar[Space]

    syntax = "{source} -> {destination}"
    participle = "copied"
    is_asynchronous = True
    same_elements = ("source", "destination")

    source: Read[Region]
    destination: Written[Region]
    stream: StreamName[str]
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToHost(Transfer):
    """Copy a device region to a host region."""

    from_space = Space.DEVICE
    to_space = Space.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class ToDevice(Transfer):
    """Copy a host region to a device region."""

    from_space = Space.HOST
    to_space = Space.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Transfer):
    """Read a disk region into a host region."""

    from_space = Space.DISK
    to_space = Space.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Store(Transfer):
    """Write a host region to a disk region."""

    from_space = Space.HOST
    to_space = Space.DISK


MemoryOp = Alloc | Release
CollectiveOp = AllGather | Prefetch | ReduceScatter | AllReduce | Broadcast
ElementwiseOp = Cast | Fill | Scale
UpdateOp = GradNorm | CheckFinite | Decide | Direction | OptimizerStep | Average | UpdateScale
TransferOp = ToHost | ToDevice | Load | Store
Op = MemoryOp | CollectiveOp | Wait | Compute | ElementwiseOp | UpdateOp | TransferOp
"""Every op there is. Handle it with ``match`` over kinds or ops, and ``assert_never``."""

IssuedOp = MemoryOp | CollectiveOp | Compute | ElementwiseOp | UpdateOp | TransferOp
"""Every op that a stream runs: all but ``wait``, which orders streams."""

OP_CLASSES: Final[tuple[type[Op], ...]] = get_args(Op)
"""The classes of the union, in its order."""


def op_name(kind: type) -> str:
    """The keyword, in the text, of a class of ops: ``AllGather`` is ``all_gather``."""
    return _keyword(kind.__name__)


@cache
def _keyword(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()
