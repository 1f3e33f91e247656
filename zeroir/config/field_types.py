"""Types of fields that several options have: lists of names, and amounts of memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from zeroir.errors import UserError
from zeroir.ir.amounts import parse_bytes


def _split_at_commas(value: object) -> object:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        return value
    return tuple(part for item in items for part in item.split(",") if part)


def _is_an_amount(value: str | None) -> str | None:
    if value is not None:
        try:
            parse_bytes(value)
        except UserError:
            raise PydanticCustomError(
                "amount", "an amount of memory, such as 80GB, 512MiB or 1e9"
            ) from None
    return value


def _as_text(value: object) -> object:
    """A number of bytes as the text that an amount is; other values as they are."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split_at_commas)]
"""Names or patterns: a list of texts, or one text, separated by commas."""

OptionalAmount = Annotated[str | None, AfterValidator(_is_an_amount)]
"""An amount of memory as people write it, such as ``80GB``."""

Amount = Annotated[str, BeforeValidator(_as_text), AfterValidator(_is_an_amount)]
"""As ``OptionalAmount``, or a number of bytes, which becomes a text."""
