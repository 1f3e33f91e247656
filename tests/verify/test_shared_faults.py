"""Faults in what passes and the verifier share are noticed by a third: the virtual ranks, which share neither.

Passes derive waits from the effects of ops, and the verifier proves from the same effects that they suffice. A use that
is forgotten takes a wait away and lets the proof pass, so only a run can notice. Here each use of each kind of op is
forgotten in turn. Where this takes waits from a schedule, a run with late streams must fail, or compute other numbers.
"""

from __future__ import annotations

import pytest

from tests.support.subjects import subject
from zeroir.errors import ZeroirError
from zeroir.ir import ops
from zeroir.ir.analysis import effects as effects_module
from zeroir.ir.analysis.effects import Effects
from zeroir.ir.program import Program
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.verify import verify

SUBJECTS = (
    "stage 0",
    "stage 2, tied",
    "stage 3, weighted, overlapped",
    "stage 3, updated on the host",
    "stage 1, speculative",
    "stage 3, activations on the host",
    "stage 3, paged",
    "stage 3, unit by unit",
    "hybrid",
)
USES = ("reads", "writes", "accumulates")
SEEDS = range(2)


def without_use(effect: Effects, use: str) -> Effects:
    """The effects without the reads, the writes or the accumulations."""
    match use:
        case "reads":
            return effect._replace(reads=())
        case "writes":
            return effect._replace(writes=())
        case _:
            return effect._replace(accumulates=())


def is_noticed(name: str, program: Program) -> bool:
    made = subject(name)
    streams = [stream.name for stream in program.streams]
    for seed in SEEDS:
        for late in ((), *((stream,) for stream in streams)):
            try:
                if made.difference(program, seed, late_streams=late) is not None:
                    return True
            except (ZeroirError, RuntimeError):
                return True
    return False


def is_proved(program: Program) -> bool:
    """Whether the verifier, with what it then believes of effects, accepts the program."""
    try:
        return verify(program).is_valid
    except ValueError:  # an op that changes nothing
        return False


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ops.OP_CLASSES, ids=lambda kind: kind.__name__)
def test_a_use_that_effects_forget_is_noticed(
    kind: type[ops.Op], use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_effects = effects_module._EFFECTS[kind]
    lost: list[str] = []
    for name in SUBJECTS:
        original = subject(name).scheduled
        if not any(
            isinstance(op, kind) and getattr(true_effects(op), use) for op in original.ops()
        ):
            continue
        with monkeypatch.context() as patch:
            patch.setitem(
                effects_module._EFFECTS, kind, lambda op: without_use(true_effects(op), use)
            )
            faulty = derive_waits(without_waits(original))
            if faulty == original or not is_proved(faulty):
                continue
        if is_proved(faulty):
            continue  # other waits keep the order
        lost.append(name)
        if is_noticed(name, faulty):
            return
    assert not lost, f"nothing notices the waits that are lost in {', '.join(lost)}"
