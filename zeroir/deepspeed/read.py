"""Reading of a DeepSpeed configuration: unknown keys, ``"auto"``, types and treatments."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from zeroir.deepspeed.model import DeepSpeedConfiguration
from zeroir.deepspeed.treatment import Kind, Treatment, treatment_of
from zeroir.errors import UserError

AUTO: Final = "auto"
_PRECISION_BLOCKS: Final = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""The blocks of each precision, whose keys have an effect only with that precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A configuration with valid values and no refused requests.

    ``given`` are the dotted keys with a value, ``automatic`` those whose value is ``"auto"``. ``notes`` are pairs of a
    given key and the reason why it has no meaning here.
    """

    configuration: DeepSpeedConfiguration
    precision: str
    given: frozenset[str]
    automatic: frozenset[str]
    notes: tuple[tuple[str, str], ...]


def read(data: Mapping[str, object], precision: str | None = None) -> Reading:
    """Check a configuration; ``precision`` replaces the one that its blocks enable.

    Raises:
        UserError: on the first unknown key, value of a wrong type, or refused key.
    """
    automatic: set[str] = set()
    plain = _without_auto(DeepSpeedConfiguration, data, "", automatic)
    configuration = _validated(plain)
    precision = precision or _enabled_precision(configuration)
    given = list(_given(DeepSpeedConfiguration, plain, ""))
    notes: list[tuple[str, str]] = []
    for key, treatment, value in given:
        block = key.partition(".")[0]
        if "." in key and _PRECISION_BLOCKS.get(block, precision) != precision:
            if not key.endswith(".enabled") and (f"{block}.*", _NOT_ENABLED) not in notes:
                notes.append((f"{block}.*", _NOT_ENABLED))
        elif treatment.kind is Kind.REFUSED and treatment.asks(value):
            raise UserError(f"{key} cannot be honoured: {treatment.reason}.")
        elif treatment.kind is Kind.WITHOUT_MEANING:
            notes.append((key, treatment.reason))
    return Reading(
        configuration=configuration,
        precision=precision,
        given=frozenset(key for key, _, _ in given),
        automatic=frozenset(automatic),
        notes=tuple(notes),
    )


_NOT_ENABLED: Final = "the block is not enabled"


def _enabled_precision(configuration: DeepSpeedConfiguration) -> str:
    old = configuration.bfloat16
    is_bf16 = configuration.bf16.enabled or (old is not None and old.enabled)
    if configuration.fp16.enabled and is_bf16:
        raise UserError("fp16.enabled and bf16.enabled are both true; leave one of them out.")
    return "fp16" if configuration.fp16.enabled else "bf16" if is_bf16 else "fp32"


def block_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the block type of a field; None for other values, and for objects without treatments inside."""
    annotation: object = field.annotation
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _without_auto(
    kind: type[BaseModel], data: Mapping[str, object], place: str, automatic: set[str]
) -> dict[str, object]:
    """Return the values of a block except those that are ``"auto"``, which count as absent; unknown keys are errors."""
    plain: dict[str, object] = {}
    for key, value in data.items():
        path = f"{place}{key}"
        field = kind.model_fields.get(key)
        if field is None:
            nearest = difflib.get_close_matches(key, kind.model_fields, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else "."
            raise UserError(f"DeepSpeed has no key {path}{hint}")
        inner = block_of(field)
        if value == AUTO:
            automatic.add(path)
        elif isinstance(value, Mapping) and inner is not None:
            plain[key] = _without_auto(inner, value, f"{path}.", automatic)
        elif isinstance(value, Mapping) and key == "params":
            automatic.update(f"{path}.{name}" for name, item in value.items() if item == AUTO)
            plain[key] = {name: item for name, item in value.items() if item != AUTO}
        else:
            plain[key] = value
    return plain


def _given(
    kind: type[BaseModel], plain: Mapping[str, object], place: str
) -> Iterator[tuple[str, Treatment, object]]:
    """Yield the dotted keys with their treatments and values, except blocks that have treatments inside."""
    for key, value in plain.items():
        field = kind.model_fields[key]
        inner = block_of(field)
        if isinstance(value, Mapping) and inner is not None:
            yield from _given(inner, value, f"{place}{key}.")
        else:
            yield f"{place}{key}", treatment_of(field), value


def _validated(plain: Mapping[str, object]) -> DeepSpeedConfiguration:
    try:
        return DeepSpeedConfiguration.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = [part for part in first["loc"] if part in _names(plain)]
        place = ".".join(str(name) for name in names) or str(first["loc"][0])
        if first["type"] == "missing":
            raise UserError(f"{'.'.join(map(str, first['loc']))} is missing.") from None
        expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise UserError(f"{place} is {first['input']!r:.60}, but should be {expected}.") from None


def _names(plain: object) -> set[object]:
    """Return all keys of nested objects, since pydantic's locations also name the members of unions."""
    if not isinstance(plain, Mapping):
        return set()
    return set(plain).union(*(_names(value) for value in plain.values()))
