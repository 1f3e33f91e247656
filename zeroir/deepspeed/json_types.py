"""The types of the values of DeepSpeed's configuration."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator, ConfigDict, Field

from zeroir.ir.limits import MOST_COUNT

BLOCK: Final = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
"""The configuration of pydantic models of JSON objects."""


def _whole(value: object) -> object:
    """Convert a number such as 5e8 to an integer, since JSON cannot write it otherwise."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=2**62)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MOST_COUNT)]
Free = dict[str, object]
