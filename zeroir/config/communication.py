"""When parameters and gradients travel."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from zeroir.config.field_types import Names, OptionalAmount
from zeroir.config.searched import Searched
from zeroir.config.table import Option, OptionObject
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.limits import MOST_BYTES, MOST_COUNT

_GROUP = "Communication"

EARLY: Final = "early"
"""The choice of ``prefetch`` that gathers as early as memory allows."""


class Prefetch(OptionObject):
    """How early parameters are gathered (stage 3): one of the three.

    ``units`` is a number of units ahead of their use, ``most_bytes`` a limit on the bytes ahead, and ``memory`` an
    amount of device memory, such as ``80GB``, that early gathers may fill.
    """

    units: Annotated[
        int,
        Field(ge=0, le=MOST_COUNT),
        Option(
            name="prefetch",
            group=_GROUP,
            help="Number of units that parameters are gathered ahead of their use (stage 3).",
            least_stage=3,
            searched=Searched(axis=5, values=(0, 1, 2, 3, 4, EARLY), fast=2, lean=0, off=0),
        ),
    ] = 1
    most_bytes: Annotated[
        int | None,
        Field(ge=1, le=MOST_BYTES),
        Option(
            name="prefetch_bytes",
            group=_GROUP,
            help="Gather parameters ahead of their use while those ahead have at most this number of bytes, instead of "
            "--prefetch units ahead (stage 3). [default: none]",
            least_stage=3,
        ),
    ] = None
    memory: Annotated[
        OptionalAmount,
        Option(
            name="prefetch_budget",
            group=_GROUP,
            help="Gather parameters as early as this amount of device memory allows, such as 80GB, instead of "
            "--prefetch units ahead (stage 3). [default: none]",
            least_stage=3,
        ),
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        """The device memory that early gathers may fill; None where it does not say how early they are."""
        return None if self.memory is None else parse_bytes(self.memory)


class Unshard(OptionObject):
    """Parameters that stay gathered from forward to backward instead of being gathered twice (stage 3).

    ``units`` are patterns of names; ``*`` means all repeated units. ``most_bytes`` keeps those of a unit whose next use
    is at most so many bytes of other parameters away.
    """

    units: Annotated[
        Names,
        Option(
            name="unshard",
            group="Memory",
            help="Units whose parameters are kept from forward to backward instead of gathered twice: names or "
            "patterns; * means all repeated units (stage 3).",
            least_stage=3,
            searched=Searched(axis=6, fast=-1, lean=0),
        ),
    ] = ()
    most_bytes: Annotated[
        int | None,
        Field(ge=1, le=MOST_BYTES),
        Option(
            name="unshard_bytes",
            group="Memory",
            help="Keep the gathered parameters of a unit until its next use if the parameters used in between have at "
            "most this number of bytes (stage 3). [default: none]",
            least_stage=3,
        ),
    ] = None


class Communication(OptionObject):
    """How collectives are merged and placed.

    ``bucket`` and ``bucket_gathers`` are bytes up to which neighbouring collectives, or gathers alone, are merged.
    ``live_gradients`` bounds the full gradients that exist at once. With ``overlap_update`` a unit is updated as soon
    as its gradient is reduced, and with ``elide`` gathers that no op reads are left out.
    """

    bucket: Annotated[
        int,
        Field(ge=0, le=MOST_BYTES),
        Option(
            group=_GROUP,
            help="Merge neighbouring collectives up to this number of bytes; 0 merges none.",
            searched=Searched(
                axis=3,
                values=(0, 25_000_000, 100_000_000, 400_000_000),
                fast=2,
                lean=0,
                off=0,
                words="buckets of {bytes}",
            ),
        ),
    ] = 0
    bucket_gathers: Annotated[
        int | None,
        Field(ge=0, le=MOST_BYTES),
        Option(
            group=_GROUP,
            help="Another limit than --bucket for gathers of parameters (stages 1 to 3). [default: --bucket]",
            least_stage=1,
        ),
    ] = None
    overlap_update: Annotated[
        bool,
        Option(
            group=_GROUP,
            help="Update each unit as soon as its gradient is reduced (without --clip and fp16).",
        ),
    ] = True
    elide: Annotated[
        bool,
        Option(
            group=_GROUP,
            help="Leave out gathers that no op reads, or that would follow their own release.",
        ),
    ] = True
    live_gradients: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(
            group="Memory",
            help="Largest number of units whose full gradients exist at once (stages 2, 3).",
            least_stage=2,
            searched=Searched(axis=4, values=(1, 2, 3, 4), fast=-1, lean=0),
        ),
    ] = 2
