"""SIGTERM as a request: a flag at first, the end of the process where the step does not end."""

from __future__ import annotations

import os
import signal
import threading
import time

from zeroir.runtime.training.stop_signal import StopSignal, stop_signal

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
