"""A captured model: an artefact with its logical program, and what of the user's code goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroir.artifact import Artifact

if TYPE_CHECKING:
    from zeroir.frontend.lowering.tracing import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """An artefact with only a logical program, whose options include those that the model itself sets."""

    artifact: Artifact
    traced: TracedModel
