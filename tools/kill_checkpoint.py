"""Kill jobs while they save, again and again, and look whether a checkpoint is lost or half visible.

    python -m tools.kill_checkpoint --count 1000 --record docs/records/kill-checkpoint.json

Every cycle is `zeroir run --save FOLDER --save-every 1 --keep 3 --resume auto` of several ranks under torchrun's
agent, in the folder that the killed jobs before it have left. At a random instant SIGKILL ends one rank (with its
thread that writes, and rank 0 also with what it publishes), the agent, or all of them; or nobody is killed, but the
folder is renamed, which must end the job with a sentence and the exit code 2, after which it is renamed back. Then

* the newest checkpoints that the job had reported are still there, and all that is visible is whole, byte by byte;
* the next job removes what was left aside, and goes on from the newest checkpoint.

In the end a job that nobody kills makes as many steps in one go from the same first checkpoint, and its weights,
moments and random states are compared bit by bit with those that survived. The exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Final

import zeroir
from tests.support.zygote import Forked, compiling_zygote
from tools import record_file
from tools.checkpoints import model as tiny_model
from zeroir.checkpoint.damage import verify_checkpoint
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.manifest import MANIFEST_NAME
from zeroir.convert.compare import compare

KEEP: Final = 3
_START_SECONDS: Final = 120.0
_END_SECONDS: Final = 60.0
_MANY_STEPS: Final = 10_000_000


class Victim(StrEnum):
    """The processes that are killed."""

    RANK_0 = "rank 0"
    OTHER_RANK = "another rank"
    AGENT = "the agent"
    ALL = "all"
    FOLDER = "none; the folder is renamed"


class Phase(StrEnum):
    """What the kill left of the save under way."""

    BETWEEN = "no save under way"
    BEGUN = "folder without files"
    FILES = "some files"
    MANIFEST = "with its manifest, not visible"
    REMOVING = "an old checkpoint, half removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A job that was killed: its victim, its phases, the steps it had saved, and sentences on what is wrong."""

    victim: Victim
    phases: frozenset[Phase]
    saved_steps: tuple[int, ...]
    problems: tuple[str, ...]


class SavingJob:
    """``zeroir run`` in a folder, under an agent."""

    def __init__(self, folder: Path, program: Path, world_size: int, steps: int, save: str) -> None:
        options = {
            "--nproc": world_size,
            "--steps": steps,
            "--save": save,
            "--keep": KEEP,
            "--log-every": _MANY_STEPS,
            "--model": tiny_model.__file__,
        }
        arguments = [word for option, value in options.items() for word in (option, str(value))]
        if steps == _MANY_STEPS:
            arguments += ["--save-every", "1"]
        # A file that an earlier job has written would be taken for the output of this one.
        self._out = folder / f"{time.monotonic_ns()}.out"
        self._process = Forked(
            compiling_zygote(),
            "zeroir",
            ("run", str(program), *arguments, "--resume", "auto", "--json", "--no-self-check"),
            {"OMP_NUM_THREADS": "1"},
            self._out.with_suffix(".log"),
            folder=folder,
            out=self._out,
        )
        assert self._process.pid is not None
        self.agent = self._process.pid

    def saved_steps(self) -> list[int]:
        """The steps whose checkpoints the job has reported as durable."""
        lines = self._out.read_text().splitlines(keepends=True) if self._out.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n") and line[:1] == "{"]
        return [row["step"] for row in rows if "saved" in row]

    def ranks(self) -> list[int]:
        """The process ids of the ranks that have started, by rank."""
        return sorted(rank for child in _children(self.agent) for rank in _children(child))

    def has_ended(self) -> bool:
        """Whether the agent has ended."""
        return self._process.poll() is not None

    def exit_code(self) -> int | None:
        """The exit code of a job that has ended."""
        return self._process.poll()

    def wait(self) -> int | None:
        """The exit code of a job that nobody kills."""
        return self._process.wait(time.monotonic() + 10 * _START_SECONDS)

    def output(self) -> str:
        """Everything that the job has printed."""
        return "".join(self._process.output())


def _children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in path.read_text().split()]
    return []


def kill_cycle(
    folder: Path, program: Path, world_size: int, chance: Random, victims: Sequence[Victim]
) -> Cycle:
    """Start a job, kill one of the victims at a random instant, and look at the folder."""
    victim = chance.choice(victims)
    root = folder / "checkpoints"
    before = [listed.step for listed in CheckpointFolder(root=str(root)).list()]
    leftovers = set(_aside(root))
    job = SavingJob(folder, program, world_size, _MANY_STEPS, root.name)
    problems: list[str] = []
    # Most kills hit a job that saves; some hit one that starts, removes leftovers, and loads.
    is_starting = victim is not Victim.FOLDER and chance.random() < 0.15
    deadline = time.monotonic() + _START_SECONDS
    while not (job.ranks() if is_starting else job.saved_steps()):
        if job.has_ended() or time.monotonic() > deadline:
            problems.append(f"the job did not come to save: {job.output()[-2000:]}")
            break
        time.sleep(0.005)
    if job.saved_steps() and before and job.saved_steps()[0] != before[0] + 1:
        problems.append(
            f"the job went on with step {job.saved_steps()[0]}, and {before[0]} was saved"
        )
    if job.saved_steps() and leftovers & set(_aside(root)):
        problems.append("the job has not removed what was left aside")
    time.sleep(chance.uniform(0, 1.0 if is_starting else 0.25))
    ranks = job.ranks()
    killed: list[int] = []
    match victim:
        case Victim.RANK_0:
            killed = ranks[:1]
        case Victim.OTHER_RANK:
            killed = ranks[-1:]
        case Victim.AGENT:
            killed = [job.agent]
        case Victim.ALL:
            killed = [*ranks, job.agent]
        case Victim.FOLDER:
            root.rename(root.with_name("moved"))
    if not killed and victim is not Victim.FOLDER:
        problems.append("the job has no ranks")
    for process in killed:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    problems += _end(job, ranks)
    if victim is Victim.FOLDER:
        problems += _moved_back(job, root)
    reported = job.saved_steps()
    phases = frozenset(_phase(path) for path in _aside(root)) or frozenset({Phase.BETWEEN})
    problems += _lost(root, before, reported)
    return Cycle(
        victim=victim, phases=phases, saved_steps=tuple(reported), problems=tuple(problems)
    )


def _end(job: SavingJob, ranks: list[int]) -> list[str]:
    """Wait until no process of the job is left."""
    deadline = time.monotonic() + _END_SECONDS
    while not job.has_ended() or any(_is_alive(rank) for rank in ranks):
        if time.monotonic() > deadline:
            for process in (job.agent, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return ["a process of the job has not ended"]
        time.sleep(0.005)
    return []


def _moved_back(job: SavingJob, root: Path) -> Iterator[str]:
    """Give a renamed folder its name again; sentences on what its job did otherwise than end with a sentence."""
    if root.exists():
        # A save that began at this very moment may have made it; the job must not have reported what is there.
        shutil.rmtree(root)
    root.with_name("moved").rename(root)
    # Ranks that only notice the loss of another one speak after the one that knows the reason.
    errors = [line for line in job.output().splitlines() if line.startswith("Error")]
    if job.exit_code() != 2 or not errors or root.name not in errors[0]:
        yield f"the folder was renamed, and the job ended with {job.exit_code()}: {job.output()[-2000:]}"


def _is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _aside(root: Path) -> list[Path]:
    """The folders of saves and removals that have not ended."""
    paths = root.iterdir() if root.is_dir() else ()
    return [path for path in paths if path.name.startswith(".") and path.is_dir()]


def _phase(path: Path) -> Phase:
    names = [entry.name for entry in path.iterdir()]
    if ".deleting-" in path.name:
        return Phase.REMOVING
    if MANIFEST_NAME in names:
        return Phase.MANIFEST
    return Phase.FILES if names else Phase.BEGUN


def _lost(root: Path, before: list[int], reported: list[int]) -> Iterator[str]:
    """Sentences on checkpoints that are lost, and on visible ones that are not whole."""
    visible = CheckpointFolder(root=str(root)).list()
    for listed in visible:
        for damage in verify_checkpoint(listed.path).damages:
            yield f"half visible: {damage.sentence}"
    steps = {listed.step for listed in visible}
    known = sorted({*before, *reported})
    # A newer one may be visible that the job did not live to report, and may count among those that are kept.
    for step in known[-(KEEP - 1) :]:
        if step not in steps:
            yield f"lost: step {step}; there are {sorted(steps)}"
    if len(steps) < min(KEEP, len(known)):
        yield f"lost: {sorted(steps)} are left of {known[-KEEP:]}"


def finished(folder: Path, program: Path, world_size: int, steps: int, save: str) -> str:
    """Train up to so many steps in a job that nobody kills, and return the checkpoint that it saves in the end."""
    job = SavingJob(folder, program, world_size, steps, save)
    if job.wait() != 0:
        raise RuntimeError(f"The job that nobody kills failed: {job.output()[-2000:]}")
    return CheckpointFolder(root=str(folder / save)).list()[0].path


def differences(survivor: str, reference: str) -> list[str]:
    """Sentences on what the killed jobs have otherwise than the uninterrupted one."""
    comparison = compare(reference, survivor)
    changed = [tensor.key.name for tensor in comparison.tensors if tensor.changed_numel]
    facts = [fact.name for fact in comparison.facts]
    return [
        f"otherwise than without kills: {name}"
        for name in (*changed, *facts, *comparison.changed_states)
    ]


def kill(
    numbers: range, world_size: int, seed: int, victims: Sequence[Victim] = tuple(Victim)
) -> tuple[list[Cycle], list[str]]:
    """Kill a job for each number, one after the other in one folder; the cycles, and what is otherwise in the end."""
    cycles = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "program.zir"
        zeroir.compile(tiny_model.__file__, stage=2, world_size=world_size, precision="fp16").save(
            program
        )
        # Python's own random numbers begin otherwise in each process, but go on from a checkpoint.
        finished(folder, program, world_size, 1, "checkpoints")
        shutil.copytree(folder / "checkpoints", folder / "uninterrupted")
        for number in numbers:
            chance = Random(f"{seed} {number}")
            cycle = kill_cycle(folder, program, world_size, chance, victims)
            cycles.append(cycle)
            for problem in cycle.problems:
                print(f"cycle {number}, {cycle.victim}: {problem}", flush=True)
            if number % 50 == 49:
                print(f"{number + 1} cycles", file=sys.stderr, flush=True)
        survivor = CheckpointFolder(root=str(folder / "checkpoints")).list()[0]
        reference = finished(folder, program, world_size, survivor.step, "uninterrupted")
        return cycles, differences(survivor.path, reference)


def main() -> int:
    """Kill, look, and compare."""
    parser = argparse.ArgumentParser(description="Kill jobs while they save.")
    parser.add_argument("--count", type=int, default=20, help="how many kills")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=1, help="how many jobs run at a time")
    parser.add_argument("--seed", type=int, default=0)
    record_file.add_option(parser)
    arguments = parser.parse_args()
    cycles: list[Cycle] = []
    problems: list[str] = []
    start = time.monotonic()
    with ProcessPoolExecutor(arguments.lanes, mp_context=get_context("spawn")) as pool:
        bounds = [arguments.count * lane // arguments.lanes for lane in range(arguments.lanes + 1)]
        lanes = [
            pool.submit(kill, range(*pair), arguments.world_size, arguments.seed)
            for pair in pairwise(bounds)
        ]
        for lane in lanes:
            killed, different = lane.result()
            cycles += killed
            problems += different
    for problem in problems:
        print(problem)
    rows = table(cycles)
    record_file.publish(
        arguments.record,
        "kill_checkpoint",
        ["killed", "jobs", *Phase, "checkpoints", "lost or half visible"],
        rows,
        {
            "seconds": round(time.monotonic() - start),
            "world_size": arguments.world_size,
            "survivors_equal_uninterrupted_training": not problems,
        },
    )
    return 1 if problems or any(cycle.problems for cycle in cycles) else 0


def table(cycles: list[Cycle]) -> list[list[str]]:
    """One row for each victim, and the sum."""
    rows = []
    for name, victims in (*((victim.value, {victim}) for victim in Victim), ("sum", set(Victim))):
        killed = [cycle for cycle in cycles if cycle.victim in victims]
        phases = Counter(phase for cycle in killed for phase in cycle.phases)
        saved = sum(len(cycle.saved_steps) for cycle in killed)
        wrong = sum(1 for cycle in killed if cycle.problems)
        rows.append(
            [name, *map(str, (len(killed), *(phases[phase] for phase in Phase), saved, wrong))]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
