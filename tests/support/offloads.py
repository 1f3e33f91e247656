"""The passes that move something out of the memory of the device, by what they move: a line here tests it everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zeroir.passes.base import Pass
from zeroir.passes.offload_activations import OffloadActivations

OFFLOADS: Final[Mapping[str, tuple[Pass, ...]]] = {
    "activations": (OffloadActivations(smallest=0),),
}
