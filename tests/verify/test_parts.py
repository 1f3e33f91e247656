"""Parts of slices: in regions, and in what rests in buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import put
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.held_elements import held_by_all, held_elements, is_within
from zeroir.ir.buffers import Region, part_of
from zeroir.ir.contents import FlatContent
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.program import SAVE, UPDATE, Holding, Program, State
from zeroir.ir.text import parse, print_program
from zeroir.passes.manager import apply
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.verify import verify


def paged() -> Program:
    """A program whose FP32 update works on parts of slices of whole parameters."""
    paging = PageOptimizer(device_bytes=10240, page_bytes=2048)
    return applied(mlp(blocks=1, dim=48), (*for_stage(1, 2), paging))


def test_parts_of_regions_are_counted_from_their_first_element() -> None:
    mesh = Mesh(axes=(Axis(name="dp", size=4),))
    region = Region(buffer="b", offset=64, numel=64, shard="dp")
    part = part_of(region, 4, 12)
    assert part.local_numel(mesh) == 8
    assert [part.local_range(mesh, {"dp": r}) for r in range(2)] == [(68, 76), (84, 92)]
    assert part_of(part, 2, 3) == replace(region, part=(6, 7))
    assert part_of(Region(buffer="b", offset=8, numel=8), 2, 4) == Region(
        buffer="b", offset=10, numel=2
    )


def test_parts_of_slices_hold_elements_apart() -> None:
    mesh = Mesh(axes=(Axis(name="dp", size=3),))
    whole = FlatContent(quantity="exp_avg", flat="a", shard="dp")
    part = replace(whole, offset=2, stride=8)
    assert held_by_all(whole, 8, mesh) == (range(24),)
    assert held_by_all(part, 4, mesh) == (range(2, 6), range(10, 14), range(18, 22))
    assert held_elements(part, 4, {"dp": 2}) == range(18, 22)
    assert is_within(held_by_all(part, 4, mesh), held_by_all(whole, 8, mesh))
    assert not is_within(held_by_all(whole, 8, mesh), held_by_all(part, 4, mesh))


def test_a_paged_program_has_both_and_its_text_says_so() -> None:
    program = paged()
    text = print_program(program)
    assert parse(text) == program
    assert "@dp[0:256]" in text
    assert " stride=" in text
    assert verify(program).is_valid


def _with_content(program: Program, name: str, content: FlatContent) -> Program:
    buffers = (replace(b, holds=content) if b.name == name else b for b in program.buffers)
    return replace(program, buffers=tuple(buffers))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: replace(c, shard=None), "has a stride, but is not cut along an axis"),
        (lambda c: replace(c, stride=100), "each rank's part must be less than its slice"),
        (lambda c: replace(c, quantity="param"), "holds param with a stride"),
        (lambda c: replace(c, stride=4096), "which has"),
    ],
)
def test_a_stride_is_that_of_slices_of_a_state(
    change: Callable[[FlatContent], FlatContent], sentence: str
) -> None:
    program = paged()
    name, content = next(
        (b.name, b.holds)
        for b in program.buffers
        if isinstance(b.holds, FlatContent) and b.holds.stride is not None
    )
    report = verify(_with_content(program, name, change(content)))
    findings = [f for f in report.findings if sentence in f.sentence]
    assert findings
    assert findings[0].code == "Z008"


def test_a_part_is_inside_its_slice() -> None:
    program = paged()
    number = [section.name for section in program.sections].index(UPDATE)
    body = program.sections[number].body
    index, step = next(
        (i, op)
        for i, op in enumerate(body)
        if isinstance(op, ops.OptimizerStep) and op.param.part is not None
    )
    numel = step.param.local_numel(program.mesh)
    for part in ((-64, numel - 64), (1 << 20, (1 << 20) + numel), (numel, 0)):
        changed = replace(step, param=replace(step.param, part=part))
        assert "Z003" in {f.code for f in verify(put(program, (number, index), changed)).findings}


def test_a_state_of_memory_describes_no_part_of_a_slice() -> None:
    program = paged()
    region = Region(buffer="blocks.0.param", offset=0, numel=1024, shard="dp", part=(0, 256))
    content = FlatContent(quantity="param", flat="blocks.0", shard="dp", stride=512)
    holding = Holding(region=region, content=content)
    first = replace(program.sections[0], entry=State(holdings=(holding,)))
    report = verify(replace(program, sections=(first, *program.sections[1:])))
    assert any("a state describes whole slices" in f.sentence for f in report.findings)


def test_a_snapshot_is_of_no_part() -> None:
    text = print_program(apply(SaveState(), paged()))
    line = next(line for line in text.splitlines() if "= snapshot %step[0:1]" in line)
    with pytest.raises(UserError, match="not of a part of it"):
        parse(text.replace(line, line.replace("[0:1]", "[0:1][0:1]")))


def test_a_save_copies_the_pages_and_what_rests_on_the_device() -> None:
    program = apply(SaveState(), paged())
    assert verify(program).is_valid
    number = [section.name for section in program.sections].index(SAVE)
    for index, op in enumerate(program.sections[number].body):
        if isinstance(op, ops.Transfer | ops.Cast) and "exp_avg" in op.source.buffer:
            assert not verify(put(program, (number, index))).is_valid
