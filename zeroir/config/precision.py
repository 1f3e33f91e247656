"""The dtypes of a program."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroir.config.field_types import Names
from zeroir.config.table import Option, OptionObject

FloatName = Literal["fp32", "bf16", "fp16"]

_GROUP = "Precision"


class Precision(OptionObject):
    """The dtype of a program, and what keeps FP32.

    ``dtype`` is that of parameters, activations and gradients. ``keep_fp32`` are patterns of the names of modules or
    parameters that stay FP32.
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

    @property
    def is_fp16(self) -> bool:
        """Whether losses are scaled, and steps that overflow are skipped."""
        return self.dtype == "fp16"
