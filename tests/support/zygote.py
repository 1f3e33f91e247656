"""Processes that have imported torch and zeroir and wait to be forked, since the imports cost more than most jobs.

``python -m tests.support.zygote`` forks a rank for every line that asks for one. A rank is a process of its own with
its own environment, and runs its module as ``python -m`` would; at its end it joins threads, calls what was registered
for the end, and frees no module and no operator. Where ranks of a job come of more than one such process, they iterate
over sets in different orders, as where torchrun starts them.

A forked process that is to start ranks itself, ``zeroir run --nproc 2`` or torchrun, does all that torchrun's agent
does, but has its ranks forked of a process that it leaves behind for that before it does anything.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240


def import_path() -> str:
    """The PYTHONPATH of processes that import the tests."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


class Zygote:
    """One such process, as seen by who asks it."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    def ask(self, request: Mapping[str, object]) -> int | None:
        """One request and its answer."""
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer: int | None = json.loads(self._answers.readline())
        return answer


def started(*more: str, environment: Mapping[str, str] | None = None) -> Zygote:
    """A new process with more variables, which imports ``more`` modules than all of them do."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.support.zygote", *more],
        cwd=ROOT,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": import_path(),
            **(environment or {}),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # It ends when nobody can ask any more.
    atexit.register(process.__exit__, None, None, None)
    assert process.stdin is not None
    assert process.stdout is not None
    return Zygote(process.stdin, process.stdout)


@cache
def compiling_zygote() -> Zygote:
    """A process of which come ranks, commands that trace models, and agents that start ranks."""
    return started(*COMPILING)


@cache
def other_compiling_zygote() -> Zygote:
    """A process of which come other ranks, which see sets in another order."""
    return started(*COMPILING)


@cache
def second_zygote() -> Zygote:
    """A process of which come ranks that have not imported torch's compiler."""
    return started()


def run_forked(
    module: str,
    arguments: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    out: Path | None = None,
    is_merged: bool = False,
    source: Callable[[], Zygote] = compiling_zygote,
) -> subprocess.CompletedProcess[str]:
    """What comes of ``python -m`` with these arguments in a folder; of ``python``, if the module is a script.

    It prints to ``out``, if that is given. Where ``is_merged``, what it prints to stderr stands in its place in stdout.
    """
    given = tuple(map(str, arguments))
    with tempfile.TemporaryDirectory() as logs:
        forked = Forked(
            source(),
            module,
            given,
            environment or {},
            Path(logs) / "log",
            folder=folder,
            out=out,
            is_merged=is_merged,
        )
        code = forked.wait(time.monotonic() + DEADLINE_S)
        if code is None:
            forked.kill()
            raise subprocess.TimeoutExpired([module, *given], DEADLINE_S, *forked.output())
        return subprocess.CompletedProcess([module, *given], code, *forked.output())


class Forked:
    """A forked process, in the manner of ``Popen``; what it prints goes to files.

    ``machine`` is the network, the host name and the /etc/hosts of another machine than this (``namespaces.enter``).
    """

    def __init__(
        self,
        source: Zygote,
        module: str,
        args: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        *,
        folder: Path = ROOT,
        out: Path | None = None,
        is_merged: bool = False,
        machine: tuple[str, str, str] | None = None,
    ) -> None:
        self._zygote = source
        self._out, self._err = out or log.with_suffix(".out"), log.with_suffix(".err")
        self._err.touch()
        request = {
            "argv": [module, *args],
            "environment": {**os.environ, "PYTHONPATH": import_path(), **environment},
            "out": str(self._out),
            "err": None if is_merged else str(self._err),
            "folder": str(folder),
            "machine": machine,
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
        printed = self._out.read_text() if self._out.is_file() else ""
        return printed, self._err.read_text()

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
    # Imports leave no garbage, and a forked process that looked through all of them at its end would copy their memory.
    gc.disable()
    for name in (*EARLY, *sys.argv[1:]):
        importlib.import_module(name)
    if sys.argv[1:]:
        with contextlib.suppress(ImportError):  # It need not be there.
            importlib.import_module("transformers.models.llama.modeling_llama")
        _compile_once()
    _keep_operators()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # as in tests/conftest.py
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = _serve(sys.stdin, sys.stdout)
    if request is not None:
        try:
            _become(request)
        except SystemExit as end:
            if isinstance(end.code, str):
                raise  # The interpreter prints it.
            _end(end.code or 0)
        _end(0)


def _compile_once() -> None:
    """Compile and train a layer, so that no rank is the first for whom torch prepares to trace."""
    import torch
    from torch.export import Dim

    import zeroir

    state = torch.random.get_rng_state()
    for shapes in (None, (Dim("rows", max=8), 4)):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        compiled = zeroir.compile(
            net,
            torch.ones(2, 4),
            loss=lambda net, x: net(x).square().mean(),
            shapes=shapes,
            world_size=1,
        )
        engine = compiled.engine(self_check=False)
        engine.step(torch.ones(2, 4))
        engine.close(return_values=False)
    torch.random.set_rng_state(state)
    gc.collect()


def _keep_operators() -> None:
    """Let no process take back each operator that its libraries have registered when it ends, which takes 0.03 s."""
    for finalizer in vars(weakref.finalize)["_registry"]:
        _, function, *_ = finalizer.peek()
        if function.__module__ == "torch.library":
            finalizer.atexit = False


def _end(code: int) -> NoReturn:
    """All that an interpreter does at its end, but for freeing each module and object, which takes it 0.4 s."""
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(requests: IO[str], answers: IO[str]) -> dict[str, object] | None:
    """Answer requests to the last; in a forked process, return the one that asked for it."""
    for line in requests:
        request: dict[str, object] = json.loads(line)
        match request.get("poll"):
            case int(pid):
                ended, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
            case _:
                answer = os.fork()
                if answer == 0:
                    return request
        print(json.dumps(answer), file=answers, flush=True)
    return None


EARLY = (
    "pytest",
    "safetensors.torch",
    "tests.runtime.support",
    "tests.runtime.workers_cases",
    "tests.support.programs",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # torch imports it where an engine asks what operators make
    "zeroir.frontend",
    "zeroir.runtime.engine.engine",
    "zeroir.runtime.execution.lockstep",
    "zeroir.runtime.training.train",
)
"""What ranks import, without what looks at a rank's environment."""

COMPILING = (
    "torch.distributed.launcher.api",
    "zeroir.api.running.run",
    "zeroir.cli.app",
    "zeroir.convert.dcp_reader",
    "zeroir.frontend.lowering.tracing",
    "zeroir.passes.pipelines",
)
"""What command lines import besides, and the agents and readers of checkpoints among them."""


def _become(request: dict[str, object]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, path in ((1, request["out"]), (2, request["err"])):
        if path is None:
            os.dup2(1, number)
        else:
            os.dup2(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(str(request["folder"]))
    argv, machine = request["argv"], request["machine"]
    assert isinstance(argv, list)
    if isinstance(machine, list):
        from tests.support import namespaces

        namespaces.enter(*machine)
    if any(argument.startswith("--nproc") for argument in argv):
        _start_ranks_by_forking()
    _run(request)


def _run(request: dict[str, object]) -> None:
    """The module or script, in the environment that it is to have."""
    environment, argv = request["environment"], request["argv"]
    assert isinstance(environment, dict)
    assert isinstance(argv, list)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    if not argv[0].startswith(("zeroir", "tests")):
        warnings.simplefilter("default")  # A script of a user may warn, and so may a tool of torch.
    if argv[0].endswith(".py"):
        sys.path[0] = str(Path(argv[0]).parent.resolve())
        _GLOBALS.update(runpy.run_path(argv[0], run_name="__main__"))
    else:
        _GLOBALS.update(runpy.run_module(argv[0], run_name="__main__", alter_sys=True))


_GLOBALS: dict[str, object] = {}
"""What the module or script has named lives until its process ends, as in ``python -m``.

``tests.support.replicated`` says what may hang otherwise.
"""


# ------------------------------------------------------------------------------------------ in an agent of torchrun


def _start_ranks_by_forking() -> None:
    """Have torchrun's agent fork what it would start as ``python -m`` or as a script.

    The process that ranks are forked from is made here, before the agent has threads.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )

    source = _left_behind()
    start = SubprocessHandler._popen

    def forked(
        self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
    ) -> subprocess.Popen[bytes] | _Rank:
        interpreter, *rest = args
        match rest:
            case ["-m", *argv] | ["-u", "-m", *argv] | ["-u", *argv] if (
                interpreter == sys.executable
            ):
                return _Rank(source, argv, env, is_unbuffered=rest[0] == "-u")
            case _:
                found: subprocess.Popen[bytes] = start(self, args, env)
                return found

    setattr(SubprocessHandler, "_popen", forked)  # noqa: B010 - it returns what is as good as a Popen


def _left_behind() -> Zygote:
    """A process like this one, to fork ranks from; it ends with this one."""
    (requests, ask), (answers, answer) = os.pipe(), os.pipe()
    if os.fork():
        os.close(requests)
        os.close(answer)
        return Zygote(os.fdopen(ask, "w"), os.fdopen(answers))
    os.close(ask)
    os.close(answers)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(requests) as lines, os.fdopen(answer, "w") as told:
        request = _serve(lines, told)
    if request is None:
        os._exit(0)
    # As torchrun's agent has it, which ends a rank with whatever the rank has started.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["is_unbuffered"] and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    _run(request)
    sys.exit()


class _Rank:
    """A forked rank, with what torchrun's agent asks of a ``Popen``."""

    def __init__(
        self, source: Zygote, argv: list[str], environment: dict[str, str], *, is_unbuffered: bool
    ) -> None:
        self._zygote = source
        request = {"argv": argv, "environment": environment, "is_unbuffered": is_unbuffered}
        pid = source.ask(request)
        assert pid is not None, "no rank was forked"
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return code


if __name__ == "__main__":
    main()
