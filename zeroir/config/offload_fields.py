"""The options of what is kept outside device memory: the types of their fields, and the texts of the help.

A program stores the kind of memory (``host`` or ``disk``) and not the folder: a folder belongs to a run on a machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from zeroir.config.field_types import Amount, Names, OptionalAmount
from zeroir.ir.amounts import parse_bytes
from zeroir.ir.optimizers.catalogue import WITH_STATES_OF_ELEMENTS

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

PAGE_BYTES: Final = "2MiB"
"""The size of a page unless told otherwise: that of the pages of bitsandbytes' paged optimizers."""

DISK_PIECE_NUMEL: Final = 8 << 20
"""The most elements of one buffer on disk that are loaded or stored for one op."""

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


_PAIRS: Final = re.compile(r"[a-z_]+=")
_BETWEEN_PAIRS: Final = re.compile(r",(?=[a-z_]+=)")
"""A comma in front of a kind; those in the name of a folder stand."""


def named_places(places: str) -> Mapping[str, str]:
    """The places of ``--offload-to`` by kind; none where it is one place for all kinds.

    ``host``, ``disk`` and ``disk:FOLDER`` are places; ``optimizer=disk:/nvme,parameters=host`` names those of kinds.
    """
    if not _PAIRS.match(places):
        return {}
    pairs = (pair.partition("=") for pair in _BETWEEN_PAIRS.split(places))
    return {kind: place for kind, _, place in pairs}


def place_of(places: str, kind: str) -> str:
    """The place of a kind: host memory where the places of kinds are named, and not that of this kind."""
    named = named_places(places)
    return named.get(kind, HOST) if named else places


def disk_folders(places: str) -> tuple[str, ...]:
    """The folders of the places, each once."""
    folders = (place.partition(":")[2] for place in named_places(places).values() or (places,))
    return tuple(dict.fromkeys(filter(None, folders)))


def without_folders(places: str) -> str:
    """The same places without the folders of disks."""
    named = named_places(places)
    if not named:
        return places.partition(":")[0]
    return ",".join(f"{kind}={place.partition(':')[0]}" for kind, place in named.items())


def _pairs_as_text(value: object) -> object:
    """A mapping from kinds to places, as Python and a file of options may have it, as a text."""
    if isinstance(value, Mapping) and value:
        return ",".join(f"{kind}={place}" for kind, place in value.items())
    return value


def _are_places(places: str) -> str:
    named = named_places(places)
    is_each_once = not named or len(named) == len(_BETWEEN_PAIRS.split(places))
    if (
        is_each_once
        and set(named) <= set(OFFLOADED)
        and all(map(_is_a_place, named.values() or (places,)))
    ):
        in_order = (f"{kind}={named[kind]}" for kind in OFFLOADED if kind in named)
        return ",".join(in_order) if named else places
    raise PydanticCustomError(
        "offload_to",
        "host, disk or disk:FOLDER, or one of them for each kind, such as optimizer=disk:FOLDER,parameters=host",
    )


def _is_a_place(place: str) -> bool:
    memory, colon, folder = place.partition(":")
    return place == HOST or (memory == DISK and bool(folder.strip()) == bool(colon))


def _is_whole_blocks(amount: str) -> str:
    size_bytes = parse_bytes(amount)
    if size_bytes == 0 or size_bytes % DISK_BLOCK_BYTES:
        raise PydanticCustomError(
            "page_bytes",
            "a multiple of {block} bytes above 0, such as 512KiB",
            {"block": DISK_BLOCK_BYTES},
        )
    return amount


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
        "disk; gradients stay in host memory. Or a place for each kind: optimizer=disk:FOLDER,parameters=host."
    ),
    BeforeValidator(_pairs_as_text),
    AfterValidator(_are_places),
]

HostCache = Annotated[
    OptionalAmount,
    Field(
        description="Host memory of a rank, such as 64GiB, that keeps a part of what would be on disk: what a step "
        "would load and store most often (--offload-to disk). [default: only what is worked on]"
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

Speculate = Annotated[
    bool | None,
    Field(
        description="Begin the host's update before clipping or loss scaling has decided about it, and undo it where "
        "that decides otherwise; takes host memory (--offload optimizer with --clip or fp16). [default: where a "
        "simulated step is faster]"
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
    Amount,
    Field(description="Size of a page, such as 512KiB (--page-optimizer)."),
    AfterValidator(_is_whole_blocks),
]

OptimizerBits = Annotated[
    Literal[32, 8],
    Field(
        description="Bits of an element of the optimizer's states: 8 stores blocks of 256 elements with a scale each "
        f"({', '.join(WITH_STATES_OF_ELEMENTS)})."
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
