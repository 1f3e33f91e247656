"""The predecessors of tasks: streams, events, communicators, boundaries, events that cross them, and the host."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.programs import mlp
from zeroir.cost.tasks import Task, TaskKind, require_micro_steps, step_tasks
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import COMPUTE, GATHER, HOST, Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Pending, Program, Section, State

ONE = Region(buffer="x", offset=0, numel=1)


def fill(stream: str = COMPUTE, event: str | None = None) -> Op:
    return ops.Fill(destination=ONE, value=0.0, stream=stream, event=event)


def gather(stream: str) -> Op:
    pair = ops.Pair(source=ONE, destination=ONE)
    return ops.AllGather(pairs=(pair,), comm="c", stream=stream)


def wait(event: str, on: str) -> Op:
    return ops.Wait(waited=event, on=on)


def tasks_of(
    *bodies: Sequence[Op],
    pending: tuple[Pending, ...] = (),
    is_issuing: bool = False,
    host_computes: bool = False,
) -> list[Task]:
    """The tasks of a step; the pending events cross its first boundary."""
    names = (LAST_MICRO_STEP, UPDATE)
    states = (State(), State(pending=pending), State())
    sections = tuple(
        Section(name=names[n], entry=states[n], body=tuple(body), exit=states[n + 1])
        for n, body in enumerate(bodies)
    )
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=1),)), sections=sections)
    return step_tasks(program, 1, is_issuing=is_issuing, host_computes=host_computes)


def after(tasks: Sequence[Task], number: int) -> set[int]:
    """All direct and indirect predecessors of a task."""
    earlier: set[int] = set()
    for before in tasks[number].after:
        earlier |= {before} | after(tasks, before)
    return earlier


def test_streams_run_in_order_and_waits_follow_their_signals() -> None:
    tasks = tasks_of(
        [fill(), fill(event="a"), fill(), fill(GATHER), wait("a", GATHER), fill(GATHER)]
    )
    assert after(tasks, 2) == {0, 1}
    assert after(tasks, 3) == set()
    assert after(tasks, 5) == {0, 1, 3, 4}


def test_collectives_of_a_communicator_come_one_after_the_other() -> None:
    tasks = tasks_of([gather(GATHER), gather(COMPUTE), fill(GATHER)])
    assert after(tasks, 1) == {0}
    assert after(tasks, 2) == {0}


def test_later_ops_follow_the_waits_of_the_host() -> None:
    tasks = tasks_of([fill(event="a"), fill(), wait("a", HOST), fill(GATHER), fill()])
    assert after(tasks, 3) == {0, 2}
    assert after(tasks, 4) == {0, 1, 2}


def test_an_event_without_a_signal_belongs_to_the_step_before() -> None:
    assert after(tasks_of([wait("a", COMPUTE), fill()]), 1) == {0}


def test_a_boundary_orders_all_streams_except_pending_events() -> None:
    body = [fill(), fill(GATHER), fill(GATHER, "a"), fill(GATHER)]
    update = [fill("reduce"), wait("a", "reduce"), fill("reduce"), fill(GATHER), wait("a", COMPUTE)]
    plain = tasks_of(body, [fill("reduce")])
    assert [task.kind for task in plain[4:]] == [TaskKind.BOUNDARY, TaskKind.RUN]
    assert after(plain, 5) == {0, 1, 2, 3, 4}
    crossing = tasks_of(body, update, pending=(Pending(event="a", stream=GATHER),))
    assert after(crossing, 5) == {0, 1, 4}  # the first of the update, on another stream
    assert after(crossing, 7) == {0, 1, 2, 4, 5, 6}  # once it has waited
    assert after(crossing, 8) == {0, 1, 2, 3, 4}  # on the stream of what is pending


def test_an_event_of_a_section_before_is_another_one() -> None:
    tasks = tasks_of([fill(event="a")], [fill(GATHER), wait("a", "reduce"), fill(COMPUTE, "a")])
    (boundary,) = (number for number, task in enumerate(tasks) if task.kind is TaskKind.BOUNDARY)
    assert tasks[boundary + 2].after == (boundary,)


def test_the_host_issues_in_order_and_a_device_lets_it_run_ahead() -> None:
    tasks = tasks_of([fill(), fill(GATHER)], is_issuing=True)
    assert [task.kind for task in tasks] == [
        TaskKind.ISSUE,
        TaskKind.RUN,
        TaskKind.ISSUE,
        TaskKind.RUN,
    ]
    assert after(tasks, 3) == {0, 2}


def test_a_host_that_computes_issues_nothing_meanwhile() -> None:
    for is_issuing in (False, True):
        tasks = tasks_of([fill(), fill(GATHER)], is_issuing=is_issuing, host_computes=True)
        assert after(tasks, len(tasks) - 1) == set(range(len(tasks) - 1))


def test_every_micro_step_has_its_own_tasks() -> None:
    sections = tuple(
        Section(name=name, body=(fill(), fill(GATHER)))
        for name in (MICRO_STEP, LAST_MICRO_STEP, UPDATE)
    )
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=1),)), sections=sections)
    tasks = step_tasks(program, 3, is_issuing=False, host_computes=False)
    assert [task.section for task in tasks if task.kind is TaskKind.RUN] == (
        [MICRO_STEP] * 4 + [LAST_MICRO_STEP] * 2 + [UPDATE] * 2
    )
    for number, task in enumerate(tasks):
        if task.kind is TaskKind.BOUNDARY:
            assert after(tasks, number) == set(range(number))


def test_micro_steps_are_those_that_the_program_has_a_section_for() -> None:
    assert require_micro_steps(mlp(blocks=1, micro_steps=3), None) == 3
    assert require_micro_steps(mlp(blocks=1, micro_steps=3), 7) == 7
    assert require_micro_steps(mlp(blocks=1), None) == 1
    with pytest.raises(UserError, match="compile it with --micro-steps 2"):
        require_micro_steps(mlp(blocks=1), 2)
    with pytest.raises(UserError, match="at least one"):
        require_micro_steps(mlp(blocks=1), 0)
