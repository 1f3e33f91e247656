"""Processes that judge samples with bounded memory and time, and are replaced when they die or grow old."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from queue import SimpleQueue
from types import FrameType
from typing import Self

from tools.conformance.judge import SampleOutcome, judge
from tools.conformance.samples import chosen

MEMORY_BYTES = 12 << 30
"""Addresses that a process may map; torch itself takes some five GiB of them."""
SAMPLE_SECONDS = 60
LIFE = 400
"""Samples after which a process is replaced, because torch's caches grow with each."""

Judged = tuple[SampleOutcome, str]


class Judges:
    """A pool of processes, one for each thread that asks at the same time."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[_Judge] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while not self._idle.empty():
            self._idle.get().close()

    def judged(self, name: str, samples: int) -> list[Judged]:
        """The verdicts on the samples of one subject, including those that killed their process."""
        verdicts: list[Judged] = []
        judge = self._idle.get() if not self._idle.empty() else _Judge()
        while True:
            is_done = judge.ask(name, samples, verdicts)
            if is_done and judge.answers < LIFE:
                self._idle.put(judge)
                return verdicts
            code = judge.close()
            if is_done:
                return verdicts
            verdicts.append((SampleOutcome.CRASHED, f"the process ended with {code}"))
            judge = _Judge()


class _Judge:
    """One process; ``answers`` are those that it has given."""

    def __init__(self) -> None:
        self.answers = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.conformance.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, name: str, samples: int, judged: list[Judged]) -> bool:
        """Add the verdicts on the remaining samples of a subject; False where the process died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps([name, samples, len(judged)]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return False
        for line in self._process.stdout:
            if line == "done\n":
                return True
            outcome, why = json.loads(line)
            judged.append((SampleOutcome(outcome), why))
            self.answers += 1
        return False

    def close(self) -> int:
        """End the process; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()


def _late(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"more than {SAMPLE_SECONDS} seconds")


def _answer() -> None:
    """Judge what standard input asks for, line by line."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _late)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever torch prints is no answer.
    for line in sys.stdin:
        name, samples, done = json.loads(line)
        for sample in chosen(name, samples)[done:]:
            signal.alarm(SAMPLE_SECONDS)
            try:
                verdict = judge(sample)
                outcome, why = verdict.outcome, verdict.why
            except Exception as error:  # noqa: BLE001 - too late, or out of memory
                outcome, why = SampleOutcome.CRASHED, f"{type(error).__name__}: {error}"
            signal.alarm(0)
            print(json.dumps([outcome, why]), file=answers, flush=True)
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    _answer()
