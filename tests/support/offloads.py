"""The passes that move something out of the memory of the device, by what they move.

Whoever tests a law of all of them goes through this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zeroir.passes.base import Pass
from zeroir.passes.offload_activations import OffloadActivations
from zeroir.passes.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload_parameters import OffloadParameters

OFFLOADS: Final[Mapping[str, tuple[Pass, ...]]] = {
    "activations": (OffloadActivations(smallest=0),),
    "optimizer": (OffloadOptimizer(),),
    "parameters": (OffloadParameters(),),
    "everything": (OffloadOptimizer(), OffloadParameters(), OffloadActivations(smallest=0)),
}
