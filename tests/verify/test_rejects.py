"""Each law, broken on purpose in otherwise valid schedules: the code, and where the finding points."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import OpKind, edit, places, put, the, without_ops
from tests.support.lowering import codes
from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Space
from zeroir.ir.mesh import GATHER
from zeroir.ir.ops import Mode, Op, Reduction
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program, State
from zeroir.passes.manager import apply
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.verify import LAWS, PROVED, VerificationError, check, verify

ZERO3 = Case(stage=3, precision="bf16", clip=1.0)
ZERO2 = Case(stage=2, precision="bf16", micro_steps=2)
ZERO1 = Case(stage=1, precision="fp16", clip=1.0, tied=True)
ZERO0 = Case(stage=0, tied=True)


Damage = Callable[[Program], Program]


def find(
    program: Program, section: str, is_wanted: Callable[[Op], bool], nth: int = 0
) -> tuple[int, int]:
    found = [p for p in places(program, is_wanted) if program.sections[p[0]].name == section]
    return found[nth]


def dropped(
    section: str,
    kind: type[OpKind],
    nth: int = 0,
    is_wanted: Callable[[OpKind], bool] | None = None,
) -> Damage:
    """Leave out one op."""
    return lambda program: put(program, the(program, kind, section, nth, is_wanted)[0])


def altered(
    section: str,
    kind: type[OpKind],
    change: Callable[[OpKind], tuple[Op, ...]],
    is_wanted: Callable[[OpKind], bool] | None = None,
) -> Damage:
    """Replace one op."""

    def damage(program: Program) -> Program:
        place, op = the(program, kind, section, 0, is_wanted)
        return put(program, place, *change(op))

    return damage


def moved(program: Program, place: tuple[int, int], to: int) -> Program:
    def change(body: list[Op]) -> None:
        body.insert(to, body.pop(place[1]))

    return edit(program, place[0], change)


def wait_before(program: Program, place: tuple[int, int]) -> tuple[int, int]:
    section, line = place
    for i in reversed(range(line)):
        if isinstance(program.sections[section].body[i], ops.Wait):
            return section, i
    raise AssertionError("no wait before that op")


# --------------------------------------------------------------------------------------- memory and ordering


def test_a_gather_without_its_wait_is_read_too_early() -> None:
    program = ZERO3.scheduled
    first = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Compute))
    report = verify(put(program, wait_before(program, first)))
    assert codes(report) <= {"Z103", "Z105", "Z101"}
    finding = report.findings[0]
    assert finding.code == "Z103"
    assert finding.section == LAST_MICRO_STEP
    assert "compute @pre.forward" in finding.sentence
    assert any(line.startswith(">") and "compute @pre.forward" in line for line in finding.window)
    assert len(finding.window) == 5
    long = replace(finding, window=("x" * 5000 + " stream=compute",)).render().splitlines()[1]
    assert len(long) < 240
    assert " … " in long
    assert long.endswith(" stream=compute")
    assert finding.window[2] in finding.render()
    assert any("allocated @" in line and "gathered @" in line for line in finding.history)


def test_a_reduction_without_its_wait_races_with_the_backward() -> None:
    program = ZERO2.scheduled
    scatter = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter))
    report = verify(put(program, wait_before(program, scatter)))
    assert report.findings[0].code == "Z105"


@pytest.mark.parametrize("case", [ZERO2, ZERO3])
def test_a_release_before_the_last_use_is_a_use_after_release(case: Case) -> None:
    program = case.scheduled
    release = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Release), -1)
    assert codes(moved(program, release, release[1] - 2)) == {"Z101"}


def test_memory_that_begins_before_its_release_is_a_use_after_release() -> None:
    def is_of_gathers(op: Op) -> bool:
        return isinstance(op, ops.Wait) and op.on == GATHER

    report = verify(without_ops(ZERO3.scheduled, is_of_gathers, LAST_MICRO_STEP))
    assert codes(report) == {"Z101"}
    assert "may run before its release" in report.findings[0].sentence


def test_a_wait_before_its_signal_is_found() -> None:
    program = ZERO3.scheduled
    wait = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Wait))
    assert "Z202" in codes(moved(program, wait, 0))


@pytest.mark.parametrize("kind", [ops.GradNorm, ops.CheckFinite, ops.Decide, ops.OptimizerStep])
def test_what_an_update_uses_is_in_one_space(kind: type[Op]) -> None:
    """A scalar on the host, of which a device would read: the region that the op reads first."""
    case = Case(stage=1, precision="fp16", clip=1.0)
    op = next(op for op in case.scheduled.ops() if isinstance(op, kind))
    read = effects(op).reads[0].buffer
    buffers = [
        replace(buffer, space=Space.HOST) if buffer.name == read else buffer
        for buffer in case.scheduled.buffers
    ]
    report = verify(replace(case.scheduled, buffers=tuple(buffers)))
    sentences = [finding.sentence for finding in report.findings if finding.code == "Z006"]
    name = ops.op_name(kind)
    assert any(s.startswith(name) and f"%{read}" in s and "host memory" in s for s in sentences)


def test_a_micro_step_that_leaves_something_out_is_compared_with_the_last() -> None:
    """The op of the last one is named that contributes, to each gradient and to the loss."""
    program = dropped(MICRO_STEP, ops.Compute)(ZERO2.scheduled)
    body = program.section_by_name[LAST_MICRO_STEP].body
    contributors = {
        finding.sentence: body[finding.line]
        for finding in verify(program).findings
        if finding.section == LAST_MICRO_STEP and finding.line is not None
    }
    of_gradient = "the gradient of {} has other contributions in the last micro-step than before"
    for parameter in ("pre.weight", "blocks.0.bias", "post.weight"):
        op = contributors[of_gradient.format(parameter)]
        assert isinstance(op, ops.Compute)
        assert parameter in {to.gradient for to in op.destinations if to is not None}
    of_loss = "the last micro-step adds another value to the loss than the micro-steps before"
    assert isinstance(contributors[of_loss], ops.Cast)


def test_a_budget_is_kept_or_exceeded() -> None:
    program = ZERO3.scheduled
    assert verify(program, budget_bytes=10**9).laws["Z301"] == PROVED
    assert codes(verify(program, budget_bytes=1000)) == {"Z301"}


# -------------------------------------------------------------------------------------------------- equivalence


def shifted(op: ops.Compute) -> tuple[Op, ...]:
    """The call reads its first parameter at another place."""
    i, read = next((i, a) for i, a in enumerate(op.arguments) if a.parameter is not None)
    region = replace(read.view.region, offset=read.view.region.offset + 8)
    moved_read = replace(read, view=replace(read.view, region=region))
    return (replace(op, arguments=(*op.arguments[:i], moved_read, *op.arguments[i + 1 :])),)


def accumulates(op: ops.Compute) -> bool:
    return any(d is not None and d.gradient and d.mode is Mode.ACCUMULATE for d in op.destinations)


def overwriting(op: ops.Compute) -> tuple[Op, ...]:
    """The call's contributions replace what is there."""
    destinations = tuple(
        replace(d, mode=Mode.WRITE) if d is not None and d.gradient else d for d in op.destinations
    )
    return (replace(op, destinations=destinations),)


def apart(op: ops.AllReduce) -> tuple[Op, ...]:
    """The loss is reduced by a launch of its own, on a stream that nothing orders."""
    own = ops.AllReduce(pairs=op.pairs[-1:], comm=op.comm, stream="copy_in")
    return replace(op, pairs=op.pairs[:-1]), own


def halved(op: ops.AllGather) -> tuple[Op, ...]:
    pair = op.pairs[0]
    half = replace(pair.destination, numel=pair.destination.numel // 2)
    return (replace(op, pairs=(replace(pair, destination=half),)),)


def scaled(op: ops.ReduceScatter) -> tuple[Op, ...]:
    """Only this rank's slice is scaled beside what it reduces."""
    region = replace(op.pairs[0].destination, shard=None)
    by = Region(buffer="loss_scale", offset=0, numel=1)
    return op, ops.Scale(region=region, by=by, stream=op.stream)


def twice(op: ops.OptimizerStep | ops.AllGather) -> tuple[Op, ...]:
    return replace(op, event=None), op


TIED = (ZERO0, ZERO1, replace(ZERO2, tied=True), replace(ZERO3, tied=True))
ALL = (ZERO0, ZERO1, ZERO2, ZERO3)
BROKEN: tuple[tuple[tuple[Case, ...], Damage, str], ...] = (
    ((ZERO3,), dropped(LAST_MICRO_STEP, ops.Release, -1), "Z104"),
    (
        (ZERO3,),
        altered(
            LAST_MICRO_STEP,
            ops.Release,
            lambda op: (replace(op, stream="copy_out"),),
            lambda op: op.buffer == "h.0",
        ),
        "Z101",
    ),
    ((ZERO3,), altered(LAST_MICRO_STEP, ops.AllGather, twice), "Z102"),
    ((ZERO3,), altered(UPDATE, ops.AllReduce, apart), "Z202"),
    ((ZERO3,), altered(LAST_MICRO_STEP, ops.AllGather, halved), "Z201"),
    (
        (ZERO3,),
        altered(LAST_MICRO_STEP, ops.Compute, shifted, lambda op: op.unit == "blocks.0"),
        "Z401",
    ),
    (TIED, altered(LAST_MICRO_STEP, ops.Compute, overwriting, accumulates), "Z402 .."),
    # Padding that is not zeroed, a micro-step that contributes differently, a sum that is not cleared.
    ((ZERO2, ZERO3), dropped(LAST_MICRO_STEP, ops.Fill), "Z402"),
    ((ZERO2,), dropped(MICRO_STEP, ops.Cast), "Z402 .."),
    (
        (ZERO2,),
        dropped(UPDATE, ops.Fill, 0, lambda op: op.destination.buffer.endswith("grad_sum")),
        "Z402",
    ),
    # The loss of a micro-step.
    ((ZERO2,), dropped(MICRO_STEP, ops.Cast, 0, lambda op: "loss" in _added_to(op)), "Z402"),
    # A maximum is no sum, and no norm; the loss is another number, too.
    (
        (ZERO3,),
        altered(
            LAST_MICRO_STEP, ops.ReduceScatter, lambda op: (replace(op, reduction=Reduction.MAX),)
        ),
        "Z402",
    ),
    (
        (ZERO3,),
        altered(UPDATE, ops.AllReduce, lambda op: (replace(op, reduction=Reduction.MAX),)),
        "Z405 Z408",
    ),
    (ALL, dropped(UPDATE, ops.OptimizerStep), "Z403 .."),
    (ALL, altered(UPDATE, ops.OptimizerStep, twice), "Z403 .."),
    # A parameter that is not cast or gathered back.
    (
        (ZERO3,),
        dropped(UPDATE, ops.Cast, 0, lambda op: op.destination.buffer.endswith(".param")),
        "Z403",
    ),
    ((ZERO1,), dropped(UPDATE, ops.AllGather), "Z403"),
    ((ZERO0,), dropped(LAST_MICRO_STEP, ops.AllReduce), "Z404"),
    ((ZERO1,), dropped(LAST_MICRO_STEP, ops.ReduceScatter), "Z404"),
    # A statistic of this rank alone, of replicas, with a gap, and with elements that count twice.
    (
        (ZERO3,),
        altered(
            UPDATE,
            ops.AllReduce,
            lambda op: (
                replace(op, pairs=tuple(p for p in op.pairs if p.source.buffer != "norm")),
            ),
        ),
        "Z405",
    ),
    (
        (Case(stage=0, clip=1.0),),
        altered(
            UPDATE,
            ops.GradNorm,
            lambda op: (replace(op, sources=tuple(replace(s, shard=None) for s in op.sources)),),
        ),
        "Z405",
    ),
    (
        (ZERO3,),
        altered(UPDATE, ops.GradNorm, lambda op: (replace(op, sources=op.sources[1:]),)),
        "Z405",
    ),
    (
        (ZERO3,),
        altered(
            UPDATE, ops.GradNorm, lambda op: (replace(op, sources=(*op.sources, op.sources[0])),)
        ),
        "Z405",
    ),
    ((ZERO3,), dropped(UPDATE, ops.Decide), "Z405 .."),
    (
        (replace(ZERO1, micro_steps=2),),
        altered(LAST_MICRO_STEP, ops.ReduceScatter, scaled),
        "Z402 ..",
    ),
)


@pytest.mark.parametrize(
    ("case", "damage", "expected"),
    [(case, damage, expected) for cases, damage, expected in BROKEN for case in cases],
)
def test_a_damage_breaks_its_law(case: Case, damage: Damage, expected: str) -> None:
    """Where ``..`` follows, others may be broken, too."""
    first, *others = expected.split()
    found = codes(damage(case.scheduled))
    assert first in found
    assert ".." in others or found == {first, *others}


@pytest.mark.parametrize("case", [ZERO0, ZERO1, ZERO2, ZERO3])
def test_a_reduction_before_the_last_contribution_is_found(case: Case) -> None:
    """A gradient that is reduced too early lacks a contribution, or has one that is not reduced."""
    program = case.scheduled
    place = find(
        program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter | ops.AllReduce)
    )
    assert not verify(moved(program, place, 0)).is_valid


def test_a_decision_that_comes_late_is_found() -> None:
    program = ZERO3.scheduled
    decide = find(program, UPDATE, lambda op: isinstance(op, ops.Decide))
    last = len(program.sections[decide[0]].body) - 1
    assert "Z405" in codes(moved(program, decide, last))


def test_another_computation_is_found_by_the_reference() -> None:
    program, logical = ZERO0.scheduled, ZERO0.logical
    place, compute = the(
        program, ops.Compute, LAST_MICRO_STEP, is_wanted=lambda op: op.segment == "pre.backward"
    )
    # The input where the activation's gradient belongs: as tensors the two are alike.
    wrong = replace(compute, arguments=(compute.arguments[1], compute.arguments[1]))
    damaged = put(program, place, wrong)
    assert verify(program, logical).is_valid
    assert codes(damaged) == set()
    assert codes(damaged, logical) == {"Z406"}


def test_the_update_must_be_told_the_same() -> None:
    program, logical = ZERO3.scheduled, ZERO3.logical
    place, decide = the(program, ops.Decide, UPDATE)
    report = verify(put(program, place, replace(decide, max_norm=2.0)), logical)
    assert codes(report) == {"Z406"}


def _added_to(op: Op) -> set[str]:
    return {region.buffer for region in effects(op).accumulates}


# --------------------------------------------------------------------------------------------------- contracts


def test_boundaries_must_agree() -> None:
    program = ZERO3.scheduled
    sections = tuple(
        replace(section, entry=State()) if section.name == UPDATE else section
        for section in program.sections
    )
    report = verify(replace(program, sections=sections))
    assert codes(report) == {"Z009"}


def test_an_error_lists_findings_and_what_to_do() -> None:
    with pytest.raises(VerificationError, match="Z104") as caught:
        check(dropped(LAST_MICRO_STEP, ops.Release, -1)(ZERO3.scheduled))
    assert "zeroir explain Z104" in str(caught.value)
    assert caught.value.exit_code == 2


def test_laws_say_proved_or_why_not() -> None:
    program, logical = ZERO3.scheduled, ZERO3.logical
    saving = apply(PlanMemory(), apply(SaveState(), program))
    laws = verify(saving, logical, budget_bytes=10**9).laws
    of_pages = {"Z501", "Z502", "Z503"}
    assert dict(laws) == dict.fromkeys(set(LAWS) - of_pages, PROVED)
    assert set(LAWS) - set(verify(program).laws) == {"Z106", "Z301", "Z406", "Z407"} | of_pages
    broken = verify(dropped(LAST_MICRO_STEP, ops.Release, -1)(program)).laws
    assert broken["Z101"] == PROVED
    assert "is live at the exit" in broken["Z104"]
    assert "not examined" in broken["Z402"]
