"""``zeroir run`` on real processes: training, another world size, and interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import GPT, Zeroir
from tests.support.resuming import GENERATOR, MODEL
from tests.support.zygote import Forked, compiling_zygote, run_forked
from zeroir.cli.app import run_command

pytestmark = [pytest.mark.dist, pytest.mark.slow]

REFERENCE = Path(__file__).parents[1] / "data" / "gpt_reference_curve.json"
DEADLINE = 120


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "zeroir", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One command line to its end, in processes that need not import torch."""
    return run_forked("zeroir", arguments, cwd, {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "gpt.zir"
    assert run_command(["compile", GPT, "--world-size", "2", "-o", str(path)]) == 0
    return path


def test_training_follows_the_reference_curve(program: Path, tmp_path: Path) -> None:
    """The example on two ranks against plain PyTorch on both ranks' batches, and better than byte frequencies."""
    reference = json.loads(REFERENCE.read_text())
    steps = 60
    arguments = ["--nproc", "2", "--steps", str(steps), "--log-every", "1", "--json"]
    arguments += ["--model", GPT]
    made = run("run", program, *arguments, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    losses = [json.loads(line)["loss"] for line in made.stdout.splitlines()]
    assert len(losses) == steps
    # The orders of additions differ, and training amplifies that slowly.
    assert losses == pytest.approx(reference["losses"][:steps], abs=5e-3)
    assert f"{losses[-1]:.4f}" == "2.6002"  # docs/measurements.md has it with one digit more
    assert sum(losses[-10:]) / 10 < reference["unigram_entropy"]


def test_accumulation_on_processes_equals_lockstep(zeroir: Zeroir, tmp_path: Path) -> None:
    """The number of micro-steps that a program is compiled with may be overridden, also where it is 1."""
    model = tmp_path / "model.py"
    model.write_text(MODEL + GENERATOR)
    checked = zeroir("check", model, "--micro-steps", "2", "--world-size", "3", "--json").json
    assert checked["is_equal"]
    expected = [pytest.approx(sum(ranks) / 3, rel=1e-6) for ranks in checked["losses"]]
    for compiled_for in ("1", "5"):
        path = tmp_path / f"{compiled_for}.zir"
        compiling = ["--micro-steps", compiled_for, "--world-size", "3"]
        assert zeroir("compile", model, *compiling, "-o", path).exit_code == 0
        arguments = ["--nproc", "3", "--steps", "3", "--log-every", "1", "--json"]
        arguments += ["--model", model.name, "--micro-steps", "2"]
        made = run("run", path.name, *arguments, cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        losses = [json.loads(line)["loss"] for line in made.stdout.splitlines()]
        assert losses == expected, f"compiled for {compiled_for}"


ANY_LENGTH = Path(__file__).parents[2] / "examples" / "any_length.py"


@pytest.mark.parametrize("stage", ["1", "3"])
def test_ranks_train_on_batches_of_their_own_shapes(
    zeroir: Zeroir, tmp_path: Path, stage: str
) -> None:
    options = ["--stage", stage, "--micro-steps", "3", "--world-size", "4"]
    options += [
        "--mean-over",
        "batches",
    ]  # so that the loss of a step is the mean of those of the ranks
    checked = zeroir("check", ANY_LENGTH, *options, "--steps", "3", "--json").json
    assert checked["is_equal"]
    expected = [pytest.approx(sum(ranks) / 4, rel=1e-6) for ranks in checked["losses"]]
    assert zeroir("compile", ANY_LENGTH, *options, "-o", tmp_path / "any.zir").exit_code == 0
    arguments = ["--nproc", "4", "--steps", "3", "--log-every", "1", "--json"]
    made = run("run", "any.zir", *arguments, "--model", ANY_LENGTH, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert [json.loads(line)["loss"] for line in made.stdout.splitlines()] == expected


def test_a_step_has_whole_groups_of_micro_batches(zeroir: Zeroir, tmp_path: Path) -> None:
    path = tmp_path / "groups.zir"
    order = ["--micro-steps", "4", "--order", "layer=2", "--world-size", "2"]
    assert zeroir("compile", GPT, *order, "-o", path).exit_code == 0
    steps = ["--steps", "1", "--micro-steps", "3", "--model", GPT]
    made = run("run", path, "--nproc", "2", *steps, cwd=tmp_path)
    assert made.returncode == 2
    assert made.stderr.count("Error") == 1
    assert "--micro-steps 3 is no multiple of 2" in made.stderr


def test_torchrun_with_another_world_size(program: Path, tmp_path: Path) -> None:
    torchrun = ["--standalone", "--nproc-per-node", "3", "-m", "zeroir"]
    arguments: list[str | Path] = ["run", program, "--steps", "2", "--model", str(GPT)]
    made = run_forked("torch.distributed.run", [*torchrun, *arguments], tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stderr.count("Compiled for 2 ranks, lowered again for 3.") == 1
    assert "loss" in made.stdout


def test_a_diverging_loss_stops_every_rank(zeroir: Zeroir, tmp_path: Path) -> None:
    path = tmp_path / "gpt.zir"
    options = ["--world-size", "2", "--optimizer", "sgd", "--lr", "1e30"]
    assert zeroir("compile", GPT, *options, "-o", path).exit_code == 0
    made = run("run", path, "--nproc", "2", "--steps", "20", "--model", GPT, cwd=tmp_path)
    assert made.returncode == 2
    assert "The loss is" in made.stderr
    assert "Traceback" not in made.stderr


def test_an_interrupt_ends_the_job(program: Path, tmp_path: Path) -> None:
    """Ctrl-C to all, in the middle of training: the job ends soon, with one sentence and no traceback."""
    job = subprocess.Popen(
        command(
            *("run", program, "--nproc", "2", "--steps", "100000", "--log-every", "1"),
            *("--model", GPT),
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        for _ in range(5):
            assert "loss" in job.stdout.readline()
        os.killpg(job.pid, signal.SIGINT)
        start = time.monotonic()
        _, stderr = job.communicate(timeout=DEADLINE)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert time.monotonic() - start < 30
    assert job.returncode == 130
    assert "Traceback" not in stderr
    assert "torch/distributed" not in stderr
    assert "Interrupted." in stderr


def test_sigterm_ends_a_run_that_saves_nothing_after_its_step(
    program: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    given = ("--model", GPT, "--steps", "100000", "--log-every", "1", "--log", log)
    arguments = ("run", program, *given, "--machine", "cpu-local")
    job = Forked(
        compiling_zygote(),
        "zeroir",
        tuple(map(str, arguments)),
        {"OMP_NUM_THREADS": "1"},
        tmp_path / "job",
        folder=tmp_path,
    )
    deadline = time.monotonic() + DEADLINE
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert job.poll() is None, job.output()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    exit_code = job.wait(deadline)
    job.kill()
    out, err = job.output()
    assert exit_code == 0, err
    reports = [json.loads(line) for line in log.read_text().splitlines()]
    last = reports[-1]["step"]
    assert [report["step"] for report in reports] == list(range(1, last + 1))
    assert f"Stopped by SIGTERM after {last} of 100000 steps." in err
    assert len(out.splitlines()) == len(reports)
    assert all(0 < r["mfu"] < 2 and r["memory_bytes"] > 1e8 for r in reports)
    assert all("MFU" in line and "GB" in line for line in out.splitlines())
