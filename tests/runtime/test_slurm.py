"""A task of srun is a rank; a batch script, a step of one task and a rank of torchrun are left alone."""

from __future__ import annotations

import pytest

from zeroir.errors import UserError
from zeroir.runtime.distributed.slurm import become_rank_of_step

TASK = {
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_a_task_has_the_numbers_of_its_rank() -> None:
    environment = dict(TASK)
    become_rank_of_step(environment)
    assert {name: environment[name] for name in environment.keys() - TASK.keys()} == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }


@pytest.mark.parametrize(
    ("listed", "machine", "tasks"),
    [("2(x3),1", "3", "1"), ("4", "0", "4"), ("2(x3),1", "4", None), ("?", "0", None)],
)
def test_the_tasks_of_a_machine_are_read_where_slurm_lists_them(
    listed: str, machine: str, tasks: str | None
) -> None:
    environment = {**TASK, "SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": machine}
    become_rank_of_step(environment)
    assert environment.get("LOCAL_WORLD_SIZE") == tasks


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TASK, "RANK": "0"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {name: text for name, text in TASK.items() if "STEP" not in name},
    ],
    ids=["no Slurm", "torchrun", "one task", "batch script"],
)
def test_other_processes_keep_their_environment(environment: dict[str, str]) -> None:
    before = dict(environment)
    become_rank_of_step(environment)
    assert environment == before


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_tasks_without_a_meeting_point_are_refused(missing: str) -> None:
    environment = {name: text for name, text in TASK.items() if name != missing}
    with pytest.raises(UserError, match=f"^srun has started 7 tasks, but {missing} is not set: "):
        become_rank_of_step(environment)
