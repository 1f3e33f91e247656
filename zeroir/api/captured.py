"""A captured model: its logical program, and what of the user's code goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroir.artifact import Artifact
from zeroir.errors import Remainders

if TYPE_CHECKING:
    from torch import Tensor

    from zeroir.frontend.source.outside_reads import OutsideReads
    from zeroir.frontend.watch.stored_tensors import KeptTensors
    from zeroir.torch_ops.followed_numbers import FollowedNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """An artefact with only a logical program, whose options include those that the model itself sets.

    ``outside`` are the tensors of the user's code, outside the model, by the names of their constants, and ``numbers``
    the numbers that the program follows; ``kept`` are the places where the code stores tensors, and ``reads`` the files
    and variables of the environment that it reads. ``narrowings`` say which lines of code let sizes decide, so that
    dims are narrowed, and ``remainders`` are those that may decide instead.
    """

    artifact: Artifact
    outside: Mapping[str, Tensor]
    kept: KeptTensors
    reads: OutsideReads
    numbers: FollowedNumbers | None = None
    narrowings: tuple[str, ...] = ()
    remainders: Remainders | None = None
