"""A fault in what a pass or the engine derives from a program does not reach the proof, which refuses the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from tests.support.lowering import codes
from tests.support.schedules import Case
from tests.support.subjects import subject
from tests.verify.test_dims import SECTION
from zeroir.ir.analysis import micro_batches
from zeroir.ir.analysis.held_elements import held_by_all
from zeroir.ir.analysis.micro_batches import micro_batches_of_ops
from zeroir.ir.bounds import BoundKind
from zeroir.ir.buffers import Buffer, Region, Role
from zeroir.ir.contents import FlatContent
from zeroir.ir.mesh import Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, NodeArg, Ref
from zeroir.ir.text import parse
from zeroir.passes.common import order, storages
from zeroir.passes.common.bounded_buffers import bounded_buffers
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.storages import dropout_applied
from zeroir.passes.communication import order_by_layer
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.manager import apply
from zeroir.passes.memory import save_state
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.memory.select_saved import SelectSaved
from zeroir.verify import verify
from zeroir.verify.interpreter.value_numbers import dropout_as_products


@pytest.mark.slow
def test_a_pass_that_forgets_a_factor_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    logical = subject("captured, stage 3").logical
    calls: list[Node] = []

    def without_factor(node: Node, mask: NodeArg, product: Ref) -> tuple[Node, Node] | None:
        nodes = dropout_applied(node, mask, product)
        if nodes is None:
            return None
        assert isinstance(mask, Ref)
        assert nodes == dropout_as_products(node, mask, product)
        calls.append(node)
        return nodes[0], replace(nodes[1], args=(product, 1.0))

    monkeypatch.setattr(storages, "dropout_applied", without_factor)
    selected = SelectSaved()(logical)
    assert calls
    assert codes(selected, logical) == {"Z406"}


def test_a_pass_that_forgets_to_slice_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    logical = Case(micro_steps=2, is_weighted=True).logical
    ordered = apply(OrderByLayer(micro_batches=2, whole_step=True), logical)
    assert verify(ordered, logical).is_valid

    def of_inputs(_: Program, buffer: Buffer) -> bool:
        return buffer.role is Role.INPUT

    monkeypatch.setattr(order_by_layer, "is_sliced", of_inputs)
    assert codes(apply(OrderByLayer(micro_batches=2, whole_step=True), logical), logical)


@pytest.mark.parametrize("fault", ["no slices", "one micro-batch"])
def test_an_engine_that_mistakes_the_micro_batch_of_an_op(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = SECTION.replace("%x[16:length+16] -> %b", "%x[16:length+16] -> %a")
    if fault == "no slices":
        monkeypatch.setattr(micro_batches, "is_sliced", lambda *_: False)
    else:
        monkeypatch.setattr(micro_batches, "_slices", lambda *_: (0,))
    program = parse(wrong)
    (section,) = program.sections
    assert all(len(each) < 2 for each in micro_batches_of_ops(program, section))
    assert codes(program) == {"Z203"}
    assert codes(parse(SECTION)) == set()


def test_a_pass_that_takes_parts_of_a_state_for_the_same_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduled = subject("stage 1, paged, overlapped").scheduled
    assert verify(apply(SaveState(), scheduled)).is_valid

    def from_the_first(content: FlatContent, numel: int, mesh: Mesh) -> tuple[range, ...]:
        return held_by_all(replace(content, offset=0), numel, mesh)

    monkeypatch.setattr(save_state, "held_by_all", from_the_first)
    assert codes(apply(SaveState(), scheduled)) == {"Z407"}


def test_a_pass_that_forgets_what_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = Case(precision="fp16").scheduled
    monkeypatch.setattr(Program, "counters", ())
    assert codes(apply(SaveState(), scheduled)) == {"Z407"}


def test_waits_that_forget_a_kind_of_bounded_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = subject("stage 3, overlapped").scheduled

    def without_parameters(
        buffers: Iterable[Buffer], body: Iterable[Op]
    ) -> Mapping[str, BoundKind]:
        kinds = bounded_buffers(buffers, body)
        return {name: kind for name, kind in kinds.items() if kind is not BoundKind.FULL_PARAMETERS}

    monkeypatch.setattr(order, "bounded_buffers", without_parameters)
    assert codes(derive_waits(without_waits(scheduled))) == {"Z302"}


def test_an_engine_that_takes_other_elements_for_those_at_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Engine and verifier go by the same function here, and the verifier compares it with what it finds itself.
    scheduled = subject("stage 1, parameters on the host").scheduled
    assert verify(scheduled).is_valid

    at_rest = Program.at_rest

    def of_another_unit(program: Program, region: Region) -> Region | None:
        resting = at_rest(program, region)
        if resting is None or resting == region:
            return resting
        return replace(resting, buffer="root.post.param")

    monkeypatch.setattr(Program, "at_rest", of_another_unit)
    assert codes(scheduled) == {"Z403"}
