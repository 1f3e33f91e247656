"""The laws of speculative steps, each broken on purpose: what is guessed is committed, and goes nowhere before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import edit, put, the
from tests.support.lowering import codes
from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.buffers import whole
from zeroir.ir.contents import FlatContent, NamedContent
from zeroir.ir.mesh import OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, ScalarBinding, Section, State
from zeroir.ir.text import parse, print_program
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.rewrite import map_sections
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate
from zeroir.verify import verify

CASE = Case(
    stage=3,
    ranks=2,
    precision="fp16",
    clip=1.0,
    offload=(OffloadOptimizer(), OffloadGradients(), SpeculateUpdate()),
)


def change_speculation(change: Callable[[ops.SpeculativeStep], tuple[Op, ...]]) -> Program:
    place, op = the(CASE.scheduled, ops.SpeculativeStep)
    return put(CASE.scheduled, place, *change(op))


def change_commit(change: Callable[[ops.CommitStep], tuple[Op, ...]]) -> Program:
    place, op = the(CASE.scheduled, ops.CommitStep)
    return put(CASE.scheduled, place, *change(op))


def kept_after_the_step() -> Program:
    def too_late(op: ops.SpeculativeStep) -> tuple[Op, ...]:
        copy = ops.Cast(source=op.param, destination=op.kept[0], stream=OPTIMIZER)
        return op, copy

    return change_speculation(too_late)


def another_guess() -> Program:
    place, guess = the(CASE.scheduled, ops.Guess)
    return put(CASE.scheduled, place, replace(guess, divisor=guess.divisor * 2))


def another_scale() -> Program:
    place, guess = the(CASE.scheduled, ops.Guess)
    return put(CASE.scheduled, place, replace(guess, loss_scale=None))


def another_comparison() -> Program:
    place, decide = the(CASE.scheduled, ops.Decide)
    return put(CASE.scheduled, place, replace(decide, guess=decide.norm))


def committed_before_the_decision() -> Program:
    place, commit = the(CASE.scheduled, ops.CommitStep)
    (_, decided), _ = the(CASE.scheduled, ops.Decide)

    def early(body: list[Op]) -> None:
        del body[place[1]]
        body.insert(decided, commit)

    return edit(CASE.scheduled, place[0], early)


def other_settings() -> Program:
    """The guess takes hyper-parameters that are not those of the commit."""
    program = CASE.scheduled
    place, op = the(program, ops.SpeculativeStep)
    old = program.buffer_by_name[op.hyper.buffer]
    new = replace(old, name="other", holds=NamedContent(name="other"))
    values = next(s.values for s in program.scalars if s.buffer == old.name)
    program = replace(
        program,
        buffers=(*program.buffers, new),
        scalars=(*program.scalars, ScalarBinding(buffer=new.name, values=values)),
        groups=(),
    )
    return put(program, place, replace(op, hyper=whole(new)))


def said_to_be_final() -> Program:
    """The states at the boundary do not say that elements are guessed."""

    def final(state: State) -> State:
        holdings = (
            replace(h, content=replace(h.content, guessed=False))
            if isinstance(h.content, FlatContent)
            else h
            for h in state.holdings
        )
        return replace(state, holdings=tuple(holdings))

    def change(section: Section) -> Section:
        return replace(section, entry=final(section.entry), exit=final(section.exit))

    return map_sections(CASE.scheduled, change)


def up_before_the_commit() -> Program:
    """Guessed parameters go up to the device."""
    place, commit = the(CASE.scheduled, ops.CommitStep)
    (_, copied), copy = the(
        CASE.scheduled, ops.ToDevice, is_wanted=lambda op: op.source == commit.rounded
    )

    def swapped(body: list[Op]) -> None:
        del body[copied]
        body.insert(place[1], copy)

    return edit(CASE.scheduled, place[0], swapped)


def rounded_elsewhere() -> Program:
    """The commit follows another flat's rounded parameters."""
    place, op = the(CASE.scheduled, ops.CommitStep)
    _, like = the(CASE.scheduled, ops.CommitStep, nth=-1)
    return put(CASE.scheduled, place, replace(op, rounded=like.rounded))


BROKEN: dict[str, tuple[Callable[[], Program], str, str]] = {
    "kept after the step": (kept_after_the_step, "Z403", "after a speculative step"),
    "never committed": (lambda: change_commit(lambda _: ()), "Z403", "should hold the updated"),
    "committed twice": (lambda: change_commit(lambda op: (op, op)), "Z405", "after 1 updates"),
    "kept elsewhere": (
        lambda: change_commit(lambda op: (replace(op, kept=op.kept[::-1]),)),
        "Z403",
        "as its old master",
    ),
    "redone where it is skipped alone": (
        lambda: change_commit(lambda op: (replace(op, redo=op.skip or op.step),)),
        "Z405",
        "whether this step's guess was right",
    ),
    "redone even where it is skipped": (
        lambda: change_commit(lambda op: (replace(op, skip=None),)),
        "Z405",
        "ignores the decision to skip",
    ),
    "the gradient is gone": (
        lambda: change_commit(
            lambda op: (ops.Fill(destination=op.grad, value=0.0, stream=OPTIMIZER), op)
        ),
        "Z402",
        "its contributions are lost",
    ),
    "other settings": (other_settings, "Z405", "after a speculative step"),
    "scalars that are no guess": (
        lambda: change_speculation(
            lambda op: (replace(op, step=op.gradient_divisor, gradient_divisor=op.step),)
        ),
        "Z405",
        "which are not a divisor and a step count of one guess",
    ),
    "another guess": (another_guess, "Z402", "guess divides"),
    "a guess without the loss scale": (another_scale, "Z405", "guess ignores the loss scale"),
    "another comparison": (another_comparison, "Z405", "which is no guess"),
    "said to be final": (said_to_be_final, "Z403", "after a speculative step"),
    "up before the commit": (up_before_the_commit, "Z403", "a speculative step"),
    "rounded elsewhere": (rounded_elsewhere, "Z403", "as its rounded param"),
    "not rounded again": (
        lambda: change_commit(lambda op: (replace(op, rounded=None),)),
        "Z403",
        "a speculative step",
    ),
}


def test_the_program_is_proved_and_printed() -> None:
    assert verify(CASE.scheduled, CASE.logical).is_valid
    assert parse(print_program(CASE.scheduled)) == CASE.scheduled


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_speculation_is_rejected(name: str) -> None:
    make, code, words = BROKEN[name]
    # So that a change of the order of ops is a change of values alone.
    report = verify(derive_waits(without_waits(make())))
    assert any(f.code.startswith(code) and words in f.sentence for f in report.findings), (
        report.render()
    )


def test_the_decision_comes_before_the_commit() -> None:
    assert "Z101" in codes(committed_before_the_decision())
