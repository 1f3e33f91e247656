"""The passes that move something out of the memory of the device, by what they move.

Whoever tests a law of all of them goes through this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zeroir.passes.base import Pass
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate

PAGED: Final = PageOptimizer(device_bytes=6144, page_bytes=2048)
"""Room for three pages of the small programs' states."""

OFFLOADS: Final[Mapping[str, tuple[Pass, ...]]] = {
    "activations": (OffloadActivations(smallest=0),),
    "optimizer": (OffloadOptimizer(),),
    "speculative optimizer": (OffloadOptimizer(), SpeculateUpdate()),
    "gradients": (OffloadGradients(),),
    "parameters": (OffloadParameters(),),
    "pages": (PAGED,),
    "everything": (
        OffloadOptimizer(),
        OffloadGradients(),
        OffloadParameters(),
        OffloadActivations(smallest=0),
    ),
    "activations to disk": (OffloadActivations(smallest=0), OffloadToDisk(what=("activations",))),
    "everything to disk": (
        OffloadOptimizer(),
        OffloadGradients(),
        OffloadParameters(),
        OffloadActivations(smallest=0),
        OffloadToDisk(piece_numel=4096),
    ),
    "everything, paged": (
        PAGED,
        OffloadGradients(),
        OffloadParameters(),
        OffloadActivations(smallest=0),
    ),
}
