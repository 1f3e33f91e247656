"""A pass: a frozen dataclass with its options as fields, a contract, and a pure function on programs.

A pass is written ``name`` or ``name{option=value, option=value}``; ``prefetch{distance=1}`` is the pass
`PrefetchGathers` with ``distance`` 1, and an option of several names has ``|`` between them. Specs are written and read
by the fields of the dataclass alone; a field that is None is left out.

``requires``, ``establishes`` and ``destroys`` are facts about a program: those that a pass relies on, and those that
become true and stop being true with it. The manager checks them before any pass runs, so that a pipeline in the wrong
order is rejected with one sentence instead of producing a broken program.

A pass gets a program without waits and returns one without: the manager derives them after each pass, from what ops do
and from the program's bounds (``zeroir.passes.common.order``). So a bound that one pass states holds after all later
passes, and one that states another bound for the same kind of buffer replaces it.

The docstring of each pass shows some lines that it changes in a small program, as a diff. The whole program after each
pass is in ``tests/passes/golden``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import ClassVar, Protocol, get_type_hints, runtime_checkable

from zeroir.errors import InternalError, UserError
from zeroir.ir.program import Program


class Fact(StrEnum):
    """A fact about a program that some pass requires; its value is part of a sentence."""

    ONE_DEVICE = "the step of one device"
    ONE_AXIS = "ranks along one axis of the mesh"
    UPDATE_APART = "an update that follows the backward"
    GATHERED_AT_FIRST_USE = "no gather ahead of its first use"
    UNSAVED = "a state that no section saves"
    ONE_MICRO_BATCH = "one micro-batch in each micro-step"
    GRADIENTS_REDUCED = "gradients summed over all ranks"
    OPTIMIZER_SHARDED = "an optimizer that updates only each rank's shard"
    GRADIENTS_SHARDED = "gradients kept as shards"
    PARAMETERS_SHARDED = "parameters kept as shards"
    GATHERED_PER_RUN = "parameters gathered before each run of uses"
    RELEASED_AFTER_LAST_USE = "buffers released after their last use"
    STATES_ON_DEVICE = "optimizer states that rest on the device"


LOGICAL_FACTS = frozenset(
    {
        Fact.ONE_DEVICE,
        Fact.ONE_AXIS,
        Fact.UPDATE_APART,
        Fact.GATHERED_AT_FIRST_USE,
        Fact.UNSAVED,
        Fact.ONE_MICRO_BATCH,
        Fact.STATES_ON_DEVICE,
    }
)
"""The facts of a program before any pass has run."""

NO_FACTS: frozenset[Fact] = frozenset()


OptionValue = int | float | bool | tuple[str, ...]


@runtime_checkable
class Pass(Protocol):
    """A rewrite of one program into another of the same meaning; its options are the fields of a dataclass."""

    # Marks the class as a dataclass, so that `dataclasses.fields` accepts a pass.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[OptionValue | None]]]

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]]
    establishes: ClassVar[frozenset[Fact]]
    destroys: ClassVar[frozenset[Fact]]

    def spec(self) -> str:
        """Return the pass as text: its name, and every field that is not None as an option, in field order."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        options = [f"{key}={_text(value)}" for key, value in values if value is not None]
        return f"{self.name}{{{', '.join(options)}}}" if options else self.name

    def __call__(self, program: Program) -> Program:
        """Return the rewritten program without changing the given one. The manager appends ``spec`` to its passes."""
        ...


_SPEC = re.compile(r"(?P<name>[a-z][a-z0-9-]*)(?:\{(?P<options>[^{}]*)\})?")


def _text(value: OptionValue) -> str:
    return "|".join(value) if isinstance(value, tuple) else str(value).lower()


def split_spec(text: str) -> tuple[str, Mapping[str, str]]:
    """Return name and options, still as text, of a spec; raise UserError if it is not written as one."""
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UserError(f"A pass is written name or name{{option=value}}, not `{text.strip()}`.")
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in (match["options"] or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise UserError(f"In the pass `{text.strip()}`, `{item}` should be option=value.")
        if key in options:
            raise UserError(f"The pass `{text.strip()}` gives its option `{key}` twice.")
        options[key] = value
    return match["name"], options


def build(kind: type[Pass], options: Mapping[str, str]) -> Pass:
    """Return a pass with these options, others by default; UserError names an unknown, missing or ill-typed option."""
    fields = dataclasses.fields(kind)
    hints = get_type_hints(kind)
    names = [field.name for field in fields]
    for key in options:
        if key not in names:
            has = f"its options are {', '.join(names)}" if names else "it has none"
            raise UserError(f"The pass `{kind.name}` has no option `{key}`; {has}.")
    values: dict[str, OptionValue] = {}
    for field in fields:
        if field.name in options:
            text = options[field.name]
            values[field.name] = _value(kind.name, field.name, hints[field.name], text)
        elif field.default is dataclasses.MISSING:
            raise UserError(
                f"The pass `{kind.name}` needs its option `{field.name}`, "
                f"for instance `{kind.name}{{{field.name}=2}}`."
            )
    return kind(**values)


def _value(name: str, key: str, declared: object, text: str) -> OptionValue:
    """Return the value of ``text`` for the option ``key`` of the pass ``name``, by the declared type of its field."""
    if declared in (tuple[str, ...], tuple[str, ...] | None):
        return tuple(part for item in text.split("|") if (part := item.strip()))
    if declared is bool:
        if text not in ("true", "false"):
            raise UserError(f"The option `{key}` of `{name}` is true or false, not `{text}`.")
        return text == "true"
    if declared in (float, float | None):
        # Python writes 17 digits, and up to three zeros before them without an exponent.
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,20})?(e-[0-9]{1,3})?", text):
            raise UserError(
                f"The option `{key}` of `{name}` is a number such as 0.5, not `{text}`."
            )
        return float(text)
    if declared not in (int, int | None):
        raise InternalError(f"The option `{key}` of `{name}` has a type that no spec can write.")
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise UserError(f"The option `{key}` of `{name}` is a whole number, not `{text}`.")
    return int(text)


def listed(items: Iterable[str]) -> str:
    """Return items as prose: ``a``, ``a and b``, ``a, b and c``."""
    words = list(items)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
