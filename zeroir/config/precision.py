"""The dtypes of a program."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator

from zeroir.config.field_types import Device, Names
from zeroir.config.table import Option, OptionObject

FloatName = Literal["fp32", "bf16", "fp16"]

_GROUP = "Precision"


class Precision(OptionObject):
    """The dtype of a program, and what keeps FP32.

    ``dtype`` is that of parameters, activations and gradients. ``keep_fp32`` are patterns of the names of modules or
    parameters that stay FP32. ``reduce_dtype`` is the dtype in which ranks add gradients, by default their own.
    ``device`` is that on which results have the types of the program: some operators save others on a GPU.
    """

    dtype: Annotated[
        FloatName,
        Option(
            name="precision",
            group=_GROUP,
            help="Dtype of parameters, activations and gradients.",
        ),
    ] = "fp32"
    keep_fp32: Annotated[
        Names,
        Option(
            group=_GROUP,
            help="Modules or parameters that stay FP32: patterns of names, separated by commas.",
        ),
    ] = ()

    reduce_dtype: Annotated[
        Literal["fp32"] | None,
        Option(
            group=_GROUP,
            help="Dtype in which gradients of 16 bits are sent and added: NCCL adds in the dtype that is sent. "
            "[default: the gradients' own]",
        ),
    ] = None

    device: Annotated[
        Device,
        Option(
            group="Device",
            help="Device for which the model is captured, which need not be there: cpu, cuda, or auto for that of this "
            "machine. A program says it where operators that save results for the backward save others on the other "
            "device. [default: auto]",
        ),
    ] = None

    @model_validator(mode="after")
    def _reductions_are_widened(self) -> Self:
        if self.reduce_dtype is not None and self.dtype == "fp32":
            raise ValueError(
                f"{self.flag('reduce_dtype')} has no effect: with --precision fp32 gradients are FP32 anyway"
            )
        return self

    @property
    def is_fp16(self) -> bool:
        """Whether losses are scaled, and steps that overflow are skipped."""
        return self.dtype == "fp16"
