"""The input of an estimate, and the states that an optimizer keeps for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from zeroir.config.offload import Offload
from zeroir.config.offload_places import (
    ACTIVATIONS,
    ADAPTIVE,
    OFFLOADED,
    OPTIMIZER,
    PAGE_BYTES,
    named_places,
)
from zeroir.config.optimizer import OptimizerOptions, as_number
from zeroir.config.precision import FloatName, Precision
from zeroir.config.table import Option, OptionObject, OptionRow
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.limits import MOST_BYTES, MOST_COUNT, MOST_RANKS
from zeroir.ir.optimizers.catalogue import WITH_STATES_OF_ELEMENTS, Algorithm, OptimizerName
from zeroir.ir.optimizers.declaration import Declaration
from zeroir.ir.optimizers.forms import form_of_bits

ADAM_WITH_MASTER: Final = "adam-fp32-master"

Optimizer = Literal[OptimizerName, "adam-fp32-master"]
"""An optimizer, or Adam with the FP32 master weights counted among its states."""

STATE_BYTES: Final = 4
_LEAST_SLOTS: Final = 2
MOST_SLOTS: Final = 3
"""Slots on the device for pages in turn, as in `page-optimizer`."""


class EstimateOptions(OptionObject):
    """The input of an estimate."""

    command: ClassVar[str | None] = "estimate"

    params: Annotated[
        float,
        Field(ge=1, le=MOST_BYTES),
        Option(help="Number of parameters, as 7.5e9."),
    ]
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS), Option(help="Number of ranks.")] = 1
    optimizer: Annotated[Optimizer, Option(help="The update rule.")] = "adamw"
    precision: Annotated[FloatName, Option(help=Precision.rows()["precision"].option.help)] = "bf16"
    master: Annotated[
        bool, Option(help="Whether the optimizer keeps an FP32 copy of 16-bit parameters.")
    ] = True
    ema: Annotated[
        bool, Option(help="Whether a moving average of the weights is kept, in FP32.")
    ] = False
    layers: Annotated[
        int | None, Field(ge=1, le=MOST_COUNT), Option(help="Transformer layers.")
    ] = None
    hidden: Annotated[int | None, Field(ge=1, le=MOST_COUNT), Option(help="Width of a layer.")] = (
        None
    )
    heads: Annotated[int | None, Field(ge=1, le=MOST_COUNT), Option(help="Attention heads.")] = None
    seq: Annotated[int | None, Field(ge=1, le=MOST_COUNT), Option(help="Tokens of a sequence.")] = (
        None
    )
    batch: Annotated[
        int, Field(ge=1, le=MOST_COUNT), Option(help="Sequences of a rank's micro-batch.")
    ] = 1
    vocab: Annotated[
        int | None,
        Field(ge=1, le=MOST_COUNT),
        Option(help="Entries of the vocabulary, for the logits."),
    ] = None
    recompute: Annotated[
        bool, Option(help="Keep the input of each layer alone, and compute the layer again.")
    ] = False
    flash: Annotated[
        bool, Option(help="Attention that keeps no scores (or computes them again).")
    ] = False
    offload: Offload = Offload()
    optimizer_bits: Annotated[
        Literal[32, 8],
        BeforeValidator(as_number),
        Option(help=OptimizerOptions.rows()["optimizer_bits"].option.help),
    ] = 32

    @model_validator(mode="after")
    def _shape_is_whole(self) -> Self:
        given = {"layers": self.layers, "hidden": self.hidden, "seq": self.seq}
        needed = {**given, "heads": self.heads}
        if not self.flash and not self.recompute:
            given = needed
        absent = [name for name, value in given.items() if value is None]
        asked = [name for name, value in needed.items() if value is not None]
        asked += [] if self.vocab is None else ["vocab"]
        # The number of layers is enough to know how large a unit is.
        if absent and set(asked) - {"layers"}:
            raise ValueError(
                f"activations need {', '.join(f'--{name}' for name in absent)} as well"
            )
        return self

    @model_validator(mode="after")
    def _offload_is_known(self) -> Self:
        if self.offload.what == (ADAPTIVE,):
            raise ValueError(
                "an estimate knows no budget: --offload takes "
                f"{', '.join(OFFLOADED)}, separated by commas"
            )
        if ACTIVATIONS in self.offload.what and self.layers is None:
            raise ValueError("--offload activations needs --layers and the shape of a layer")
        for kind in named_places(self.offload.to):
            if kind not in self.offload.what:
                raise ValueError(
                    f"--offload-to {self.offload.to} has a place for {kind}, but --offload has "
                    f"{', '.join(self.offload.what) or 'nothing'}"
                )
        if self.optimizer_bits == 8 and self.optimizer not in WITH_STATES_OF_ELEMENTS:
            raise ValueError(
                f"--optimizer-bits 8 is for {', '.join(WITH_STATES_OF_ELEMENTS)}, not for {self.optimizer}"
            )
        return self

    @model_validator(mode="after")
    def _pages_are_possible(self) -> Self:
        size_bytes = self.offload.page_size_bytes
        if self.offload.page_optimizer is None:
            if size_bytes != parse_bytes(PAGE_BYTES):
                raise ValueError(f"--page-bytes {self.offload.page_bytes} needs --page-optimizer")
            return self
        if OPTIMIZER in self.offload.what:
            raise ValueError(
                f"{self.flag('page_optimizer')} updates on the device, and --offload optimizer on the host; "
                "leave one of them out"
            )
        if not paged_numbers(self.optimizer):
            raise ValueError(
                f"{self.flag('page_optimizer')} has no effect: {self.optimizer} keeps no states of single "
                "elements"
            )
        if parse_bytes(self.offload.page_optimizer) < _LEAST_SLOTS * size_bytes:
            raise ValueError(
                f"--page-optimizer {self.offload.page_optimizer} is less than {_LEAST_SLOTS} pages of --page-bytes "
                f"{self.offload.page_bytes}, one that comes in and one that is updated"
            )
        return self

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of a parameter, a gradient, or an element of an activation."""
        return 4 if self.precision == "fp32" else 2


ESTIMATE_ROWS: Final[Mapping[str, OptionRow]] = {
    name: row
    for name, row in EstimateOptions.rows().items()
    if len(row.path) == 1 or row.option.is_of_estimate
}
"""The options of ``zeroir estimate``, which supports a part of what can be offloaded."""


def make_estimate_options(values: Mapping[str, object]) -> EstimateOptions:
    """Validate the options of an estimate, by flat name.

    Raises:
        UserError: for the first that is invalid, or that an estimate does not support.
    """
    for name in values:
        if name in EstimateOptions.rows() and name not in ESTIMATE_ROWS:
            raise UserError(f"An estimate does not know --{name.replace('_', '-')}.")
    return EstimateOptions.from_flat(values)


def _declared(optimizer: Optimizer) -> Declaration:
    return Algorithm("adam" if optimizer == ADAM_WITH_MASTER else optimizer).declaration


def states_per_parameter(optimizer: Optimizer) -> tuple[int, int]:
    """Return the fewest and the most FP32 numbers that implementations of an optimizer keep for each parameter.

    Numbers for each row or column are negligible; a whole matrix counts as a square one.
    """
    fewest, most = _declared(optimizer).kept_numbers
    master = int(optimizer == ADAM_WITH_MASTER)
    return fewest + master, most + master


def paged_numbers(optimizer: Optimizer) -> int:
    """Return how many numbers of a parameter can be paged: those that an optimizer keeps for each element."""
    return len(_declared(optimizer).states)


def gathered_bytes_per_parameter(optimizer: Optimizer) -> int:
    """Return the bytes that an update of whole parameters gathers for each parameter from stage 1 on."""
    return _declared(optimizer).gathered_bytes


def optimizer_bytes_per_parameter(options: EstimateOptions) -> float:
    """Return K of the ZeRO paper: bytes of optimizer state for each parameter, with master weights and averages."""
    states = states_per_parameter(options.optimizer)[1]
    is_apart = has_master(options) and options.optimizer != ADAM_WITH_MASTER
    others = int(is_apart) + int(options.ema)
    return STATE_BYTES * others + bytes_per_state(options) * states


def bytes_per_state(options: EstimateOptions) -> float:
    """Return the bytes of a number that the optimizer keeps for each parameter."""
    return form_of_bits(options.optimizer_bits).bytes_per_element


def has_master(options: EstimateOptions) -> bool:
    """Return whether an FP32 copy of the parameters is among the optimizer's states."""
    is_low = options.itemsize_bytes < STATE_BYTES
    return options.optimizer == ADAM_WITH_MASTER or (is_low and options.master)
