"""Each law, broken on purpose in otherwise valid schedules: the code, and where the finding points."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import at, edit, places, put
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
from zeroir.verify import LAWS, PROVED, Report, VerificationError, check, verify, verify_job

ZERO3 = Case(stage=3, precision="bf16", clip=1.0)
ZERO2 = Case(stage=2, precision="bf16", micro_steps=2)
ZERO1 = Case(stage=1, precision="fp16", clip=1.0, tied=True)
ZERO0 = Case(stage=0, tied=True)


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def find(
    program: Program, section: str, is_wanted: Callable[[Op], bool], nth: int = 0
) -> tuple[int, int]:
    found = [p for p in places(program, is_wanted) if program.sections[p[0]].name == section]
    return found[nth]


def drop(program: Program, place: tuple[int, int]) -> Program:
    return put(program, place)


def writes(op: Op, buffer: str) -> bool:
    match op:
        case ops.Compute():
            return any(d is not None and d.view.region.buffer == buffer for d in op.destinations)
        case ops.AllGather() | ops.Prefetch() | ops.ReduceScatter() | ops.AllReduce():
            return any(pair.destination.buffer == buffer for pair in op.pairs)
        case ops.Cast():
            return op.destination.buffer == buffer
        case _:
            return False


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
    report = verify(drop(program, wait_before(program, first)))
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
    report = verify(drop(program, wait_before(program, scatter)))
    assert report.findings[0].code == "Z105"


@pytest.mark.parametrize("case", [ZERO2, ZERO3])
def test_a_release_before_the_last_use_is_a_use_after_release(case: Case) -> None:
    program = case.scheduled
    release = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Release), -1)
    assert codes(verify(moved(program, release, release[1] - 2))) == {"Z101"}


def test_a_release_on_a_stream_that_does_not_wait_is_a_use_after_release() -> None:
    program = ZERO3.scheduled
    place = find(
        program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Release) and op.buffer == "h.0"
    )
    release = at(program, place)
    assert isinstance(release, ops.Release)
    assert codes(verify(put(program, place, replace(release, stream="copy_out")))) == {"Z101"}


def test_memory_that_begins_before_its_release_is_a_use_after_release() -> None:
    program = ZERO3.scheduled
    section, _ = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Wait))

    def forget_releases(body: list[Op]) -> None:
        body[:] = [op for op in body if not (isinstance(op, ops.Wait) and op.on == GATHER)]

    report = verify(edit(program, section, forget_releases))
    assert codes(report) == {"Z101"}
    assert "may run before its release" in report.findings[0].sentence


def test_a_release_that_is_missing_is_a_leak() -> None:
    program = ZERO3.scheduled
    release = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Release), -1)
    assert codes(verify(drop(program, release))) == {"Z104"}


def test_a_second_gather_is_found() -> None:
    program = ZERO3.scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Prefetch | ops.AllGather))
    gather = at(program, place)
    assert isinstance(gather, ops.AllGather)
    twice = put(program, place, replace(gather, event=None), gather)
    assert codes(verify(twice)) == {"Z102"}


def test_a_wait_before_its_signal_is_found() -> None:
    program = ZERO3.scheduled
    wait = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Wait))
    assert "Z202" in codes(verify(moved(program, wait, 0)))


def test_collectives_of_one_communicator_need_an_order() -> None:
    program = ZERO3.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.AllReduce))
    scalars = at(program, place)
    assert isinstance(scalars, ops.AllReduce)
    loss = scalars.pairs[-1:]
    apart = put(
        program,
        place,
        replace(scalars, pairs=scalars.pairs[:-1]),
        ops.AllReduce(pairs=loss, comm=scalars.comm, stream="copy_in"),
    )
    assert codes(verify(apart)) == {"Z202"}


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


def test_sizes_must_fit_the_axis() -> None:
    program = ZERO3.scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.AllGather))
    gather = at(program, place)
    assert isinstance(gather, ops.AllGather)
    pair = gather.pairs[0]
    half = replace(pair.destination, numel=pair.destination.numel // 2)
    assert codes(
        verify(put(program, place, replace(gather, pairs=(replace(pair, destination=half),))))
    ) == {"Z201"}


def test_jobs_must_issue_the_same_collectives() -> None:
    program = ZERO3.scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter))
    assert verify_job([program, program]).is_valid
    assert verify_job([]).is_valid
    assert codes(verify_job([program, drop(program, place)])) == {"Z201"}
    assert codes(verify_job([program, ZERO2.scheduled])) == {"Z201"}


def test_a_budget_is_kept_or_exceeded() -> None:
    program = ZERO3.scheduled
    assert verify(program, budget_bytes=10**9).laws["Z301"] == PROVED
    assert codes(verify(program, budget_bytes=1000)) == {"Z301"}


# -------------------------------------------------------------------------------------------------- equivalence


def test_a_parameter_at_the_wrong_place_is_found() -> None:
    program = ZERO3.scheduled
    place = find(
        program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Compute) and op.unit == "blocks.0"
    )
    compute = at(program, place)
    assert isinstance(compute, ops.Compute)
    i = next(i for i, a in enumerate(compute.arguments) if a.parameter is not None)
    view = compute.arguments[i].view
    shifted = replace(view, region=replace(view.region, offset=view.region.offset + 8))
    arguments = list(compute.arguments)
    arguments[i] = replace(arguments[i], view=shifted)
    assert codes(verify(put(program, place, replace(compute, arguments=tuple(arguments))))) == {
        "Z401"
    }


@pytest.mark.parametrize(
    "case", [ZERO0, ZERO1, replace(ZERO2, tied=True), replace(ZERO3, tied=True)]
)
def test_a_contribution_that_replaces_another_is_found(case: Case) -> None:
    program = case.scheduled
    place = find(
        program,
        LAST_MICRO_STEP,
        lambda op: (
            isinstance(op, ops.Compute)
            and any(
                d is not None and d.gradient and d.mode is Mode.ACCUMULATE for d in op.destinations
            )
        ),
    )
    compute = at(program, place)
    assert isinstance(compute, ops.Compute)
    destinations = tuple(
        replace(d, mode=Mode.WRITE) if d is not None and d.gradient else d
        for d in compute.destinations
    )
    assert "Z402" in codes(verify(put(program, place, replace(compute, destinations=destinations))))


@pytest.mark.parametrize("case", [ZERO0, ZERO1, ZERO2, ZERO3])
def test_a_reduction_before_the_last_contribution_is_found(case: Case) -> None:
    """A gradient that is reduced too early lacks a contribution, or has one that is not reduced."""
    program = case.scheduled
    place = find(
        program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter | ops.AllReduce)
    )
    assert not verify(moved(program, place, 0)).is_valid


@pytest.mark.parametrize("case", [ZERO2, ZERO3])
def test_padding_that_is_not_zeroed_is_found(case: Case) -> None:
    program = case.scheduled
    fill = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Fill))
    assert codes(verify(drop(program, fill))) == {"Z402"}


def test_a_micro_step_that_contributes_differently_is_found() -> None:
    program = ZERO2.scheduled
    cast = find(program, MICRO_STEP, lambda op: isinstance(op, ops.Cast))
    assert "Z402" in codes(verify(drop(program, cast)))


def test_a_sum_that_is_not_cleared_is_found() -> None:
    program = ZERO2.scheduled
    fill = find(
        program,
        UPDATE,
        lambda op: isinstance(op, ops.Fill) and op.destination.buffer.endswith("grad_sum"),
    )
    assert codes(verify(drop(program, fill))) == {"Z402"}


def test_a_maximum_is_no_sum() -> None:
    program = ZERO3.scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter))
    scatter = at(program, place)
    assert isinstance(scatter, ops.ReduceScatter)
    assert codes(verify(put(program, place, replace(scatter, reduction=Reduction.MAX)))) == {"Z402"}


def test_a_norm_by_maximum_is_no_norm() -> None:
    program = ZERO3.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.AllReduce))
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    assert codes(verify(put(program, place, replace(reduce, reduction=Reduction.MAX)))) == {
        "Z405",
        "Z408",  # the loss, too
    }


@pytest.mark.parametrize("case", [ZERO0, ZERO1, ZERO2, ZERO3])
def test_a_step_that_is_missing_is_found(case: Case) -> None:
    program = case.scheduled
    step = find(program, UPDATE, lambda op: isinstance(op, ops.OptimizerStep))
    assert "Z403" in codes(verify(drop(program, step)))


@pytest.mark.parametrize("case", [ZERO0, ZERO1, ZERO2, ZERO3])
def test_a_step_taken_twice_is_found(case: Case) -> None:
    program = case.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.OptimizerStep))
    step = at(program, place)
    assert isinstance(step, ops.OptimizerStep)
    assert "Z403" in codes(verify(put(program, place, replace(step, event=None), step)))


def test_a_parameter_that_is_not_cast_back_is_found() -> None:
    program = ZERO3.scheduled
    cast = find(
        program,
        UPDATE,
        lambda op: isinstance(op, ops.Cast) and op.destination.buffer.endswith(".param"),
    )
    assert codes(verify(drop(program, cast))) == {"Z403"}


def test_a_parameter_that_is_not_gathered_back_is_found() -> None:
    program = ZERO1.scheduled
    gather = find(program, UPDATE, lambda op: isinstance(op, ops.AllGather))
    assert codes(verify(drop(program, gather))) == {"Z403"}


@pytest.mark.parametrize("case", [ZERO0, ZERO1])
def test_an_unreduced_gradient_is_found(case: Case) -> None:
    program = case.scheduled
    place = find(
        program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter | ops.AllReduce)
    )
    assert codes(verify(drop(program, place))) == {"Z404"}


def test_a_partial_statistic_is_found() -> None:
    program = ZERO3.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.AllReduce))
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    without = tuple(pair for pair in reduce.pairs if pair.source.buffer != "norm")
    assert codes(verify(put(program, place, replace(reduce, pairs=without)))) == {"Z405"}


def test_a_statistic_of_replicas_counts_twice() -> None:
    """At stage 0 each rank must read its own slice: the sum of whole norms over ranks is too large."""
    program = Case(stage=0, clip=1.0).scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.GradNorm))
    norm = at(program, place)
    assert isinstance(norm, ops.GradNorm)
    sources = tuple(replace(source, shard=None) for source in norm.sources)
    assert codes(verify(put(program, place, replace(norm, sources=sources)))) == {"Z405"}


def test_a_statistic_with_a_gap_is_found() -> None:
    program = ZERO3.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.GradNorm))
    norm = at(program, place)
    assert isinstance(norm, ops.GradNorm)
    for sources in (norm.sources[1:], (*norm.sources, norm.sources[0])):
        assert codes(verify(put(program, place, replace(norm, sources=sources)))) == {"Z405"}


def test_a_decision_that_comes_late_or_never_is_found() -> None:
    program = ZERO3.scheduled
    decide = find(program, UPDATE, lambda op: isinstance(op, ops.Decide))
    assert "Z405" in codes(verify(drop(program, decide)))
    last = len(program.sections[decide[0]].body) - 1
    assert "Z405" in codes(verify(moved(program, decide, last)))


def test_another_computation_is_found_by_the_reference() -> None:
    program, logical = ZERO0.scheduled, ZERO0.logical
    place = find(
        program,
        LAST_MICRO_STEP,
        lambda op: isinstance(op, ops.Compute) and op.segment == "pre.backward",
    )
    compute = at(program, place)
    assert isinstance(compute, ops.Compute)
    # The input where the activation's gradient belongs: as tensors the two are alike.
    wrong = replace(compute, arguments=(compute.arguments[1], compute.arguments[1]))
    damaged = put(program, place, wrong)
    assert verify(program, logical).is_valid
    assert codes(verify(damaged)) == set()
    assert codes(verify(damaged, logical)) == {"Z406"}


def test_the_update_must_be_told_the_same() -> None:
    program, logical = ZERO3.scheduled, ZERO3.logical
    place = find(program, UPDATE, lambda op: isinstance(op, ops.Decide))
    decide = at(program, place)
    assert isinstance(decide, ops.Decide)
    report = verify(put(program, place, replace(decide, max_norm=2.0)), logical)
    assert codes(report) == {"Z406"}


def test_a_loss_that_leaves_out_a_micro_step_is_found() -> None:
    program = ZERO2.scheduled
    place = find(program, MICRO_STEP, lambda op: "loss" in _added_to(op))
    assert codes(verify(put(program, place))) == {"Z402"}


def _added_to(op: Op) -> set[str]:
    return {region.buffer for region in effects(op).accumulates}


def test_scaling_this_ranks_slice_of_a_gradient_is_found() -> None:
    program = replace(ZERO1, micro_steps=2).scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter))
    scatter = at(program, place)
    assert isinstance(scatter, ops.ReduceScatter)
    scale = ops.Scale(
        region=replace(scatter.pairs[0].destination, shard=None),
        by=Region(buffer="loss_scale", offset=0, numel=1),
        stream=scatter.stream,
    )
    assert "Z402" in codes(verify(put(program, place, scatter, scale)))


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
    program = ZERO3.scheduled
    release = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Release), -1)
    with pytest.raises(VerificationError, match="Z104") as caught:
        check(drop(program, release))
    assert "zeroir explain Z104" in str(caught.value)
    assert caught.value.exit_code == 2


def test_laws_say_proved_or_why_not() -> None:
    program, logical = ZERO3.scheduled, ZERO3.logical
    saving = apply(PlanMemory(), apply(SaveState(), program))
    laws = verify(saving, logical, budget_bytes=10**9).laws
    of_pages = {"Z501", "Z502", "Z503"}
    assert dict(laws) == dict.fromkeys(set(LAWS) - of_pages, PROVED)
    assert set(LAWS) - set(verify(program).laws) == {"Z106", "Z301", "Z406", "Z407"} | of_pages
    release = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Release), -1)
    broken = verify(drop(program, release)).laws
    assert broken["Z101"] == PROVED
    assert "is live at the exit" in broken["Z104"]
    assert "not examined" in broken["Z402"]
