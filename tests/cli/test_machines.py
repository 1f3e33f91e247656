"""Jobs on two machines: they give the bits of one machine, and a link that is cut ends both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machines import (
    HAS_NAMESPACES,
    Machine,
    ended,
    lose_all_packets,
    take_link_down,
    two_machines,
)
from tests.support.resuming import MODEL, losses
from tests.support.zygote import Forked, run_forked
from zeroir.cli.app import run_command

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="needs the right to make network namespaces"),
]

DEADLINE_S = 90
STEPS = 4


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines")
    model = folder / "model.py"
    model.write_text(MODEL.replace("WORKERS = 2", "WORKERS = 0"))
    path = folder / "model.zir"
    options = ["--world-size", "4", "--lr", "0.05"]
    assert run_command(["compile", str(model), *options, "-o", str(path)]) == 0
    return path


def running(program: Path, steps: int) -> list[str]:
    given = ["run", str(program), "--model", str(program.with_suffix(".py"))]
    return ["zeroir", *given, "--steps", str(steps), "--log-every", "1", "--json"]


def losses_on_one_machine(program: Path, world_size: int, folder: Path) -> dict[int, float]:
    module, *arguments = running(program, STEPS)
    alone = run_forked(module, [*arguments, "--nproc", str(world_size)], folder)
    assert alone.returncode == 0, alone.stderr
    return losses(alone.stdout)


def test_two_machines_train_as_one(program: Path, tmp_path: Path) -> None:
    """As torchrun meets at a fixed address."""
    with two_machines(tmp_path) as machines:
        meeting = ["--master-addr", machines[0].address, "--master-port", "29500"]
        agents = [
            machine.start(
                tmp_path,
                *("torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", "2", *meeting, "-m", *running(program, STEPS)),
            )
            for number, machine in enumerate(machines)
        ]
        assert ended(agents, DEADLINE_S) == [0, 0], machines[0].said(tmp_path)
        first = machines[0]
    expected = losses_on_one_machine(program, 4, tmp_path)
    assert len(expected) == STEPS
    assert losses(first.printed(tmp_path)) == expected
    where = "alpha (ranks 0, 1), beta (ranks 2, 3)"
    assert f"Machines: {where}; they communicate over peer-memory and gloo." in first.said(tmp_path)


def test_machines_of_one_name_and_unequal_size_train_as_one(program: Path, tmp_path: Path) -> None:
    """As torchrun's agents meet at a store of their own; the machines share a name, and the identity of their boot."""
    with two_machines(tmp_path, ("node", "node")) as machines:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:29500"]
        agents = [
            machine.start(
                tmp_path,
                *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)),
                *(*meeting, "--rdzv-id", "job", "--local-addr", machine.address),
                *("-m", *running(program, STEPS)),
            )
            for machine, ranks in zip(machines, (2, 1), strict=True)
        ]
        assert ended(agents, DEADLINE_S) == [0, 0], machines[0].said(tmp_path)
        printed = "".join(machine.printed(tmp_path) for machine in machines)
    assert losses(printed) == losses_on_one_machine(program, 3, tmp_path)


def started_by_srun(machines: Sequence[Machine], program: Path, folder: Path) -> list[Forked]:
    """Ranks of two tasks with the variables of srun, which end at once, and not with an agent."""
    return [
        machine.start(
            folder,
            *running(program, 100_000),
            *("--timeout", "30"),
            environment={
                "SLURM_PROCID": str(number),
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": str(number),
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "MASTER_ADDR": machines[0].host,
                "MASTER_PORT": "29500",
            },
        )
        for number, machine in enumerate(machines)
    ]


def test_a_cut_link_ends_both_sides(program: Path, tmp_path: Path) -> None:
    """Whether the machines learn of it or not; one sentence on each names the other."""
    with ExitStack() as stack:
        jobs = []
        for name, cut in (("down", take_link_down), ("astray", lose_all_packets)):
            folder = tmp_path / name
            folder.mkdir()
            machines = stack.enter_context(two_machines(folder))
            jobs.append((folder, machines, cut, started_by_srun(machines, program, folder)))
        for folder, machines, cut, ranks in jobs:
            await_step(machines[0], folder, ranks)
            cut(machines)
        for folder, machines, _, ranks in jobs:
            # A fifth of the timeout without a sign of life, and what ending takes.
            assert ended(ranks, 20) == [2, 2], [machine.said(folder) for machine in machines]
            require_empty(machines)
            first, second = (errors(machine.said(folder)) for machine in machines)
            assert first[0].startswith("Error: Rank 1 on beta has given no sign of life for 6 s: ")
            assert second[0].startswith(
                "Error: The job's store at alpha:29500 has not answered for 6 s: rank 1 on beta cannot reach it, and "
                "with it alpha (rank 0)."
            )
            assert len(first) == len(second) == 1


def require_empty(machines: Sequence[Machine]) -> None:
    """The process beside a rank needs a moment to notice the end of the rank."""
    deadline = time.monotonic() + 20
    while any(machine.processes() for machine in machines):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def await_step(machine: Machine, folder: Path, ranks: Sequence[Forked]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not losses(machine.printed(folder).rpartition("\n")[0]):
        assert time.monotonic() < deadline
        assert [rank.poll() for rank in ranks] == [None, None], machine.said(folder)
        time.sleep(0.1)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if "Error" in line]
