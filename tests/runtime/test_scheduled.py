"""The state of a scheduler: a schedule goes on where it was, from the learning rates that it began with."""

from __future__ import annotations

import pytest

from zeroir.errors import UserError
from zeroir.runtime.training.lr_schedule import Scheduler

COSINE = "cosine{warmup=2}"


def groups(*lrs: float) -> list[dict[str, object]]:
    return [{"lr": lr, "betas": (0.9, 0.99)} for lr in lrs]


def test_it_goes_on_after_a_skipped_step() -> None:
    whole = Scheduler(COSINE, groups(0.1, 0.02), 9)
    lrs = []
    states = []
    for step in range(8):
        lrs.append(whole.lr)
        states.append(whole.state_dict())
        whole.step(is_skipped=step in (1, 4))
    # The program has other learning rates now; the checkpoint counts, as for torch's schedulers.
    later = Scheduler(COSINE, groups(0.5, 0.5), 9)
    later.load_state_dict(states[5])
    assert [later.lr, later.state_dict()] == [lrs[5], states[5]]
    for step in range(5, 8):
        assert later.lr == lrs[step]
        later.step()


@pytest.mark.slow
def test_settings_are_those_of_the_step_at_once() -> None:
    target = groups(0.1)
    later = Scheduler(COSINE, target, 9)
    later.go_to(5)
    expected = Scheduler(COSINE, groups(0.1), 9)
    for _ in range(5):
        expected.step()
    assert target[0]["lr"] == expected.lr
    assert later.lr == expected.lr


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"updates_done": 3, "lrs": [0.1]}, "is of 1 groups, but the optimizer has 2"),
        ({"last_epoch": 3}, "is not one that was saved"),
        ({"updates_done": 3, "lrs": [0.1, "abc"]}, "is not one that was saved"),
        ({"updates_done": 3, "lrs": [0.1, -1.0]}, "is not one that was saved"),
        ({"updates_done": -3, "lrs": [0.1, 0.1]}, "is not one that was saved"),
    ],
)
def test_another_state_is_refused(state: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Scheduler(COSINE, groups(0.1, 0.2), 9).load_state_dict(state)
