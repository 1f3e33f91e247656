"""The contents of regions, about which the laws of training make statements.

Contents appear in three places with one meaning: as the resting content of a persistent buffer (``buffer %b.param :
f16[64] device param = param b @dp``), in the entry and exit state of a section, and as the abstract values of the
verifier.

A *flat* is the padded, one-dimensional space of the parameters of one (unit, dtype, trainable); its gradient, master
weights and optimizer states use the same coordinates. ``FlatContent`` says which elements of a flat a region holds:
element ``i`` of the region is flat element ``offset + i``, and with ``shard=axis`` it is flat element ``offset +
coordinate(axis) * region_numel + i``: this rank's slice. A region with a part of each rank's slice has a ``stride``,
the elements from one coordinate's part to the next one's, which replaces ``region_numel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from zeroir.ir.fields import Flag, Form, NameKind, Refers

PARAM = "param"
MASTER = "master"
GRAD = "grad"
DIRECTION = "direction"
"""The directions of an optimizer that works on whole parameters."""
EMA = "ema"
"""The exponential moving average of the parameters."""


PASSING: Final = (GRAD, DIRECTION)
"""Quantities of flats that exist only within a step."""


class Micro(StrEnum):
    """The micro-steps of the current step that a gradient includes.

    ``PAST`` is every micro-step before the one that the section runs (none, and then all zeros, when it is the first),
    ``CURRENT`` that one alone, ``ALL`` every micro-step of the step. ``STALE`` was left by an earlier step: nothing may
    read it; only the padding between parameters is known to be zero.
    """

    STALE = "stale"
    PAST = "past"
    CURRENT = "current"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatContent:
    """Elements of a flat: parameters, master weights, gradients, averages, or an optimizer state such as ``exp_avg``.

    ``version`` counts the updates since the step began (parameters, masters, averages, states). ``reduced`` names the
    mesh axes over which a gradient has been summed, in mesh order, and ``micro`` its micro-steps. Padding, the elements
    of a flat that belong to no parameter, is zero in every quantity. Only an optimizer state can have parts of slices
    at rest, with a ``stride``.

    ``guessed`` elements are those of a speculative step, which a ``commit_step`` makes final.
    """

    syntax: ClassVar[str] = (
        "{quantity} {flat} [@{shard}] [offset={offset}] [stride={stride}] [version={version}]"
        " [reduced=({reduced})] [micro={micro}] {guessed}"
    )

    quantity: Annotated[str, Form.QUANTITY]
    flat: Annotated[str, Refers(NameKind.FLAT)]
    offset: int = 0
    shard: Annotated[str, Refers(NameKind.AXIS)] | None = None
    version: int = 0
    reduced: tuple[Annotated[str, Refers(NameKind.AXIS)], ...] = ()
    micro: Micro | None = None
    stride: int | None = None
    guessed: Annotated[bool, Flag("guessed")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedContent:
    """A named value: an input, a constant, a scalar, a module buffer, an activation.

    ``version`` 0 is the value at the start of the step.
    """

    syntax: ClassVar[str] = "value {name} [version={version}]"

    name: Annotated[str, Refers(NameKind.VALUE)]
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """Every element is zero: a gradient to which nothing has contributed yet."""

    syntax: ClassVar[str] = "zeros"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightContent:
    """One number: the sum of the weights of the micro-batches of some micro-steps, over the ranks of some mesh axes.

    ``micro`` and ``reduced`` have the same meaning as for a gradient: each gradient is the sum of one contribution per
    micro-step, multiplied by its weight, so the sum of the same weights is its divisor.
    """

    syntax: ClassVar[str] = "weight [reduced=({reduced})] micro={micro}"

    micro: Micro
    reduced: tuple[Annotated[str, Refers(NameKind.AXIS)], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContent:
    """A copy of a region from the last run of section ``save``; undefined before. Only the host reads it.

    The fields are those of a ``Region``, which this module cannot import. With an ``event``, that event is pending
    between sections, and the copy is complete once it is done.
    """

    syntax: ClassVar[str] = "snapshot"  # then the region and the event

    buffer: str
    offset: int
    numel: int
    shard: str | None = None
    event: str | None = None


Content = FlatContent | NamedContent | Zeros | WeightContent | SnapshotContent
