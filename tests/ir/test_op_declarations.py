"""What ops declare suffices for everything that is derived from it: no op, field or kind can be forgotten."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest

from tests.cost.support import machine
from tests.support.programs import mlp
from zeroir.cost.collectives import ring_of
from zeroir.cost.durations import Durations
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Space, View
from zeroir.ir.fields import FieldUse
from zeroir.ir.mesh import Communicator
from zeroir.ir.op_fields import Accumulated, Attribute, Read, Signalled, StreamName, op_fields
from zeroir.ir.program import Program, Section
from zeroir.ir.text import parse, print_program
from zeroir.ir.text.syntax import slots
from zeroir.passes.common.rewrite import map_regions
from zeroir.report.graph import dot
from zeroir.report.page.facts import ShownKind, op_kind
from zeroir.report.schedule import schedule
from zeroir.verify import verify
from zeroir.verify.context import Findings, title
from zeroir.verify.structure.ops import check_structure
from zeroir.workspace.op_scratch import scratch_bytes

AXIS = mlp(blocks=1).mesh.axes[0].name
PROGRAM = replace(mlp(blocks=1), comms=(Communicator(name="made", axis=AXIS),))
CALL = next(op for op in PROGRAM.ops() if isinstance(op, ops.Compute))
KINDS = (ops.Memory, ops.Collective, ops.Gather, ops.Elementwise, ops.Update, ops.Transfer)
EVERY_OP = pytest.mark.parametrize("kind", ops.OP_CLASSES, ids=lambda kind: kind.__name__)


def instance(kind: type[ops.Op]) -> ops.Op:
    """An op of that class in which every field has a value of its own, of names that ``PROGRAM`` declares."""
    values: dict[str, Any] = {field.name: _value(kind, field.name) for field in op_fields(kind)}
    return kind(**values)


def _value(kind: type, name: str) -> object:
    (field,) = [field for field in op_fields(kind) if field.name == name]
    if kind is ops.Compute and name in ("segment", "unit", "arguments", "destinations"):
        return getattr(CALL, name)
    buffer = PROGRAM.buffers[[f.name for f in op_fields(kind)].index(name) % len(PROGRAM.buffers)]
    names = {
        FieldUse.BEGUN: buffer.name,
        FieldUse.ENDED: buffer.name,
        FieldUse.SIGNALLED: "done",
        FieldUse.AWAITED: "done",
        FieldUse.COMM: "made",
        FieldUse.STREAM: "compute",
    }
    if field.use in names:
        return names[field.use]
    if field.use is None:
        item: object = field.kind(
            **{f.name: _value(field.kind, f.name) for f in op_fields(field.kind)}
        )
    elif field.kind is Region:
        item = Region(buffer=buffer.name, offset=0, numel=1)
    else:
        plain: dict[type, object] = {int: 3, float: 3.0, str: "three"}
        item = [*field.kind][-1] if issubclass(field.kind, Enum) else plain[field.kind]
    return (item, item) if field.is_tuple else item


def regions(value: object) -> Iterator[Region]:
    """Every region in a value, found by looking and not by what is declared."""
    if isinstance(value, Region):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from regions(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from regions(getattr(value, field.name))


def with_op(op: ops.Op) -> Program:
    """``PROGRAM`` with a section that holds that op alone."""
    body = (op,)
    return replace(
        PROGRAM, sections=(Section(name="last_micro_step", body=body), PROGRAM.sections[-1])
    )


def test_every_class_of_ops_is_in_the_union() -> None:
    classes = [
        value
        for _, value in inspect.getmembers(ops, inspect.isclass)
        if issubclass(value, ops.Operation) and value not in (ops.Operation, *KINDS)
    ]
    assert set(classes) == set(ops.OP_CLASSES)


@EVERY_OP
def test_effects_name_every_region(kind: type[ops.Op]) -> None:
    op = instance(kind)
    effect = effects(op)
    named = (*effect.reads, *effect.writes, *effect.accumulates)
    assert set(named) == set(regions(op))
    assert len(named) == len(list(regions(op)))
    declared = {field.use for field in op_fields(kind)}
    assert bool(effect.allocs) == (FieldUse.BEGUN in declared)
    assert bool(effect.frees) == (FieldUse.ENDED in declared)
    assert effect.signals == (("done",) if FieldUse.SIGNALLED in declared else ())
    assert effect.waits == (("done",) if FieldUse.AWAITED in declared else ())
    assert effect.comm == ("made" if FieldUse.COMM in declared else None)
    assert effect.stream == "compute"


@EVERY_OP
def test_rewriting_reaches_every_region(kind: type[ops.Op]) -> None:
    op = instance(kind)
    moved = map_regions(op, lambda region: replace(region, offset=region.offset + 7))
    assert [region.offset - 7 for region in regions(moved)] == [r.offset for r in regions(op)]
    assert map_regions(moved, lambda region: replace(region, offset=region.offset - 7)) == op


@EVERY_OP
def test_every_field_is_printed_and_read_back(kind: type[ops.Op]) -> None:
    op = instance(kind)
    program = with_op(op)
    assert parse(print_program(program)) == program
    # The least that an op can say: every default left out.
    required: dict[str, Any] = {
        field.name: getattr(op, field.name)
        for field in op_fields(kind)
        if field.default is dataclasses.MISSING
    }
    least = with_op(kind(**required))
    assert parse(print_program(least)) == least


@EVERY_OP
def test_it_is_labelled_shown_coloured_and_costed(kind: type[ops.Op]) -> None:
    op = instance(kind)
    program = with_op(op)
    keyword = ops.op_name(kind)
    assert title(op).split()[0] == keyword
    assert op.participle.isalpha()
    assert f"last_micro_step:0 {keyword}" in dot(program, section="last_micro_step")
    assert op_kind(op, None) in ShownKind
    rows = schedule(program, program.sections[0])
    is_bookkeeping = isinstance(op, ops.Memory | ops.Wait | ops.Fill)
    assert is_bookkeeping or [row.op for row in rows] == [keyword]
    durations = Durations(program, machine())
    if isinstance(op, ops.Collective):
        assert durations.collective(op, ring_of([0, 1], 2)).seconds >= 0
    else:
        assert durations.seconds(op) >= 0
    assert scratch_bytes(program, op) >= 0
    assert verify(
        program
    ).findings  # An op alone is no training step; but every op is judged, and none fails.


@EVERY_OP
def test_what_a_class_says_of_its_regions_is_of_regions(kind: type[ops.Op]) -> None:
    op = instance(kind)
    for name in op.same_elements:
        assert list(regions(getattr(op, name)))
    if isinstance(op, ops.Transfer):
        assert {op.from_space, op.to_space} <= set(Space)


@pytest.mark.parametrize(
    "kind", [kind for kind in ops.OP_CLASSES if issubclass(kind, ops.Elementwise | ops.Update)]
)
def test_host_memory_needs_a_stream_of_the_host(kind: type[ops.Op]) -> None:
    op = instance(kind)
    buffers = tuple(replace(buffer, space=Space.HOST) for buffer in PROGRAM.buffers)
    program = replace(with_op(op), buffers=buffers)
    findings = Findings(program)
    check_structure(program, findings)
    assert any("works on host memory" in finding.sentence for finding in findings.items)


# ----------------------------------------------------------------------------------------- declarations refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeclared(ops.Operation):
    source: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeclaredName(ops.Operation):
    event: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadNumber(ops.Operation):
    source: Read[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAsAttribute(ops.Operation):
    view: Attribute[View]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedEvent(ops.Operation):
    event: Signalled[int]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Undeclared, "Undeclared.source does not declare its use"),
        (UndeclaredName, "UndeclaredName.event does not declare its use"),
        (ReadNumber, "ReadNumber.source declares READ, but is no region"),
        (RegionAsAttribute, "RegionAsAttribute.view holds a region"),
        (NumberedEvent, "NumberedEvent.event declares SIGNALLED, but is no name"),
    ],
)
def test_a_field_without_a_use_that_fits_is_refused(kind: type, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        op_fields(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap(ops.Operation):
    first: Accumulated[Region]
    second: Accumulated[Region]
    stream: StreamName[str]
    event: Signalled[str] | None = None


@pytest.mark.parametrize(
    ("syntax", "sentence"),
    [
        ("{first}", "leaves out its field second"),
        ("{first} {second} {first}", "names a field twice"),
        ("{first} {second} {third}", "cannot be read at `{third}`"),
        ("{first} {second", "cannot be read at `{second`"),
        ("{first} [by={second}]", "second has no default"),
    ],
)
def test_a_syntax_that_does_not_fit_the_fields_is_refused(syntax: str, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        slots(Swap, syntax)


def test_a_syntax_gives_the_words_before_each_field() -> None:
    found = slots(Swap, "{first} by {second}")
    assert [(slot.field.name, slot.words, slot.is_attribute) for slot in found] == [
        ("first", " ", False),
        ("second", " by ", False),
        ("stream", " stream=", True),
    ]
