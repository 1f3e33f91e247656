"""Ranks and machines that are killed or asked to end: torchrun starts the job again, and it goes on by itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.cli.conftest import Zeroir
from tests.support.resuming import MODEL, SCHEDULE, contents, losses, saved_paths
from tests.support.zygote import Forked, compiling_zygote, run_forked
from zeroir.cli.app import run_command

pytestmark = [pytest.mark.dist, pytest.mark.slow]

DEADLINE_S = 120
STEPS = 12


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its samples take a while, so that a step is long enough to be killed in the middle of it."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "model.py").write_text(MODEL.replace("DELAY_S = 0.0", "DELAY_S = 0.01"))
    options = ["--world-size", "2", "--lr", "0.05", "--schedule", SCHEDULE]
    path = folder / "model.zir"
    assert run_command(["compile", str(folder / "model.py"), *options, "-o", str(path)]) == 0
    return path


@contextmanager
def started(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose stdout is read line by line, and whose stderr is a file in the folder; it ends with the block."""
    with (folder / f"err.{time.monotonic_ns()}").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def forked(module: str, arguments: list[str], folder: Path) -> Iterator[tuple[Forked, IO[str]]]:
    """The same of forked processes, and its stdout; the agent's ranks are those of `forked_ranks`."""
    pipe = folder / "out"
    os.mkfifo(pipe)
    job = Forked(
        compiling_zygote(),
        module,
        tuple(arguments),
        {"OMP_NUM_THREADS": "1"},
        folder / "err.of_job",
        folder=folder,
        out=pipe,
    )
    try:
        with pipe.open() as out:
            yield job, out
    finally:
        job.kill()


def forked_ranks(agent: int | None) -> list[int]:
    """The processes of an agent's ranks, which another process has forked for it, in their order."""

    def children(process: int | str | None) -> list[str]:
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()

    return sorted(int(rank) for source in children(agent) for rank in children(source))


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("err.*")))


def running(program: Path, steps: int = STEPS) -> list[str]:
    given = ["run", str(program), "--model", str(program.with_suffix(".py")), "--json"]
    saving = ["--save", "saved", "--save-every", "2"]
    return ["-m", "zeroir", *given, *saving, "--steps", str(steps), "--log-every", "1"]


def torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options]


def await_report(out: IO[str] | None, key: str, step: int) -> str:
    """Read lines of JSON until one has this key for this step; the lines that were read."""
    assert out is not None
    lines = ""
    for line in out:
        lines += line
        if line.startswith("{"):
            report = json.loads(line)
            if key in report and report["step"] >= step:
                return lines
    raise AssertionError(f"the job ended before it reported {key} of step {step}")


def ranks_of(agent: int) -> dict[int, int]:
    """The process of each rank whose agent this is."""
    processes: dict[int, int] = {}
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        environment: list[bytes] = []
        with contextlib.suppress(OSError):  # it has ended
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        for variable in environment:
            if variable.startswith(b"RANK="):
                processes[int(variable[5:])] = int(child)
    return processes


def test_a_killed_rank_is_started_again(program: Path, tmp_path: Path) -> None:
    """The end is that of a run which nobody disturbed, bit for bit."""
    _, module, *options = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with forked(module, [*options, *running(program)], tmp_path) as (agent, out):
        begun = await_report(out, "loss", 5)
        os.kill(forked_ranks(agent.pid)[1], signal.SIGKILL)
        rest = out.read()
        assert agent.wait(time.monotonic() + DEADLINE_S) == 0, said(tmp_path)
    assert re.search(r"Resumed from saved/step-0000000[2468], saved by 2 ranks", said(tmp_path))
    (tmp_path / "whole").mkdir()
    module, *arguments = running(program)[1:]
    whole = run_forked(module, [*arguments, "--nproc", "2"], tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert losses(begun).items() <= losses(whole.stdout).items()
    assert losses(rest).items() <= losses(whole.stdout).items()
    name = f"step-{STEPS:08}"
    assert contents(tmp_path / "saved" / name) == contents(tmp_path / "whole/saved" / name)


def test_it_goes_on_with_fewer_ranks(zeroir: Zeroir, program: Path, tmp_path: Path) -> None:
    """One of two machines is lost; the other goes on alone, as a run of one rank from that checkpoint would."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    options = torchrun(
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "job"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
        *("--rdzv-conf", "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"),
    )
    job = [*options, *running(program, 40)]
    with started([*job, "--seed", "3"], tmp_path) as first:
        # The first agent keeps the store. With both there, the job begins with two ranks at once.
        await_server(port)
        with started([*job, "--seed", "3"], tmp_path) as second:
            agents = {"first": first, "second": second}
            ranks = await_ranks(agents)
            begun = await_report(agents[ranks[0]].stdout, "saved", 4)
            os.killpg(second.pid, signal.SIGKILL)
        rest, _ = first.communicate(timeout=DEADLINE_S)
        assert first.returncode == 0, said(tmp_path)
    resumed = re.findall(r"Resumed from (\S+), saved by 2 ranks after (\d+) of 40", said(tmp_path))
    assert len(resumed) == 1, said(tmp_path)
    assert "Compiled for 2 ranks, lowered again for 1." in said(tmp_path)
    ((path, step),) = resumed
    model = program.with_suffix(".py")
    answer = zeroir(
        *("run", program, "--model", model, "--json", "--steps", "40", "--log-every", "1"),
        *("--save", tmp_path / "alone", "--resume", tmp_path / path, "--seed", "3"),
    )
    assert answer.exit_code == 0, answer.err
    assert list(losses(answer.out)) == list(range(int(step) + 1, 41))
    assert losses(rest).items() >= losses(answer.out).items() or ranks[0] == "second"
    assert losses(begun)
    name = "step-00000040"
    assert contents(tmp_path / "saved" / name) == contents(tmp_path / "alone" / name)


def await_server(port: int) -> None:
    """Return when a process listens at the port."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at {port}")


def await_ranks(agents: dict[str, subprocess.Popen[str]]) -> dict[int, str]:
    """The agent of each of the two ranks, once both run in one job."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = {rank: name for name, agent in agents.items() for rank in ranks_of(agent.pid)}
        if found.keys() == {0, 1}:
            return found
        time.sleep(0.05)
    raise AssertionError("the job has not begun with two ranks")


@pytest.mark.parametrize("receiver", ["rank", "agent", "alone"])
def test_sigterm_saves_the_step(program: Path, tmp_path: Path, receiver: str) -> None:
    """All ranks end with 0 after the same step; an agent that was itself told to end says so in its exit code."""
    _, module, *arguments = running(program, 100_000)
    arguments += [] if receiver == "alone" else ["--nproc", "2"]
    with forked(module, arguments, tmp_path) as (job, out):
        begun = await_report(out, "loss", 3)
        assert job.pid is not None
        os.kill(forked_ranks(job.pid)[1] if receiver == "rank" else job.pid, signal.SIGTERM)
        rest = out.read()
        code = job.wait(time.monotonic() + DEADLINE_S)
        assert code == (128 + signal.SIGTERM if receiver == "agent" else 0)
    last = max(losses(begun + rest))
    assert f"Stopped by SIGTERM after {last} of 100000 steps." in said(tmp_path)
    assert saved_paths(tmp_path / "saved")[-1] == f"step-{last:08}"
    assert "Error" not in said(tmp_path)
    shutil.rmtree(tmp_path / "saved")
