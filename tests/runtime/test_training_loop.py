"""Reports of training reach the terminal, the file of JSON lines and TensorBoard, from rank 0 alone."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from zeroir.checkpoint.state_tree import decode, encode
from zeroir.errors import UserError
from zeroir.runtime.checkpoint.torch_trees import TorchTensors
from zeroir.runtime.training.checkpoint_schedule import SaveReport
from zeroir.runtime.training.evaluations import EvaluationReport
from zeroir.runtime.training.lr_schedule import Scheduler
from zeroir.runtime.training.progress import reporter
from zeroir.runtime.training.random_states import (
    RandomStates,
    random_states,
    seed_generators,
    set_random_states,
)
from zeroir.runtime.training.stop_signal import StopSignal, stop_signal
from zeroir.runtime.training.train import AnyReport, StepReport

STEP = StepReport(
    step=20,
    loss=2.5,
    lr=3e-4,
    loss_scale=65536.0,
    is_skipped=False,
    grad_norm=1.25,
    seconds=0.5,
    remaining_s=40.0,
    per_second=2048.0,
    unit="tokens",
    mfu=0.4123,
    memory_bytes=3_200_000_000,
)
REPORTS: list[AnyReport] = [
    STEP,
    EvaluationReport(step=20, loss=2.75, batches=3, seconds=0.1),
    SaveReport(step=20, path="saved/step-20"),
]


def reported(
    *, rank: int = 0, as_json: bool = False, log: Path | None = None, folder: Path | None = None
) -> str:
    out, err = io.StringIO(), io.StringIO()
    with reporter(
        rank, 100, steps_done=10, as_json=as_json, out=out, err=err, log=log, tensorboard=folder
    ) as report:
        for each in REPORTS:
            report(each)
    assert not err.getvalue()
    return out.getvalue()


def test_a_line_has_everything_that_a_step_has() -> None:
    first, second, third = reported().splitlines()
    assert first == (
        "step    20  loss 2.5000  lr 3.000e-04  scale 65536  norm 1.25  500 ms  2,048 tokens/s  MFU 41.2%  3.20 GB"
    )
    assert second.startswith("step    20  eval loss 2.7500")
    assert third == "step    20  saved saved/step-20"


def test_the_log_has_what_json_prints_and_goes_on_after_earlier_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    printed = reported(as_json=True, log=log)
    assert log.read_text() == printed
    reported(log=log)
    assert log.read_text() == printed * 2
    step = json.loads(printed.splitlines()[0])
    assert step["remaining_seconds"] == 40
    assert (step["mfu"], step["loss_scale"], step["memory_bytes"]) == (0.4123, 65536, 3.2e9)
    assert reported(rank=1, log=log) == ""
    assert log.read_text() == printed * 2


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_numbers_of_each_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reported(folder=tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert {name: event.value for name, (event,) in scalars.items()}["loss"] == STEP.loss
    assert {event.step for (event,) in scalars.values()} == {20}
    assert {"lr", "grad_norm", "mfu", "tokens_per_second", "eval_loss"} <= scalars.keys()


# ---- The state of a scheduler: a schedule goes on where it was, from the learning rates that it began with


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


# ---- The states of global generators, there and back through the JSON of a checkpoint


def draws() -> list[float]:
    """Numbers of all generators; a normal draw leaves a second number behind in Python's and numpy's."""
    return [random.gauss(), np.random.randn(), *torch.randn(3).tolist(), random.random()]


def through_a_checkpoint(states: RandomStates) -> RandomStates:
    codec = TorchTensors()
    tree, arrays = encode(states, codec=codec)
    decoded = decode(tree, lambda name: arrays[name].data, codec=codec)
    assert isinstance(decoded, dict)
    return decoded


def test_generators_go_on() -> None:
    seed_generators(7)
    draws()
    states = through_a_checkpoint(random_states())
    expected = [draws() for _ in range(3)]
    seed_generators(8)
    set_random_states(states)
    assert [draws() for _ in range(3)] == expected


def test_seeds_decide_all_numbers() -> None:
    seed_generators(2**63 - 1)
    first = draws()
    seed_generators(2**62)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    seed_generators(2**63 - 1)
    assert draws() == first


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_state_that_lacks_or_changes_a_generator(name: str) -> None:
    states = dict(random_states())
    others: tuple[object, ...] = (
        ("MT1", np.zeros(3, np.uint32), 0),
        (),
        [],
        None,
        "MT19937",
        {},
        2**70,
    )
    for other in others:
        states[name] = other
        with pytest.raises(UserError, match="saved by another version"):
            set_random_states(states)
    del states[name]
    with pytest.raises(UserError, match="saved by another version"):
        set_random_states(states)


# ---- SIGTERM as a request: a flag at first, the end of the process where the step does not end


PATIENCE_S = 30.0


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def send(stop: StopSignal) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while not stop.is_sent and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stop.is_sent


def test_the_first_one_is_a_request() -> None:
    overdue = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with stop_signal(overdue.set) as stop:
        assert not stop.is_sent
        send(stop)
        stop.acknowledge()
        # Nobody ends it any more, in the middle of its save.
        os.kill(os.getpid(), signal.SIGTERM)
    assert not overdue.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_it_is_passed_on_at_once() -> None:
    passed_on = threading.Event()
    with stop_signal(lambda: None, passed_on.set) as stop:
        send(stop)
        wait_for(passed_on)
        stop.acknowledge()


def test_a_second_one_does_not_wait() -> None:
    overdue = threading.Event()
    with stop_signal(overdue.set) as stop:
        send(stop)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(overdue)


def test_a_step_that_does_not_end() -> None:
    overdue = threading.Event()
    stop = StopSignal(overdue.set, patience_s=0.05)
    try:
        send(stop)
        wait_for(overdue)
    finally:
        stop.close()


def test_it_is_noticed_while_the_interpreter_is_blocked() -> None:
    """Python's handlers run between two operations of the main thread, which may wait in a collective for minutes."""
    overdue = threading.Event()
    with stop_signal(overdue.set) as stop:
        blocker = threading.Lock()
        blocker.acquire()
        seen: list[bool] = []

        def kill() -> None:
            # Not to the main thread, whose wait it would interrupt.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while not stop.is_sent and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(stop.is_sent)
            blocker.release()

        thread = threading.Thread(target=kill)
        thread.start()
        blocker.acquire()
        thread.join()
        assert seen == [True]
        stop.acknowledge()
    assert not overdue.is_set()
