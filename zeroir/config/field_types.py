"""Types of options that people write as texts: names, amounts of memory, orders, groups, meshes and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from zeroir.config.groups import SEPARATOR, GroupError, group_text
from zeroir.config.meshes import parse_mesh
from zeroir.config.shapes import parse_shapes, shapes_text
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.limits import MOST_COUNT
from zeroir.schedules import parse_schedule


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


def _is_an_order(value: str) -> str:
    name, _, group = value.partition("=")
    is_group = group.isascii() and group.isdecimal() and 2 <= int(group) <= MOST_COUNT
    if value in (STEP, LAYER) or (name == LAYER and is_group):
        return value
    raise PydanticCustomError(
        "order", "step, layer, or layer=G for groups of G micro-batches, at least 2"
    )


STEP: Final = "step"
LAYER: Final = "layer"
Order = Annotated[str, AfterValidator(_is_an_order)]
"""The order of micro-batches: ``step``, ``layer``, or ``layer=G``."""


def _as_text(value: object) -> object:
    """Return a number of bytes as the text that an amount is, and other values as they are."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _unless_auto(value: object) -> object:
    return None if value == "auto" else value


Device = Annotated[Literal["cpu", "cuda"] | None, BeforeValidator(_unless_auto)]
"""The kind of a device; None, also written ``auto``, leaves it open."""

Names = Annotated[tuple[str, ...], BeforeValidator(_split_at_commas)]
"""Names or patterns: a list of texts, or one text, separated by commas."""

OptionalAmount = Annotated[str | None, AfterValidator(_is_an_amount)]
"""An amount of memory as people write it, such as ``80GB``."""

Amount = Annotated[str, BeforeValidator(_as_text), AfterValidator(_is_an_amount)]
"""As ``OptionalAmount``, or a number of bytes, which becomes a text."""


def _group_texts(value: object) -> object:
    """Return the texts of groups, given as a text of some, a list of texts, or a mapping of patterns to settings."""
    if isinstance(value, Mapping):
        try:
            return tuple(group_text(patterns, dict(s)) for patterns, s in value.items())
        except GroupError as error:
            raise PydanticCustomError(
                "group", "a group: {problem}", {"problem": str(error)}
            ) from None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        return value
    texts = (part.strip() for item in items for part in item.split(SEPARATOR))
    return tuple(text for text in texts if text)


def _is_a_schedule(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return parse_schedule(value).text()
    except UserError as error:
        problem = str(error).removesuffix(".")
        raise PydanticCustomError(
            "schedule",
            "a schedule such as {example}: {problem}",
            {"example": "cosine{warmup=100}", "problem": problem},
        ) from None


def _shapes_in_canonical_form(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return shapes_text(parse_shapes(value))
    except UserError as error:
        raise PydanticCustomError(
            "shapes",
            "shapes such as 'input_ids: batch<=16, length<=8192; labels: batch, length': {problem}",
            {"problem": str(error).removesuffix(".")},
        ) from None


def _mesh_in_canonical_order(value: str | None) -> str | None:
    if value is None:
        return None
    return ",".join(f"{axis.name}={axis.size}" for axis in parse_mesh(value).axes)


Groups = Annotated[tuple[str, ...], BeforeValidator(_group_texts)]
"""Groups of parameters with settings of their own, each a text such as ``head.*:lr=1e-4``."""

ScheduleText = Annotated[str | None, AfterValidator(_is_a_schedule)]
"""A learning-rate schedule, such as ``cosine{warmup=100}``, in its canonical form."""

ShapesText = Annotated[str | None, AfterValidator(_shapes_in_canonical_form)]
"""Shapes of a batch that depend on dims, such as ``input_ids: batch<=16, length<=8192; labels: batch, length``."""

MeshText = Annotated[str | None, AfterValidator(_mesh_in_canonical_order)]
"""A mesh such as ``replicate=2,shard=4``."""
