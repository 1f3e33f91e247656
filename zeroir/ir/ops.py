"""The ops between segments: a closed union of frozen dataclasses that declare themselves.

Every op runs on a named stream, in the stream's order, and may signal an ``event`` when it is done. Ops name regions
and views of buffers, never tensors. Each field declares what the op does with it (see ``op_fields``), and class
constants the rest; effects, text, labels and reports follow from that. An op's kind is its base class: consumers
match on kinds (``case ops.Transfer()``), and on single ops only where each has a rule of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final, get_args

from zeroir.ir.buffers import Region, Space, View
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
from zeroir.ir.operation import Mode, Operation, Reduction, Refill
from zeroir.ir.optimizers.catalogue import Algorithm
from zeroir.ir.update_ops import (
    Average,
    CheckFinite,
    CommitStep,
    Decide,
    Direction,
    GradNorm,
    GroupSettings,
    Guess,
    OptimizerStep,
    SpeculativeStep,
    StepOp,
    Update,
    UpdateOp,
    UpdateScale,
)

__all__ = [
    "OP_CLASSES",
    "Algorithm",
    "AllGather",
    "AllReduce",
    "Alloc",
    "Argument",
    "Average",
    "Broadcast",
    "Cast",
    "CheckFinite",
    "Collective",
    "CollectiveOp",
    "CommitStep",
    "Compute",
    "Decide",
    "Destination",
    "Direction",
    "Elementwise",
    "ElementwiseOp",
    "Fill",
    "Gather",
    "GradNorm",
    "GroupSettings",
    "Guess",
    "IssuedOp",
    "Load",
    "Memory",
    "MemoryOp",
    "Mode",
    "Op",
    "Operation",
    "OptimizerStep",
    "Pair",
    "Prefetch",
    "ReduceScatter",
    "Reduction",
    "Refill",
    "Release",
    "Scale",
    "SpeculativeStep",
    "StepOp",
    "Store",
    "ToDevice",
    "ToHost",
    "Transfer",
    "TransferOp",
    "Update",
    "UpdateOp",
    "UpdateScale",
    "Wait",
    "op_name",
]


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
    """An all-gather issued before it is needed: the same effects, with its own name so that it is visible."""


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
    """The kind of ops that compute each element of a region separately."""

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
TransferOp = ToHost | ToDevice | Load | Store
Op = MemoryOp | CollectiveOp | Wait | Compute | ElementwiseOp | UpdateOp | TransferOp
"""Every op. Handle it with ``match`` over kinds or ops, and ``assert_never``."""

IssuedOp = MemoryOp | CollectiveOp | Compute | ElementwiseOp | UpdateOp | TransferOp
"""Every op that a stream runs: all but ``wait``, which orders streams."""

OP_CLASSES: Final[tuple[type[Op], ...]] = get_args(Op)
"""The classes of the union, in its order."""


def op_name(kind: type) -> str:
    """Return the keyword, in the text, of a class of ops: ``AllGather`` is ``all_gather``."""
    return _keyword(kind.__name__)


@cache
def _keyword(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()
