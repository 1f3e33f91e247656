"""``zeroir run`` when one rank fails: it ends soon, with one sentence on the cause and the right exit code."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir
from tests.cli.test_run import DEADLINE, command, environment
from tests.support.zygote import Forked, compiling_zygote, run_forked
from zeroir.cli.app import run_command

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODEL = """
import os
import time

import torch
from torch import nn


def model():
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return (x**2).mean()


def batch():
    return (torch.ones(4, 8),)


def batches(rank, world_size, seed, start_step=0):
    with open(f"rank{rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    step = 0
    while True:
        step += 1
        is_now = os.environ["ON"] in (str(rank), "all") and step == 3
        match os.environ["WHAT"] if is_now else "":
            case "raise":
                raise ValueError("the data file\\nis damaged")
            case "exit":
                raise SystemExit(5)
            case "leave":
                os._exit(7)
            case "finish":
                os._exit(0)
            case "end":
                return
            case "shape":
                yield (torch.ones(3, 8),)
            case "nan":
                yield (torch.full((4, 8), float("nan")),)
            case "interrupt":
                raise KeyboardInterrupt
        time.sleep(0.02)
        yield (torch.ones(4, 8),)
"""


@dataclass(frozen=True)
class Job:
    exit_code: int
    out: str
    sentences: list[str]
    """The lines on stderr."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file and two programs of it."""
    path = tmp_path_factory.mktemp("failures")
    (path / "model.py").write_text(MODEL)
    for stage in ("2", "3"):
        options = ["--stage", stage, "--world-size", "2", "-o", str(path / f"stage{stage}.zir")]
        assert run_command(["compile", str(path / "model.py"), *options]) == 0
    return path


WELL = {"WHAT": "", "ON": "0"}
RUN = ("run", "stage3.zir", "--steps", "100000", "--log-every", "1", "--nproc")


def start(folder: Path, launcher: list[str]) -> subprocess.Popen[str]:
    """A job of two ranks, started as a user does."""
    return subprocess.Popen(
        launcher,
        cwd=folder,
        env={**environment(), **WELL},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> Job:
    try:
        out, err = job.communicate(timeout=DEADLINE)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return ended(job.returncode, out, err)


def ended(exit_code: int, out: str, err: str) -> Job:
    assert "Traceback" not in err, err
    sentences = [line for line in err.splitlines() if not line.startswith("Compiled for")]
    return Job(exit_code, out, sentences)


SENTENCES = {
    "raise": "batches() failed at step 3 (model.py:{line}): ValueError: the data file is damaged",
    "exit": "batches() failed at step 3 (model.py:{line}): SystemExit: 5",
    "end": "batches() ended before step 3: yield for ever, return a DataLoader",
    "shape": "The batch's '0' is float32[3, 8], but the program was compiled for float32[4, 8]",
    "nan": "The loss is nan at step 3, because the batch's '0' has values that are not finite: look at",
    "interrupt": "",
}


@pytest.mark.parametrize(
    ("what", "nproc", "on"),
    [
        *((what, 3 if what in ("raise", "nan") else 2, 1) for what in SENTENCES),
        *(("raise", 2, 0), ("interrupt", 2, 0)),
    ],
)
def test_one_rank_fails(folder: Path, what: str, nproc: int, on: int) -> None:
    made = run_forked("zeroir", [*RUN, str(nproc)], folder, {"WHAT": what, "ON": str(on)})
    job = ended(made.returncode, made.stdout, made.stderr)
    assert job.exit_code == (130 if what == "interrupt" else 2), job.sentences
    lines = MODEL.splitlines()
    raised = next((i for i, text in enumerate(lines) if f'case "{what}"' in text), 0) + 1
    wanted = f"Error on rank {on}: {SENTENCES[what].format(line=raised + 1)}"
    if what == "interrupt":
        wanted = "Interrupted." if on == 0 else f"Rank {on} was interrupted."
    assert job.sentences[0].startswith(wanted)
    # The others may say that they lost it, where they are quicker than the agent that ends them.
    assert len(job.sentences) <= nproc
    assert all(
        "another rank" in line or f"Rank {on} has ended before the others" in line
        for line in job.sentences[1:]
    )


def begun(folder: Path, logs: Path, out: Path | None = None) -> Forked:
    """A job of two ranks of forked processes."""
    arguments = (*RUN, "2")
    return Forked(
        compiling_zygote(), "zeroir", arguments, WELL, logs / "log", folder=folder, out=out
    )


def test_what_happens_to_all_ranks_is_said_once(folder: Path) -> None:
    made = run_forked("zeroir", [*RUN, "3"], folder, {"WHAT": "shape", "ON": "all"})
    job = ended(made.returncode, made.stdout, made.stderr)
    assert job.exit_code == 2
    (sentence,) = job.sentences
    assert re.match(r"Error on rank [012]: The batch's '0' is float32\[3, 8\], but", sentence)
    source = (folder / "model.py").read_text()
    (folder / "other.py").write_text(
        source.replace("def model", "raise ValueError('no')\ndef model")
    )
    other = ["--model", "other.py", "--allow-model-change"]
    made = run_forked("zeroir", [*RUN, "2", *other], folder, WELL)
    job = ended(made.returncode, made.stdout, made.stderr)
    assert job.exit_code == 2
    (sentence,) = job.sentences
    assert re.match(r"Error on rank [01]: other\.py cannot be imported at other\.py:", sentence)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(folder: Path, tmp_path: Path, rank: int) -> None:
    job = begun(folder, tmp_path)
    deadline = time.monotonic() + DEADLINE
    while "loss" not in job.output()[0]:
        assert job.poll() is None, job.output()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(int((folder / f"rank{rank}.pid").read_text()), signal.SIGKILL)
    exit_code = job.wait(time.monotonic() + 60)
    job.kill()
    assert exit_code == 128 + signal.SIGKILL
    sentences = ended(exit_code, *job.output()).sentences
    assert not any("torch/distributed" in line for line in sentences)
    assert sentences[-1] == f"Error: Rank {rank} was killed by SIGKILL."
    assert len(sentences) <= 2


def is_running(pid: int) -> bool:
    """Whether the process is there and no corpse that waits for its parent."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def ranks_below(parent: int) -> list[int]:
    """The process ids of the ranks that a process, or a process of its own, has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    processes = []
    for child in map(int, children):
        is_rank = b"zeroir" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        processes += [child] if is_rank else ranks_below(child)
    return processes


BEHIND_A_SHELL = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--no-python", "sh", "-c", f"{shlex.join(command(*RUN[:-1]))}; exit $?"),
]


@pytest.mark.parametrize(
    "launcher", [command(*RUN, "2"), BEHIND_A_SHELL], ids=["zeroir", "torchrun"]
)
def test_no_rank_outlives_a_launcher_that_is_killed(folder: Path, launcher: list[str]) -> None:
    """The kernel ends a launcher's ranks; those behind a shell miss the store that torchrun kept."""
    job = start(folder, launcher)
    assert job.stdout is not None
    assert "loss" in job.stdout.readline()
    ranks = ranks_below(job.pid)
    assert len(ranks) == 2
    os.kill(job.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [rank for rank in ranks if is_running(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left
    sentences = finish(job).sentences
    assert all(line.startswith("Error: The job's store is gone: ") for line in sentences), sentences


def test_a_rank_that_leaves_without_a_word_is_named(folder: Path) -> None:
    made = run_forked("zeroir", [*RUN, "2"], folder, {"WHAT": "leave", "ON": "1"})
    assert made.returncode == 7
    assert made.stderr.endswith("Error: Rank 1 ended with the exit code 7, without a reason.\n")


def test_a_rank_that_ends_well_before_the_others_is_named(folder: Path) -> None:
    """Its agent takes that for the end of its work."""
    made = run_forked("zeroir", [*RUN, "2"], folder, {"WHAT": "finish", "ON": "1"})
    job = ended(made.returncode, made.stdout, made.stderr)
    assert job.exit_code == 2
    (sentence,) = job.sentences
    assert "Rank 1 has ended before the others, which wait for it: look at what" in sentence


@pytest.mark.parametrize("what", ["", "raise"])
def test_a_job_leaves_nothing_in_the_folder_for_temporary_files(
    folder: Path, tmp_path: Path, what: str
) -> None:
    few = ["run", "stage3.zir", "--steps", "4", "--nproc", "2"]
    made = run_forked("zeroir", few, folder, {"WHAT": what, "ON": "1", "TMPDIR": str(tmp_path)})
    assert made.returncode == (2 if what else 0), made.stderr
    # What torch compiles stays for later jobs.
    assert [path for path in tmp_path.iterdir() if "torchinductor" not in path.name] == []


def test_a_reader_that_goes_away_ends_the_job(folder: Path, tmp_path: Path) -> None:
    """``zeroir run … | head -1``."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = begun(folder, tmp_path, out=pipe)
    with pipe.open() as out:
        assert "loss" in out.readline()
    exit_code = job.wait(time.monotonic() + DEADLINE)
    job.kill()
    assert exit_code == 128 + signal.SIGPIPE
    _, err = job.output()
    assert err.startswith(
        "Error on rank 0: Training stopped, because the reader of its output closed it"
    )
    assert err.count("\n") <= 2


def test_a_full_disk_under_the_output_ends_the_job(folder: Path) -> None:
    made = run_forked("zeroir", [*RUN, "2"], folder, WELL, out=Path("/dev/full"))
    assert made.returncode == 2
    assert "could not be written: No space left on device." in made.stderr
    assert "Traceback" not in made.stderr


OTHER = {
    "program": (["stage2.zir"], "Error: Rank 1 has another program than rank 0 (digest "),
    "model": (["stage3.zir", "--model", "other.py"], "Error on rank 1: other.py changed since"),
    "changed model": (
        ["stage3.zir", "--model", "other.py", "--allow-model-change"],
        "Error: Rank 1 has another model file than rank 0 (SHA-256 ",
    ),
    "option": (
        ["stage3.zir", "--log-every", "3"],
        "Error: Rank 1 was started with --log-every 3, but rank 0 with --log-every 10: start every rank with the",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_one_rank_has_another_file(folder: Path, what: str) -> None:
    """Under torchrun itself, whose summary follows our sentence."""
    arguments, sentence = OTHER[what]
    (folder / "other.py").write_text(f"{MODEL}\n")
    require_refused(folder, arguments, sentence)


def test_one_rank_imports_another_module(tmp_path: Path) -> None:
    """Each rank's program is of its own model file, which is the same on all; the modules beside them differ."""
    for rank, program in enumerate(("stage3.zir", "other.zir")):
        beside = tmp_path / str(rank)
        beside.mkdir()
        (beside / "samples.py").write_text(f"FIRST = {rank}")
        (beside / "model.py").write_text(f"import samples\n{MODEL}")
        # A process each, because a process imports a module of one name once.
        options = ["--stage", "3", "--world-size", "2", "-o", program]
        made = run_forked("zeroir", ["compile", f"{rank}/model.py", *options], tmp_path)
        assert made.returncode == 0, made.stderr
    require_refused(
        tmp_path, ["other.zir"], "Error: Rank 1 has another module samples than rank 0 (SHA-256 "
    )


def require_refused(folder: Path, arguments: list[str], sentence: str) -> None:
    """Three ranks, of which rank 1 has these arguments, end with the sentence before the first step."""
    torchrun = ["--standalone", "--nproc-per-node", "3", "-m", "tests.cli.rank_one_differs"]
    made = run_forked("torch.distributed.run", [*torchrun, *arguments], folder, WELL)
    assert made.returncode != 0
    sentences = [line for line in made.stderr.splitlines() if line.startswith("Error")]
    assert sentences[0].startswith(sentence)
    assert len(sentences) <= 3
    assert "step" not in made.stdout
    *_, last, _ = made.stderr.splitlines()
    assert last == f"  traceback : {sentences[0]}"  # torchrun's summary ends with the reason


def test_a_disk_that_is_full_leaves_no_half_program(
    folder: Path, zeroir: Zeroir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        answer = zeroir("compile", "model.py", "-o", "small.zir")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert answer.exit_code == 2
    assert answer.err == "Error: 'small.zir' cannot be written: File too large.\n"
    assert not [path.name for path in folder.iterdir() if "small" in path.name]
