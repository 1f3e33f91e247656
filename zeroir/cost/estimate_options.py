"""The input of an estimate, and what an optimizer keeps of each parameter."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zeroir.config import Precision
from zeroir.config.offload_fields import (
    ACTIVATIONS,
    ADAPTIVE,
    HOST,
    OFFLOADED,
    OPTIMIZER,
    PAGE_BYTES,
    Offload,
    OffloadFraction,
    OffloadTo,
    OptimizerBits,
    PageBytes,
    PageOptimizer,
    named_places,
)
from zeroir.ir.amounts import parse_bytes
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.limits import MOST_BYTES, MOST_COUNT, MOST_RANKS
from zeroir.ir.optimizers.catalogue import WITH_STATES_OF_ELEMENTS, Algorithm, OptimizerName
from zeroir.ir.optimizers.declaration import Declaration

ADAM_WITH_MASTER: Final = "adam-fp32-master"

Optimizer = Literal[OptimizerName, "adam-fp32-master"]
"""An optimizer, or Adam with the FP32 master weights counted among its states."""

STATE_BYTES: Final = 4
QUANTISED_BYTES: Final = 1 + STATE_BYTES / BLOCK_NUMEL
"""Bytes of a state of 8 bits: each block of elements has one FP32 scale."""

_LEAST_SLOTS: Final = 2
MOST_SLOTS: Final = 3
"""Places on the device through which pages go in turn, as `page-optimizer` has them."""


class EstimateOptions(BaseModel):
    """The input of an estimate. The descriptions are the help of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    params: Annotated[
        float, Field(ge=1, le=MOST_BYTES, description="Number of parameters, as 7.5e9.")
    ]
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS, description="Number of ranks.")] = 1
    optimizer: Annotated[Optimizer, Field(description="The update rule.")] = "adamw"
    precision: Annotated[
        Precision, Field(description="Dtype of parameters, activations and gradients.")
    ] = "bf16"
    master: Annotated[
        bool, Field(description="Whether the optimizer keeps an FP32 copy of 16-bit parameters.")
    ] = True
    ema: Annotated[
        bool, Field(description="Whether a moving average of the weights is kept, in FP32.")
    ] = False
    layers: Annotated[int | None, Field(ge=1, le=MOST_COUNT, description="Transformer layers.")] = (
        None
    )
    hidden: Annotated[int | None, Field(ge=1, le=MOST_COUNT, description="Width of a layer.")] = (
        None
    )
    heads: Annotated[int | None, Field(ge=1, le=MOST_COUNT, description="Attention heads.")] = None
    seq: Annotated[int | None, Field(ge=1, le=MOST_COUNT, description="Tokens of a sequence.")] = (
        None
    )
    batch: Annotated[
        int, Field(ge=1, le=MOST_COUNT, description="Sequences of a rank's micro-batch.")
    ] = 1
    vocab: Annotated[
        int | None,
        Field(ge=1, le=MOST_COUNT, description="Entries of the vocabulary, for the logits."),
    ] = None
    recompute: Annotated[
        bool, Field(description="Keep the input of each layer alone, and compute the layer again.")
    ] = False
    flash: Annotated[
        bool, Field(description="Attention that keeps no scores (or computes them again).")
    ] = False
    offload: Offload = ()
    offload_to: OffloadTo = HOST
    offload_fraction: OffloadFraction = None
    page_optimizer: PageOptimizer = None
    page_bytes: PageBytes = PAGE_BYTES
    optimizer_bits: OptimizerBits = 32

    @model_validator(mode="after")
    def _shape_is_whole(self) -> Self:
        given = {"layers": self.layers, "hidden": self.hidden, "seq": self.seq}
        needed = {**given, "heads": self.heads}
        if not self.flash and not self.recompute:
            given = needed
        absent = [name for name, value in given.items() if value is None]
        asked = [name for name, value in needed.items() if value is not None]
        asked += [] if self.vocab is None else ["vocab"]
        # Layers alone say how large a unit is.
        if absent and set(asked) - {"layers"}:
            raise ValueError(
                f"activations need {', '.join(f'--{name}' for name in absent)} as well"
            )
        return self

    @model_validator(mode="after")
    def _offload_is_known(self) -> Self:
        if self.offload == (ADAPTIVE,):
            raise ValueError(
                "an estimate knows no budget: --offload takes "
                f"{', '.join(OFFLOADED)}, separated by commas"
            )
        if ACTIVATIONS in self.offload and self.layers is None:
            raise ValueError("--offload activations needs --layers and the shape of a layer")
        for kind in named_places(self.offload_to):
            if kind not in self.offload:
                raise ValueError(
                    f"--offload-to {self.offload_to} has a place for {kind}, but --offload has "
                    f"{', '.join(self.offload) or 'nothing'}"
                )
        if self.optimizer_bits == 8 and self.optimizer not in WITH_STATES_OF_ELEMENTS:
            raise ValueError(
                f"--optimizer-bits 8 is for {', '.join(WITH_STATES_OF_ELEMENTS)}, not for {self.optimizer}"
            )
        return self

    @model_validator(mode="after")
    def _pages_are_possible(self) -> Self:
        size_bytes = parse_bytes(self.page_bytes)
        if self.page_optimizer is None:
            if size_bytes != parse_bytes(PAGE_BYTES):
                raise ValueError(f"--page-bytes {self.page_bytes} needs --page-optimizer")
            return self
        if OPTIMIZER in self.offload:
            raise ValueError(
                f"--page-optimizer {self.page_optimizer} updates on the device, and --offload optimizer on the host; "
                "leave one of them out"
            )
        if not paged_numbers(self.optimizer):
            raise ValueError(
                f"--page-optimizer {self.page_optimizer} has no effect: {self.optimizer} keeps no states of single "
                "elements"
            )
        if parse_bytes(self.page_optimizer) < _LEAST_SLOTS * size_bytes:
            raise ValueError(
                f"--page-optimizer {self.page_optimizer} is less than {_LEAST_SLOTS} pages of --page-bytes "
                f"{self.page_bytes}, one that comes in and one that is updated"
            )
        return self

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of a parameter, a gradient, or an element of an activation."""
        return 4 if self.precision == "fp32" else 2


def _declared(optimizer: Optimizer) -> Declaration:
    return Algorithm("adam" if optimizer == ADAM_WITH_MASTER else optimizer).declaration


def states_per_parameter(optimizer: Optimizer) -> tuple[int, int]:
    """The fewest and the most FP32 numbers that implementations of an optimizer keep for each parameter.

    Numbers of rows and columns alone are negligible; those of a whole matrix are those of a square one.
    """
    fewest, most = _declared(optimizer).kept_numbers
    master = int(optimizer == ADAM_WITH_MASTER)
    return fewest + master, most + master


def paged_numbers(optimizer: Optimizer) -> int:
    """How many numbers of a parameter can be paged: those that an optimizer keeps of each element."""
    return len(_declared(optimizer).states)


def gathered_bytes_per_parameter(optimizer: Optimizer) -> int:
    """Bytes that the update gathers for each parameter from stage 1 on, because its step needs whole parameters."""
    return _declared(optimizer).gathered_bytes


def optimizer_bytes_per_parameter(options: EstimateOptions) -> float:
    """K of the ZeRO paper: bytes of optimizer state for each parameter, with master weights and averages."""
    numbers = states_per_parameter(options.optimizer)[1]
    quantised = numbers if options.optimizer_bits == 8 else 0
    numbers += has_master(options) and options.optimizer != ADAM_WITH_MASTER
    numbers += options.ema
    return STATE_BYTES * (numbers - quantised) + QUANTISED_BYTES * quantised


def has_master(options: EstimateOptions) -> bool:
    """Whether an FP32 copy of the parameters is among the optimizer's states."""
    is_low = options.itemsize_bytes < STATE_BYTES
    return options.optimizer == ADAM_WITH_MASTER or (is_low and options.master)
