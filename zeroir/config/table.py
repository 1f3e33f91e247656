"""Options that declare everything about themselves once: type, limits, default, help, and where they matter.

Options that belong together are the fields of one object, such as ``Offload(what="optimizer", to="host")``. From these
declarations follow the flat names of the command line, of TOML files and of the records in programs, ``--help``, and
what is forwarded to ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from zeroir.config.searched import Searched
from zeroir.errors import InternalError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What an option declares beside its type, its default and its limits.

    ``group`` is the part of ``--help`` that lists it. ``name`` is that of the command line, where the field's own would
    not say enough, and ``flag`` its form there, where the name is none. Below ``least_stage`` it has no effect.
    ``is_of_run`` and ``is_of_estimate`` say that ``zeroir run`` and ``zeroir estimate`` take it, too, and
    ``is_of_one_rank`` that the ranks of a job may differ in it. A group of parameters may set what ``is_of_group``.
    ``separator`` stands between the items of a list, and ``searched`` says what `zeroir plan` chooses from.
    """

    help: str
    group: str = ""
    name: str | None = None
    flag: str | None = None
    least_stage: int = 0
    is_of_run: bool = False
    is_of_estimate: bool = False
    is_of_one_rank: bool = False
    is_of_group: bool = False
    separator: str = ","
    searched: Searched | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRow:
    """An option in the table of a class of options: its flat name, and the path of fields to it."""

    name: str
    path: tuple[str, ...]
    field: FieldInfo
    option: Option

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--offload-to``."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def flat_field(self) -> tuple[object, FieldInfo]:
        """The type and the field of the option in a flat model, which says its help."""
        field = copy(self.field)
        field.description = self.option.help
        kind: Any = field.annotation
        if field.is_required() and len(self.path) > 1:
            # It is required of an object that need not be given.
            field.annotation = kind = kind | None
            field.default = None
        return kind, field

    @property
    def default(self) -> object:
        """The value where none is given."""
        return self.field.default

    @property
    def searched(self) -> Searched:
        """What `zeroir plan` chooses the option from.

        Raises:
            InternalError: if it does not choose it.
        """
        if self.option.searched is None:
            raise InternalError(f"No search chooses {self.flag}.")
        return self.option.searched


class OptionObject(BaseModel):
    """Options that belong together. Each has a default; a wrong one is a UserError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    command: ClassVar[str | None] = None
    """The command whose options these are; None for a part of them."""

    if not TYPE_CHECKING:

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(explain_validation(error, type(self))) from None

    @classmethod
    def rows(cls) -> Mapping[str, OptionRow]:
        """Return every option by its flat name."""
        return _rows(cls)

    def value(self, name: str) -> object:
        """Return the value of an option by its flat name."""
        row = self.rows()[name]
        value: object = self
        for attribute in row.path:
            if value is None:
                return row.default
            value = getattr(value, attribute)
        return value

    @property
    def flat(self) -> dict[str, object]:
        """All values by flat name."""
        return {name: self.value(name) for name in self.rows()}

    @property
    def given(self) -> dict[str, object]:
        """The values that were set, by flat name."""
        return {name: self.value(name) for name, row in self.rows().items() if self._is_set(row)}

    def _is_set(self, row: OptionRow) -> bool:
        holder: object = self
        for attribute in row.path:
            if not isinstance(holder, BaseModel) or attribute not in holder.model_fields_set:
                return False
            holder = getattr(holder, attribute)
        return True

    def asks_for(self, name: str) -> bool:
        """Return whether an option differs from its default."""
        return self.value(name) != self.rows()[name].default

    def flag(self, name: str) -> str:
        """Return an option as it is written on the command line."""
        return f"{self.rows()[name].flag} {text_of(self.value(name))}"

    @classmethod
    def from_flat(cls, values: Mapping[str, object]) -> Self:
        """Validate values by flat name.

        Raises:
            UserError: on the first wrong option, with its value and the expected values.
        """
        return cls(**_nested(cls, values))


class FlatOptions(BaseModel):
    """Options of one of several places, such as the command line: each is valid in itself, not yet with others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @property
    def given(self) -> dict[str, object]:
        """The options that were set, by flat name, in the order of the table."""
        is_set = self.model_fields_set
        return {name: getattr(self, name) for name in type(self).model_fields if name in is_set}


def flat_model(name: str, rows: Mapping[str, OptionRow], doc: str) -> type[FlatOptions]:
    """Make a class with an attribute for each option."""
    fields: dict[str, Any] = {row.name: row.flat_field for row in rows.values()}
    return create_model(name, __base__=FlatOptions, __doc__=doc, **fields)


@cache
def _rows(kind: type[OptionObject]) -> Mapping[str, OptionRow]:
    rows: dict[str, OptionRow] = {}
    for row in _rows_of(kind, ()):
        if row.name in rows:
            raise InternalError(f"two options are called {row.name}")
        rows[row.name] = row
    return rows


def _rows_of(kind: type[OptionObject], path: tuple[str, ...]) -> Iterator[OptionRow]:
    for name, field in kind.model_fields.items():
        inner = object_type(field)
        if inner is not None:
            yield from _rows_of(inner, (*path, name))
            continue
        option = next((item for item in field.metadata if isinstance(item, Option)), None)
        if option is None:
            raise InternalError(f"the field {name} of {kind.__name__} declares no option")
        yield OptionRow(name=option.name or name, path=(*path, name), field=field, option=option)


def object_type(field: FieldInfo) -> type[OptionObject] | None:
    """Return the class of a field that holds options that belong together."""
    annotation = field.annotation
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, OptionObject):
            return kind
    return None


def _nested(kind: type[OptionObject], values: Mapping[str, object]) -> dict[str, object]:
    """Values by flat name as the fields of nested objects; what no option is called stays where it is."""
    nested: dict[str, Any] = {}
    rows = kind.rows()
    for name, value in values.items():
        path = rows[name].path if name in rows else (name,)
        inner = nested
        for attribute in path[:-1]:
            inner = inner.setdefault(attribute, {})
        inner[path[-1]] = value
    return nested


def explain_validation(error: ValidationError, kind: type[OptionObject] | None = None) -> str:
    """Explain the first wrong option in one sentence: its name, its value and the expected values.

    ``kind`` is the class that was to hold the options; without it they are known by their flat names.
    """
    first = error.errors(include_url=False)[0]
    place = tuple(map(str, first["loc"]))
    if not place:
        problem = first["msg"].removeprefix("Value error, ")
        if problem.startswith("--group "):
            return f"{problem}."
        return f"These options do not go together: {problem}."
    rows = {} if kind is None else kind.rows()
    name = next(
        (row.name for row in rows.values() if row.path == place[: len(row.path)]), place[-1]
    )
    if first["type"] == "extra_forbidden":
        return _unknown(place[-1], kind)
    expected = first["msg"].removeprefix("Input should be ")
    given = first["input"]
    if isinstance(given, list | tuple) and all(isinstance(item, str) for item in given):
        given = text_of(tuple(given))
    return f"--{name.replace('_', '-')} is {given!s}, but should be {expected}."


def _unknown(name: str, kind: type[OptionObject] | None) -> str:
    """Return a sentence on a name that no option has."""
    if kind is not None and kind.command is None:
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else f": it has {', '.join(kind.model_fields)}."
        return f"zeroir.{kind.__name__} has no argument {name}{hint}"
    command = "compile" if kind is None or kind.command is None else kind.command
    flag = name.replace("_", "-")
    flags = () if kind is None else (row.flag for row in kind.rows().values())
    near = difflib.get_close_matches(f"--{flag}", flags, n=1)
    hint = f" did you mean {near[0]}?" if near else ""
    return f"There is no option --{flag};{hint} `zeroir {command} --help` lists them."


def arguments_of(given: Mapping[str, object], rows: Mapping[str, OptionRow]) -> list[str]:
    """Given options as arguments of the command line, from which the same options are read."""
    arguments: list[str] = []
    for name, value in given.items():
        row = rows[name]
        match value:
            case None:
                continue
            case bool():
                negative = f"--no-{row.flag.removeprefix('--')}"
                arguments.append(row.flag if value else negative)
            case _:
                arguments += [row.flag, text_of(value, row.option.separator)]
    return arguments


def text_of(value: object, separator: str = ",") -> str:
    """Return the text of an option's value; the separator stands between the items of a list."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return separator.join(map(str, value))
        case _:
            return str(value)
