"""The verifier rejects false claims of programs: contents, roles, operands, orders of sums, events at boundaries.

Each case would pass every law that goes by what is declared, and compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.lowering import codes
from tests.support.schedules import Case, is_same, run
from tests.verify.test_crossing import crossing_micro_steps
from zeroir.ir.buffers import Role
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.text import parse, print_program
from zeroir.verify import Report, verify

PLAIN = Case(stage=2)
DECIDED = Case(stage=2, precision="fp16", clip=1.0)


def lines_of(program: Program) -> list[str]:
    """The program's text, without the numbers of its ops."""
    return [re.sub(r"^\s*\d+: ", "  ", line) for line in print_program(program).splitlines()]


def judged(case: Case, lines: Sequence[str]) -> Report:
    return verify(parse("\n".join(lines) + "\n"), case.logical)


def line_with(lines: Sequence[str], *words: str) -> int:
    """The number of the first line with all these words."""
    return next(i for i, line in enumerate(lines) if all(word in line for word in words))


def changed(case: Case, *edits: tuple[str, str]) -> Report:
    """The case's schedule with texts replaced."""
    text = "\n".join(lines_of(case.scheduled)) + "\n"
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return verify(parse(text), case.logical)


# ---------------------------------------------------------------------------------- contents that nobody has written


LR = "buffer %lr : f64[1] device scalar = value lr\n"
STEP = "buffer %step : f32[1] device scalar = value step\n"
INPUT = "buffer %input.x : f32[8] device input = value input.x\n"


def test_a_second_buffer_is_no_home_of_a_named_value() -> None:
    twin = (LR, LR + LR.replace("%lr", "%lr2"))
    use = (" lr=%lr ", " lr=%lr2 ")
    assert codes(changed(PLAIN, twin, use)) == {"Z008"}
    first = ("scalar %lr = (0.01)\n", "scalar %lr = (0.01)\nscalar %lr2 = (0.5)\n")
    assert codes(changed(PLAIN, twin, use, first)) == {"Z008"}
    report = changed(PLAIN, (INPUT, INPUT + INPUT.replace("%input.x", "%copy", 1)))
    assert codes(report) == {"Z008"}
    assert "nothing gives it a value" in report.findings[0].sentence


def test_nothing_rests_with_a_later_version() -> None:
    twin = STEP.replace("%step", "%step2").replace("value step", "value step version=1")
    assert codes(changed(PLAIN, (STEP, STEP + twin), (" step=%step lr", " step=%step2 lr"))) == {
        "Z008"
    }


def test_a_temporary_buffer_brings_no_named_value_from_the_step_before() -> None:
    """The input of a step is not present before the step, although an earlier one was copied."""
    case = Case(stage=0)
    found: list[str] = []
    section = ""
    for line in lines_of(case.scheduled):
        if line.startswith("section "):
            section = line.split()[1]
            found += [line, "  entry live %prev", "  entry %prev = value input.x"]
        elif line == "}" and section:
            if section == LAST_MICRO_STEP:
                exits = line_with(found, "  exit")
                found.insert(exits, "  cast %input.x -> %prev  stream=compute")
            found += ["  exit live %prev", "  exit %prev = value input.x", line]
            section = ""
        elif line.startswith("buffer %input.x"):
            found += [line, "buffer %prev : f32[8] device activation"]
        else:
            found.append(line.replace("@pre.forward(%input.x", "@pre.forward(%prev"))
    assert codes(judged(case, found)) == {"Z008"}


ROLES = {
    "rng": "whose seeds are i64",
    "input": "an input must be bound to it",
    "constant": "a module buffer must be bound to it",
    "scalar": "rests with no value of its own",
    "grad": "rests with param of flat blocks.0",
    "activation": "rests with param of flat blocks.0",
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_what_the_engine_does(role: str) -> None:
    old = "buffer %blocks.0.param : f32[768] device param"
    report = changed(Case(stage=0), (old, old.replace("device param", f"device {role}")))
    assert codes(report) == {"Z008"}
    assert any(ROLES[role] in finding.sentence for finding in report.findings)


def test_bindings_have_the_size_of_their_buffers() -> None:
    assert codes(changed(PLAIN, ("input x : f32[2,4]", "input x : f32[2,5]"))) == {"Z008"}
    assert codes(changed(PLAIN, ("input x : f32[2,4]", "input x : bf16[2,4]"))) == {"Z008"}
    again = "input x : f32[2,4] -> %input.x\n"
    assert codes(changed(PLAIN, (again, again + again))) == {"Z002"}


# ---------------------------------------------------------------------------------------------- operands and alignment


@pytest.mark.parametrize(
    ("operand", "alias"),
    [
        ("overflow=%overflow", "overflow=%gradient_divisor"),
        ("norm=%norm", "norm=%gradient_divisor"),
        ("overflow=%overflow", "overflow=%skip"),
        ("skip=%skip", "skip=%norm"),
    ],
)
def test_a_decision_writes_beside_what_it_reads(operand: str, alias: str) -> None:
    lines = lines_of(DECIDED.scheduled)
    at = line_with(lines, "decide step=")
    assert operand in lines[at]
    lines[at] = lines[at].replace(operand, alias)
    source, target = (word.split("=")[1] for word in (operand, alias))
    lines.insert(at, f"  cast {source} -> {target}  stream=compute")
    assert "Z010" in codes(judged(DECIDED, lines))


def test_places_and_parameters_are_aligned() -> None:
    case = Case(stage=0)
    old = "blocks.0.bias : [4] offset=64"
    assert codes(changed(case, (old, old.replace("64", "63")))) == {"Z008"}
    step = "optimizer_step adamw param=%blocks.0.param grad=%blocks.0.grad"
    lines = lines_of(case.scheduled)
    at = line_with(lines, step)

    def cut(start: int, stop: int) -> str:
        names = r"%blocks\.0\.(param|grad|exp_avg_sq|exp_avg)"
        return re.sub(names, lambda match: f"{match[0]}[{start}:{stop}]", lines[at])

    assert codes(judged(case, [*lines[:at], cut(0, 3), cut(3, 768), *lines[at + 1 :]])) == {"Z003"}
    assert judged(case, [*lines[:at], cut(0, 64), cut(64, 768), *lines[at + 1 :]]).is_valid


# -------------------------------------------------------------------------------------------------------------- sums


def test_a_gradient_is_used_up_by_its_step() -> None:
    """A second flat that is updated by the same gradient would use it after two divisions."""
    case = Case(stage=0)
    lines = lines_of(case.scheduled)
    at = line_with(lines, "optimizer_step", "%root.pre.param")
    second = lines[at]
    twins: list[str] = []
    for name in ("param", "exp_avg", "exp_avg_sq"):
        second = re.sub(rf"%root\.pre\.{name}\b", f"%root.pre.{name}2", second)
        held = lines[line_with(lines, f"buffer %root.pre.{name} :")]
        twins.append(held.replace(f"%root.pre.{name} ", f"%root.pre.{name}2 "))
    first = line_with(lines, "buffer ")
    found = [*lines[:first], *twins, *lines[first:at], lines[at], second, *lines[at + 1 :]]
    report = verify(parse("\n".join(found) + "\n"))
    assert "used up" in report.findings[0].sentence


def test_contributions_are_added_as_the_logical_program_adds_them() -> None:
    """A tied gradient is summed in its dtype before it is added to the earlier micro-steps."""
    case = Case(stage=0, precision="bf16", micro_steps=2, tied=True)
    found: list[str] = []
    for line in lines_of(case.scheduled):
        if "compute @pre.backward" in line:
            found.append("  cast %root.pre.grad -> += %root.pre.grad_sum  stream=compute")
            found.append(line.replace("+= %root.pre.grad", "%root.pre.grad"))
        else:
            found.append(line)
    report = judged(case, found)
    assert codes(report) == {"Z406"}
    assert "added in f32, in another order or dtype" in report.findings[0].sentence


def test_micro_steps_are_added_in_the_logical_programs_dtype() -> None:
    case = Case(stage=0, precision="bf16", micro_steps=2)
    found: list[str] = []
    for line in lines_of(case.scheduled):
        if line.startswith("buffer %blocks.0.grad_sum"):
            found += [
                line.replace("f32", "bf16").replace("grad_sum", "sum16"),
                "buffer %blocks.0.grad_sum : f32[768] device grad",
            ]
        elif "optimizer_step" in line and "%blocks.0." in line:
            found += [
                "  alloc %blocks.0.grad_sum  stream=compute",
                "  cast %blocks.0.sum16 -> %blocks.0.grad_sum  stream=compute",
                line,
                "  release %blocks.0.grad_sum  stream=compute",
            ]
        else:
            found.append(line.replace("%blocks.0.grad_sum", "%blocks.0.sum16"))
    report = judged(case, found)
    assert codes(report) == {"Z406"}
    assert any("added in bf16" in finding.sentence for finding in report.findings)


NORM = "grad_norm (%root.pre.grad, %blocks.0.grad, %blocks.1.grad, %root.post.grad)"


@pytest.mark.parametrize(
    "sources",
    [
        "%root.post.grad, %blocks.1.grad, %blocks.0.grad, %root.pre.grad",
        "%root.pre.grad[0:4], %root.pre.grad[4:256], %blocks.0.grad, %blocks.1.grad, %root.post.grad",
    ],
)
def test_a_norm_adds_up_in_the_logical_programs_order(sources: str) -> None:
    report = changed(Case(stage=2, clip=1.0), (NORM, f"grad_norm ({sources})"))
    assert codes(report) == {"Z406"}
    assert "the norm adds up gradients in another order" in report.findings[0].sentence


def test_a_norm_may_be_taken_before_the_update() -> None:
    """The next section still knows which statistic it is."""
    case = Case(stage=2, clip=1.0)
    lines = lines_of(case.scheduled)
    at = line_with(lines, "grad_norm")
    event = lines[at].split("=")[0].strip()
    norm = lines.pop(at).split("=", 1)[1].strip() if event.startswith("!") else lines.pop(at)
    lines.insert(at, f"  {event} = fill %gradient_divisor = 1.0  stream=compute")
    last = max(i for i, line in enumerate(lines) if "reduce_scatter" in line)
    if "!" not in lines[last]:
        lines[last] = lines[last].replace("reduce_scatter", "!reduced = reduce_scatter")
    reduced = lines[last].split("=")[0].strip()
    end = next(i for i, line in enumerate(lines) if line.startswith("  exit"))
    lines[end:end] = [f"  wait {reduced} on=compute", f"  {norm.strip()}"]
    report = judged(case, lines)
    assert report.is_valid, report.render()
    assert is_same(run(parse("\n".join(lines) + "\n")), run(case.scheduled))


@pytest.mark.parametrize(
    ("again", "after"),
    [
        ("grad_norm (%root.pre.grad) -> %norm", "decide"),
        ("fill %norm = 1.0", "decide"),
        ("fill %skip = 0.0", "update_scale"),
    ],
)
def test_what_the_engine_tells_of_a_step_is_what_was_decided(again: str, after: str) -> None:
    """The engine reads the norm and the skip flag after the update."""
    case = Case(stage=2, precision="fp16", clip=1.0)
    lines = lines_of(case.scheduled)
    lines.insert(line_with(lines, f"  {after}") + 1, f"  {again}  stream=compute")
    report = judged(case, lines)
    assert codes(report) == {"Z408"}
    assert "and not that of the decision" in report.findings[0].sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("flat blocks.0 : f32", "flat blocks.0 : bf16"),
        ("flat blocks.0 : f32[768] unit=blocks.0", "flat blocks.0 : f32[768] unit=blocks.1"),
        ("blocks.0.bias : [4] offset=64", "blocks.0.bias : [2,2] offset=64"),
    ],
)
def test_the_header_is_the_logical_programs(old: str, new: str) -> None:
    assert codes(changed(PLAIN, (old, new))) & {"Z406", "Z005"}


def test_a_step_has_the_logical_programs_micro_steps() -> None:
    case = Case(stage=0, micro_steps=2)
    assert codes(changed(case, ("micro_steps=2", "micro_steps=5"))) == {"Z406"}


# ----------------------------------------------------------------------------------------------------------- boundaries


def test_one_name_may_stand_for_two_collectives() -> None:
    """An event stands for gathers over two communicators, in the update and in micro-steps; both must be ordered."""
    case = Case(stage=3, precision="bf16", micro_steps=2, clip=1.0)
    program = crossing_micro_steps(case.scheduled)
    assert verify(program, case.logical).is_valid
    found: list[str] = []
    section, is_first = "", False
    for line in lines_of(program):
        if line.startswith("section"):
            section, is_first = line.split()[1], line.split()[1] != UPDATE
        match = re.search(r"(!\d+) = prefetch %blocks.0.param", line)
        if section == UPDATE and "!crossing = prefetch" in line:
            found.append(line.replace("comm=gather ", "comm=gather2 "))
        elif is_first and "alloc %blocks.0.full" in line:
            found.append(line.replace("stream=gather", "stream=copy_in"))
        elif is_first and match:
            is_first = False
            found.append(line.replace("stream=gather", "stream=copy_in"))
            found.append(f"  wait {match[1]} on=gather")
        else:
            found.append(line)
    at = line_with(found, "comm gather axis=dp")
    found.insert(at + 1, "comm gather2 axis=dp")
    report = judged(case, found)
    assert "Z202" in codes(report)


RELEASES = """zeroir 1
mesh dp=1
streams compute:device copy_in:device
buffer %a : f32[64] device staging offset=0
buffer %b : f32[64] device staging offset=256
buffer %c : f32[64] device staging offset=0
buffer %d : f32[64] device staging offset=256

section micro_step {
  entry pending !p stream=copy_in
  wait !p on=compute
  alloc %c stream=compute
  release %c stream=compute
  alloc %d stream=compute
  !x = release %d stream=compute
  wait !x on=copy_in
  alloc %a stream=copy_in
  !p = release %a stream=copy_in
  exit pending !p stream=copy_in
}

section last_micro_step {
  entry pending !p stream=copy_in
  alloc %c stream=compute
  !x = release %c stream=compute
  wait !x on=copy_in
}

section update {
  alloc %b stream=copy_in
  !p = release %b stream=copy_in
  exit pending !p stream=copy_in
}
"""


def test_one_name_may_stand_for_two_releases() -> None:
    """After a micro-step, the pending release is that of a buffer in whose place another one begins."""
    report = verify(parse(RELEASES))
    assert codes(report) == {"Z106"}
    elsewhere = RELEASES.replace(
        "%c : f32[64] device staging offset=0", "%c : f32[64] device staging offset=512"
    )
    assert verify(parse(elsewhere)).is_valid


def passed_on(case: Case, op: str, stream: str = "copy_in") -> list[str]:
    """The case's schedule with an op that is under way over every boundary of a step."""
    found: list[str] = []
    section = ""
    for line in lines_of(case.scheduled):
        if line.startswith("section "):
            section = line.split()[1]
            found += [line, "  entry live %prev", f"  entry pending !late stream={stream}"]
        elif line == "}" and section:
            if section == LAST_MICRO_STEP:
                exits = line_with(found, "  exit")
                found.insert(exits, f"  !late = {op}  stream={stream}")
            found += ["  exit live %prev", f"  exit pending !late stream={stream}", line]
            section = ""
        elif line.startswith("buffer %input.x"):
            found += [line, "buffer %prev : f32[8] device activation"]
        else:
            found.append(line)
    return found


def test_an_op_that_is_passed_on_meets_the_host() -> None:
    """The op is under way when the next batch is written, although the section before did not issue it."""
    case = Case(stage=0)
    report = judged(case, passed_on(case, "cast %input.x -> %prev"))
    assert codes(report) == {"Z105"}
    assert (
        "cast of last_micro_step is still under way at the exit of update"
        in report.findings[0].sentence
    )
    assert judged(case, passed_on(case, "fill %prev = 0.0")).is_valid


@pytest.mark.parametrize("reads", ["%lr", "%step"])
def test_no_op_reads_a_scalar_between_two_steps(reads: str) -> None:
    """The user may set the learning rate there."""
    case = Case(stage=0)
    program = case.scheduled
    buffer = program.buffer_by_name[reads[1:]]
    copy = replace(buffer, name="seen", holds=None, role=Role.STAGING)
    lines = lines_of(replace(program, buffers=(*program.buffers, copy)))
    found: list[str] = []
    section = ""
    for line in lines:
        if line.startswith("section "):
            section = line.split()[1]
            found.append(line)
            if section == LAST_MICRO_STEP:
                found += [
                    "  entry live %seen",
                    "  entry pending !late stream=copy_in",
                    "  wait !late on=compute",
                    "  release %seen  stream=compute",
                ]
        elif line == "}" and section == UPDATE:
            found += [
                "  !done = fill %gradient_divisor = 1.0  stream=compute",
                "  wait !done on=copy_in",
                "  alloc %seen  stream=copy_in",
                f"  !late = cast {reads} -> %seen  stream=copy_in",
                "  exit live %seen",
                "  exit pending !late stream=copy_in",
                line,
            ]
        else:
            found.append(line)
    report = verify(parse("\n".join(found) + "\n"))
    assert codes(report) == {"Z105"}
    assert "which the host may change between steps" in report.findings[0].sentence


@pytest.mark.parametrize("name", [LAST_MICRO_STEP, UPDATE])
def test_a_section_of_the_logical_program_is_missed(name: str) -> None:
    case = Case(stage=1)
    sections = tuple(s for s in case.scheduled.sections if s.name != name)
    report = verify(replace(case.scheduled, sections=sections), case.logical)
    assert codes(report) == {"Z406"}
    assert f"section {name} of the logical program is missing" in report.render()
