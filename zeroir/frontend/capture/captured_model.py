"""A captured model: the graphs of a step and of an evaluation, and what the compiler must know of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from zeroir.errors import Remainders
from zeroir.frontend.capture.captured_graph import CapturedGraph
from zeroir.frontend.capture.code_contexts import (
    Checkpoint,
)
from zeroir.frontend.capture.module_tensors import (
    TensorInfo,
)
from zeroir.frontend.source.outside_reads import NOTHING_READ, OutsideReads
from zeroir.frontend.watch.stored_tensors import (
    NOTHING_KEPT,
    KeptTensors,
    StoredObject,
)
from zeroir.ir.program import ConstantBinding
from zeroir.torch_ops.followed_numbers import FollowedNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEvaluation:
    """The graph of an evaluation; ``sites`` and ``reused_blocks`` are as for a model.

    ``stored`` are the tensors that it stores.
    """

    joint: CapturedGraph
    sites: int
    reused_blocks: tuple[str, ...] = ()
    stored: tuple[StoredObject, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A traced model. ``module`` is the model itself, with fake tensors; ``sites`` counts its calls of dropout.

    ``batch`` and ``constants`` are the tensors and constants of the example batch, and ``example`` has its tensors by
    path. ``reused_blocks`` names the blocks whose calls were not traced one by one, in the order of the calls.
    ``checkpoints`` are the model's activation checkpoints, ``numbers`` those of the user's code that are followed, and
    ``kept`` the places where it stores tensors; ``reads`` are the files and variables of the environment that it reads.
    ``notes`` are sentences on effects of the model's code that a program does not have. ``narrowings`` say which lines
    let sizes decide, so that dims are narrowed, and ``remainders`` are those that may decide instead. ``opaque`` names
    the modules whose code runs as it is. ``ranks`` is the number of ranks, where the model depends on it, and
    ``is_gathering`` whether it gathers tensors of all. ``values`` are the plain values that the code of a model file
    reads, as ``CodeState.plain_values`` has them.
    """

    joint: CapturedGraph
    module: nn.Module
    parameters: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    batch: tuple[TensorInfo, ...]
    example: Mapping[str, Tensor]
    constants: tuple[ConstantBinding, ...]
    sites: int
    reused_blocks: tuple[str, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    notes: tuple[str, ...] = ()
    narrowings: tuple[str, ...] = ()
    remainders: Remainders | None = None
    evaluation: CapturedEvaluation | None = None
    numbers: FollowedNumbers | None = None
    kept: KeptTensors = NOTHING_KEPT
    reads: OutsideReads = NOTHING_READ
    opaque: frozenset[str] = frozenset()
    ranks: int | None = None
    is_gathering: bool = False
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def outside(self) -> dict[str, Tensor]:
        """The tensors of the user's code, outside the model, by the names of their constants."""
        joints = [self.joint, *([] if self.evaluation is None else [self.evaluation.joint])]
        return {x.name: x.outside for j in joints for x in j.inputs if x.outside is not None}

    @property
    def most_sites(self) -> int:
        """The number of seeds that a micro-step or an evaluation needs."""
        return max(self.sites, 0 if self.evaluation is None else self.evaluation.sites)
