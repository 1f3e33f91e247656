"""What can be kept outside device memory, and the places for it as people write them.

A program stores the kind of memory (``host`` or ``disk``) and not the folder: a folder belongs to a run on a machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pydantic_core import PydanticCustomError

from zeroir.ir.byte_sizes import parse_bytes

OPTIMIZER: Final = "optimizer"
GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
ACTIVATIONS: Final = "activations"
ADAPTIVE: Final = "adaptive"

OFFLOADED: Final = (OPTIMIZER, GRADIENTS, PARAMETERS, ACTIVATIONS)
"""What can be kept outside device memory, in the order in which options list it."""

OFFLOAD_SETS: Final = (
    (),
    (ACTIVATIONS,),
    (OPTIMIZER, GRADIENTS),
    (OPTIMIZER, GRADIENTS, ACTIVATIONS),
    (OPTIMIZER, GRADIENTS, PARAMETERS),
    OFFLOADED,
)
"""The useful sets of these, the largest last.

States and gradients are offloaded together, and parameters only with them: they are copied most for their bytes.
"""

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


def in_canonical_order(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Check the kinds of ``--offload`` and put them in order."""
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
    """Return the places of ``--offload-to`` by kind; none where it is one place for all kinds.

    ``host``, ``disk`` and ``disk:FOLDER`` are places; ``optimizer=disk:/nvme,parameters=host`` names those of kinds.
    """
    if not _PAIRS.match(places):
        return {}
    pairs = (pair.partition("=") for pair in _BETWEEN_PAIRS.split(places))
    return {kind: place for kind, _, place in pairs}


def place_of(places: str, kind: str) -> str:
    """Return the place of a kind: host memory where the places of kinds are named, and not that of this kind."""
    named = named_places(places)
    return named.get(kind, HOST) if named else places


def disk_folders(places: str) -> tuple[str, ...]:
    """Return the folders of the places, each once."""
    folders = (place.partition(":")[2] for place in named_places(places).values() or (places,))
    return tuple(dict.fromkeys(filter(None, folders)))


def without_folders(places: str) -> str:
    """Return the same places without the folders of disks."""
    named = named_places(places)
    if not named:
        return places.partition(":")[0]
    return ",".join(f"{kind}={place.partition(':')[0]}" for kind, place in named.items())


def pairs_as_text(value: object) -> object:
    """Return a mapping from kinds to places, as Python and a file of options may have it, as a text."""
    if isinstance(value, Mapping) and value:
        return ",".join(f"{kind}={place}" for kind, place in value.items())
    return value


def are_places(places: str) -> str:
    """Check the places of ``--offload-to`` and put those of kinds in order."""
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


def is_whole_blocks(amount: str) -> str:
    """Check that an amount is whole blocks of a disk."""
    size_bytes = parse_bytes(amount)
    if size_bytes == 0 or size_bytes % DISK_BLOCK_BYTES:
        raise PydanticCustomError(
            "page_bytes",
            "a multiple of {block} bytes above 0, such as 512KiB",
            {"block": DISK_BLOCK_BYTES},
        )
    return amount
