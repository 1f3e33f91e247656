"""The page of a report: its contents. ``test_page_in_browser`` opens it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.passes.test_gates import gate
from tests.report.pages import page_of, program, reported, simulated
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.cost.tasks import step_sections
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.memory.curve import peak
from zeroir.passes.memory.recompute import Recompute
from zeroir.report.diff import aligned_ops
from zeroir.report.page.charts import KIND_COLOURS, ROLE_COLOURS
from zeroir.report.page.facts import ShownKind, memory_curve, step_ops, unit_facts
from zeroir.report.page.html import report_html
from zeroir.report.page.phases import phases
from zeroir.report.page.sides import aligned_steps, sides
from zeroir.report.page.tables import NO_BREAK


def data_of(page: str) -> dict[str, Any]:
    """The data of a page's script."""
    element = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert element is not None
    data: dict[str, Any] = json.loads(element[1])
    return data


@pytest.mark.slow
def test_transfers_and_the_hosts_update_have_lanes_of_their_own() -> None:
    page = page_of(gate("offload"), "offload.zir")
    lanes = {lane["stream"] for lane in data_of(page)["lanes"]}
    assert {"copy_in", "copy_out", "optimizer"} <= lanes
    for words in ("exposed transfers", "host to device", "device to host"):
        assert words in page
        assert words not in page_of(program(), "plain.zir")


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_every_op_of_the_step_has_its_time_and_memory(micro_steps: int) -> None:
    made = program(micro_steps)
    shown_ops = step_ops(made, simulated(made))
    assert len(shown_ops) == sum(len(section.body) for section in step_sections(made))
    (rank_class,) = simulated(made).classes
    assert sorted((s.start_ns, s.end_ns) for o in shown_ops for s in o.spans) == sorted(
        (span.start_ns, span.end_ns) for span in rank_class.spans
    )
    assert any(any(op.is_critical) for op in shown_ops)
    curve = memory_curve(made)
    assert curve.peak_bytes == max(op.used_bytes for op in shown_ops) >= peak(made).total_bytes
    assert [name for _, name in curve.boundaries] == [s.name for s in step_sections(made)]


def test_every_role_and_every_kind_has_a_colour_of_its_own() -> None:
    for colours, names in ((ROLE_COLOURS, Role), (KIND_COLOURS, ShownKind)):
        assert colours.keys() == set(names)
        assert len(set(colours.values())) == len(names)


def test_units_share_the_parameters() -> None:
    units = unit_facts(program(), step_ops(program(), simulated(program())))
    assert sum(unit.parameters_numel for unit in units) == program().parameters_numel
    assert all(unit.flops > 0 and unit.reduced_bytes > 0 for unit in units)


@pytest.mark.parametrize(
    "logical", [mlp(), mlp(precision="fp16", clip=1.0, tied=True), mlp(is_weighted=True)]
)
def test_computes_are_forward_backward_or_recomputed(logical: Program) -> None:
    made = applied(logical, (Recompute(units=("*",)), *for_stage(3, 2)))
    section = made.section_by_name[LAST_MICRO_STEP]
    expected = {"forward": "forward", "backward": "backward", "recompute": "recomputed"}
    of_ops = phases(made, section)
    assert of_ops == {
        index: expected[op.segment.rpartition(".")[2]]
        for index, op in enumerate(section.body)
        if isinstance(op, ops.Compute)
    }
    assert set(of_ops.values()) == set(expected.values())
    assert phases(made, made.section_by_name[UPDATE]) == {}


def test_the_memory_of_a_step_is_shown_in_program_order_within_the_step() -> None:
    made = program(micro_steps=3)
    shown_ops = step_ops(made, simulated(made))
    times_ns = [op.memory_ns for op in shown_ops]
    assert times_ns == sorted(times_ns)
    assert times_ns[0] >= 0
    assert times_ns[-1] <= simulated(made).step_ns
    computes = [op for op in shown_ops if op.stream == COMPUTE]
    assert [op.memory_ns for op in computes] == [op.spans[0].start_ns for op in computes]
    # Other ops stand at their own times, too, unless the order forbids it.
    own = [op for op in shown_ops if op.memory_ns == op.spans[0].start_ns]
    assert len(own) > len(computes)


def test_an_op_of_a_micro_step_that_one_program_lacks_is_not_equal() -> None:
    old, new = sides([reported(program(4), "old.zir"), reported(program(2), "new.zir")])
    one_sided = [row for row in aligned_steps(old, new) if row.old is None or row.new is None]
    assert one_sided
    assert not any(row.is_equal for row in one_sided)


def test_the_ops_of_two_programs_stand_side_by_side() -> None:
    old, new = sides([reported(program(2, stage=2), "old.zir"), reported(program(3), "new.zir")])
    rows = aligned_steps(old, new)
    for side, numbers in ((old, [r.old for r in rows]), (new, [r.new for r in rows])):
        of_side = [number for number in numbers if number is not None]
        assert sorted(of_side) == list(range(len(side.ops)))
        assert [side.ops[number].position.section for number in of_side] == [
            side.ops[number].position.section for number in sorted(of_side)
        ]
    pairs = [
        (old.ops[row.old], new.ops[row.new])
        for row in rows
        if row.old is not None and row.new is not None
    ]
    assert all((a.op, a.units) == (b.op, b.units) for a, b in pairs)
    # The program of three micro-steps has a compute for each one of the program of two.
    assert sum(a.op == "compute" for a, _ in pairs) == sum(op.op == "compute" for op in old.ops)


def test_a_program_beside_itself_has_no_differences() -> None:
    made = program()
    for section in made.sections:
        aligned = aligned_ops(made, made, section.name)
        assert [(row.old, row.new, row.is_equal) for row in aligned] == [
            (index, index, True) for index in range(len(section.body))
        ]
    page = report_html(reported(made), reported(made, "same.zir"))
    assert "The programs are equal." in page
    assert " → " not in page.partition("<main>")[2].partition("<script")[0]


@pytest.mark.slow
def test_two_programs_share_their_scales_and_show_their_differences() -> None:
    small, large = reported(program(stage=2), "2.zir"), reported(program(), "3.zir")
    page = report_html(small, large)
    data = data_of(page)
    assert len(data["sides"]) == 2
    assert {lane["side"] for lane in data["lanes"]} == {0, 1}
    for axis in ("x_range", "y_range"):
        limits = [
            side["memory"]["doc"]["roots"][0]["attributes"][axis]["attributes"]
            for side in data["sides"]
        ]
        assert limits[0] == limits[1]
        assert limits[0]["end"] > 0
    peaks = [format_bytes(memory_curve(each.program).peak_bytes) for each in (small, large)]
    for words in ("only A", "only B", "The lines that differ", " → ".join(peaks)):
        assert words in page.replace(NO_BREAK, " ")


@pytest.mark.slow
def test_the_page_holds_all_it_needs_and_no_markup_of_others() -> None:
    text = page_of(program(), 'a "<b>&amp;</b>" name')
    assert "&lt;b&gt;" in text
    assert "<b>&amp;" not in text.partition("<script")[0]
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"'](?!data:)", own)
    assert "<!--slot:" not in text
