"""Processes that have imported torch and zeroir and wait to be forked, since the imports cost more than most jobs.

``python -m tests.support.zygote`` forks a rank for every line that asks for one. A rank is a process of its own with
its own environment, and runs its module as ``python -m`` would, to the end of the interpreter. Where ranks of a
job come of more than one such process, they iterate over sets in different orders, as where torchrun starts them.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def import_path() -> str:
    """The PYTHONPATH of processes that import the tests."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


class Zygote:
    """One such process, as seen by the tests; it imports ``more`` modules than all of them do."""

    def __init__(self, more: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.zygote", *more],
            cwd=ROOT,
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": import_path(),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def ask(self, request: Mapping[str, object]) -> int | None:
        """One request and its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def _end(self) -> None:
        """It ends when nobody can ask any more."""
        with self._process:
            pass


@cache
def zygote(_slot: int) -> Zygote:
    """The process of that number; each has a seed of its own for the order of sets."""
    return Zygote()


@cache
def compiling_zygote() -> Zygote:
    """A process of which commands come that trace models."""
    return Zygote(("zeroir.frontend.capture",))


def run_zeroir(
    arguments: list[str], folder: Path, environment: Mapping[str, str], log: Path
) -> tuple[int | None, str, str]:
    """The exit code of a command line, run in a folder, and what it prints to stdout and to stderr."""
    forked = Forked(compiling_zygote(), "zeroir", tuple(arguments), environment, log, folder=folder)
    code = forked.wait(time.monotonic() + 240)
    if code is None:
        forked.kill()
    return code, *forked.output()


class Forked:
    """A forked process, in the manner of ``Popen``; what it prints goes to files."""

    def __init__(
        self,
        source: Zygote,
        module: str,
        args: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        *,
        folder: Path = ROOT,
    ) -> None:
        self._zygote = source
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        request = {
            "argv": [module, *args],
            "environment": {**os.environ, "PYTHONPATH": import_path(), **environment},
            "out": str(self._out),
            "err": str(self._err),
            "folder": str(folder),
        }
        self.pid = self._zygote.ask(request)
        assert self.pid is not None, "no rank was forked"
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._zygote.ask({"poll": self.pid})
        return self.returncode

    def wait(self, deadline: float) -> int | None:
        """The same, once it has ended or ``time.monotonic()`` has come to the deadline."""
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.returncode

    def output(self) -> tuple[str, str]:
        """What it has printed to stdout and to stderr."""
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            assert self.pid is not None
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    """Answer requests; in a forked process, be the rank."""
    for name in (*EARLY, *sys.argv[1:]):
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                break
        print(json.dumps(answer), flush=True)
    else:
        return
    _become(request)


EARLY = (
    "pytest",
    "safetensors.torch",
    "tests.runtime.support",
    "tests.runtime.workers_cases",
    "tests.support.programs",
    "torch.distributed",
    "zeroir.frontend",
    "zeroir.runtime.engine",
    "zeroir.runtime.lockstep",
    "zeroir.runtime.train",
)
"""What ranks import, without what looks at a rank's environment."""


def _become(request: dict[str, object]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    environment, argv = request["environment"], request["argv"]
    assert isinstance(environment, dict)
    assert isinstance(argv, list)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    os.chdir(str(request["folder"]))
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
