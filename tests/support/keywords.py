"""Options by flat name as the keywords of the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from zeroir.api.keywords import CompileKeywords
from zeroir.config import CompileOptions
from zeroir.config.table import object_type


def keywords(values: Mapping[str, object]) -> CompileKeywords:
    """The keywords that have these options, in objects of those that belong together."""
    made: dict[str, Any] = {}
    objects: dict[str, dict[str, object]] = {}
    rows = CompileOptions.rows()
    for name, value in values.items():
        path = rows[name].path if name in rows else (name,)
        if len(path) == 1 or (name == "optimizer" and not isinstance(value, str)):
            made[name] = value
        else:
            objects.setdefault(path[0], {})[path[1]] = value
    for name, fields in objects.items():
        kind = object_type(CompileOptions.model_fields[name])
        assert kind is not None
        if name in made:
            made |= fields
        else:
            made[name] = kind.model_validate(fields)
    return cast("CompileKeywords", made)
