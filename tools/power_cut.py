"""Cut the power while a job saves checkpoints, at many instants, and look what the disk has afterwards.

    python -m tools.power_cut --count 200 --record docs/records/power-cut.json

Two jobs of two ranks save after every step and keep two checkpoints; the second resumes the first. A library loaded
before the C library records all operations on files, in order, with what the jobs report in between. The record is
carried out again up to a random operation, where the power is cut. What no `fsync` has made durable is lost: all of it,
only bytes, only entries of folders, or any part of it in any order. Then every visible checkpoint must be whole, byte
by byte, and the newest one that was reported must be visible. The exit code is 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final

from rich.progress import track

import zeroir
from tests.support.zygote import COMPILING, DEADLINE_S, Forked, started
from tools import record_file
from tools.checkpoints import model as tiny_model
from tools.checkpoints.forgetful_disk import ForgetfulDisk, Loss
from tools.checkpoints.recorder import FileOperation, OperationKind, build, read_log
from zeroir.checkpoint.damage import verify_checkpoint
from zeroir.checkpoint.folder import CheckpointFolder

KEEP: Final = 2
WORLD_SIZE: Final = 2
_FOLDER: Final = "checkpoints"


def record_jobs(folder: Path, steps: Sequence[int]) -> tuple[Path, list[FileOperation]]:
    """Run a job up to each number of steps, one after the other; the folder where they saved, and their operations.

    Raises:
        RuntimeError: where a job fails, or the operations do not give what is in the folder.
    """
    root, log, program = folder / "root", folder / "log", folder / "program.zir"
    root.mkdir()
    zeroir.compile(tiny_model.__file__, stage=2, world_size=WORLD_SIZE).save(program)
    # The library is loaded into the process of which the agent and the ranks are forked.
    source = started(*COMPILING, environment={"LD_PRELOAD": str(build(folder))})
    for count in steps:
        job = ["--standalone", "--nproc-per-node", str(WORLD_SIZE)]
        job += ["-m", "tools.checkpoints.recorded_job", str(root), str(log)]
        job += ["run", str(program), "--steps", str(count), "--save", str(root / _FOLDER)]
        job += ["--save-every", "1", "--keep", str(KEEP), "--json", "--no-self-check"]
        job += ["--model", tiny_model.__file__]
        environment = {"OMP_NUM_THREADS": "1"}
        agent = Forked(
            source, "torch.distributed.run", tuple(job), environment, folder / f"job{count}"
        )
        if agent.wait(time.monotonic() + DEADLINE_S) != 0:
            agent.kill()
            raise RuntimeError(f"The recorded job failed: {agent.output()[1]}")
    operations = list(read_log(log))
    _require_complete(root, operations, folder / "again")
    return root, operations


def _require_complete(root: Path, operations: Sequence[FileOperation], target: Path) -> None:
    disk = ForgetfulDisk(root)
    for operation in operations:
        disk.apply(operation)
    target.mkdir()
    disk.write(target)
    if _tree(target) != _tree(root):
        raise RuntimeError(f"The record lacks operations: {target} is not {root}.")


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def cut_problems(
    root: Path, operations: Sequence[FileOperation], loss: Loss, chance: Random
) -> Iterator[str]:
    """Cut the power after these operations; sentences on what is lost or half visible."""
    disk = ForgetfulDisk(root)
    for operation in operations:
        disk.apply(operation)
    with tempfile.TemporaryDirectory() as name:
        disk.cut(Path(name), loss, chance)
        visible = CheckpointFolder(root=str(Path(name) / _FOLDER)).list()
        for listed in visible:
            for damage in verify_checkpoint(listed.path).damages:
                yield f"half visible: {damage.sentence}"
        steps = {listed.step for listed in visible}
        reported = [
            json.loads(operation.path)["step"]
            for operation in operations
            if operation.kind is OperationKind.MARK
        ]
        if reported and reported[-1] not in steps:
            yield f"lost: step {reported[-1]}; there are {sorted(steps)}"
        if len(steps) < min(KEEP, len(reported)):
            yield f"lost: {sorted(steps)} are left of {reported[-KEEP:]}"


def main() -> int:
    """Record, cut, and count."""
    parser = argparse.ArgumentParser(description="Cut the power while a job saves.")
    parser.add_argument("--count", type=int, default=50, help="how many cuts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    record_file.add_option(parser)
    arguments = parser.parse_args()
    bad: Counter[Loss] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root, operations = record_jobs(Path(name), (8, 12))
        cuts = [(number, loss) for number in range(arguments.count) for loss in Loss]
        for number, loss in track(cuts, "Cutting", disable=not sys.stderr.isatty()):
            chance = Random(f"{arguments.seed} {number} {loss}")
            until = chance.randrange(len(operations) + 1)
            wrong = list(cut_problems(root, operations[:until], loss, chance))
            for problem in wrong:
                print(f"cut {number} after {until} operations, {loss}: {problem}")
            bad[loss] += bool(wrong)
    rows = [[loss.value, str(arguments.count), str(bad[loss])] for loss in Loss]
    record_file.publish(
        arguments.record,
        "power_cut",
        ["unsynchronised operations", "cuts", "lost or half visible"],
        rows,
        {"seconds": round(time.monotonic() - start), "operations": len(operations)},
    )
    return 1 if bad.total() else 0


if __name__ == "__main__":
    sys.exit(main())
