"""The options of what is kept outside device memory: the types of their fields, and the texts of the help.

A program stores the kind of memory (``host`` or ``disk``) and not the folder: a folder belongs to a run on a machine.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from zeroir.config.field_types import Names, OptionalAmount
from zeroir.ir.limits import MOST_BYTES

OPTIMIZER: Final = "optimizer"
GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
ACTIVATIONS: Final = "activations"
ADAPTIVE: Final = "adaptive"

OFFLOADED: Final = (OPTIMIZER, GRADIENTS, PARAMETERS, ACTIVATIONS)
"""What can be kept outside device memory, in the order in which options list it."""

KEPT_ON_DISK: Final = (OPTIMIZER, PARAMETERS, ACTIVATIONS)
"""What a disk can keep; gradients, which the update reads at once, stay in host memory."""

HOST: Final = "host"
DISK: Final = "disk"

PAGE_BYTES: Final = 2 * 1024 * 1024
"""The size of a page unless told otherwise: that of the pages of bitsandbytes' paged optimizers."""

DISK_BLOCK_BYTES: Final = 4096
"""Pages start and end on multiples of this: reads and writes that bypass the page cache are whole blocks of a disk."""


def _in_canonical_order(kinds: tuple[str, ...]) -> tuple[str, ...]:
    if kinds == (ADAPTIVE,):
        return kinds
    if not set(kinds) <= set(OFFLOADED):
        raise PydanticCustomError(
            "offload",
            "some of {kinds}, separated by commas, or {adaptive} alone",
            {"kinds": ", ".join(OFFLOADED), "adaptive": ADAPTIVE},
        )
    return tuple(kind for kind in OFFLOADED if kind in kinds)


def _is_a_place(place: str) -> str:
    memory, colon, folder = place.partition(":")
    if place == HOST or (memory == DISK and bool(folder.strip()) == bool(colon)):
        return place
    raise PydanticCustomError("offload_to", "host, disk or disk:FOLDER")


def _as_number(bits: object) -> object:
    """A number that a program stores as text, which no literal would match."""
    return int(bits) if isinstance(bits, str) and bits.isdecimal() else bits


Offload = Annotated[
    Names,
    Field(
        description="What is kept outside device memory and copied there and back: optimizer, gradients, parameters, "
        "activations, separated by commas; or adaptive: what exceeds --memory-budget and no more."
    ),
    AfterValidator(_in_canonical_order),
]

OffloadTo = Annotated[
    str,
    Field(
        description="Where it is kept: host (memory of the CPU), or disk:FOLDER, with host memory as the cache of the "
        "disk; gradients stay in host memory."
    ),
    AfterValidator(_is_a_place),
]

HostCache = Annotated[
    OptionalAmount,
    Field(
        description="Host memory of a rank, such as 64GiB, that keeps a part of what would be on disk: what a step would "
        "load and store most often (--offload-to disk). [default: only what is worked on]"
    ),
]

OffloadUnits = Annotated[
    Names,
    Field(
        description="Units of which something is offloaded: names or patterns; * means all repeated units. A pattern "
        "such as activations:blocks.* is for one kind. [default: every unit]"
    ),
]

OffloadFraction = Annotated[
    float | None,
    Field(
        gt=0,
        le=1,
        description="Share of the optimizer's elements that is offloaded; the units whose gradients come last stay on "
        "the device. [default: 1]",
    ),
]

PageOptimizer = Annotated[
    OptionalAmount,
    Field(
        description="Device memory for pages of the optimizer's states, such as 2GiB; the other pages wait in host "
        "memory, and the update runs page by page. [default: no pages]"
    ),
]

PageBytes = Annotated[
    int,
    Field(
        ge=DISK_BLOCK_BYTES,
        le=MOST_BYTES,
        multiple_of=DISK_BLOCK_BYTES,
        description="Bytes of a page (--page-optimizer).",
    ),
]

OptimizerBits = Annotated[
    Literal[32, 8],
    Field(
        description="Bits of an element of the optimizer's states: 8 stores blocks of 256 elements with a scale each "
        "(momentum, adam, adamw, lion)."
    ),
    BeforeValidator(_as_number),
]


class GivenOffload(BaseModel):
    """Options by which a compiled program is lowered again, as a run gives them; those not given stay as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    offload: Offload = ()
    offload_to: OffloadTo = HOST
    host_cache: HostCache = None
    offload_units: OffloadUnits = ()
    offload_fraction: OffloadFraction = None
    page_optimizer: PageOptimizer = None
    page_bytes: PageBytes = PAGE_BYTES

    @property
    def given(self) -> dict[str, object]:
        """The options that were set, by name."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set
        }
