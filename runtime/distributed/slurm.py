"""A task that Slurm's ``srun`` has started is a rank of a job: its variables are translated to those of torchrun.

srun gives every task its own number, among all tasks of the job step and on its machine (srun(1), "output environment
variables"). It says nothing about a meeting point, so the user exports MASTER_ADDR and MASTER_PORT as for torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from zeroir.errors import UserError


def become_rank_of_step(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in a task of a job step of several tasks.

    Nothing changes where RANK is set, as below torchrun, and in a batch script or a step of one task.

    Raises:
        UserError: where MASTER_ADDR or MASTER_PORT is missing; each task would train alone.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or tasks == "1":
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(
                f"srun has started {tasks} tasks, but {name} is not set: export MASTER_ADDR, the host of task 0, and "
                "MASTER_PORT, a free port there, in the batch script, or let srun start one torchrun on each machine."
            )
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = tasks
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    local_tasks = _tasks_of_machine(environment)
    if local_tasks is not None:
        environment["LOCAL_WORLD_SIZE"] = str(local_tasks)


def _tasks_of_machine(environment: Mapping[str, str]) -> int | None:
    """The tasks of the step on this machine; None where that is not said.

    Slurm lists the tasks of each machine, and counts equal neighbours: ``2(x3),1`` is three machines of two tasks, and
    one of one.
    """
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks: list[int] = []
    for part in listed.split(","):
        number, _, repeated = part.partition("(x")
        times = repeated.removesuffix(")") or "1"
        if not (number.isdecimal() and times.isdecimal()):
            return None
        tasks += [int(number)] * int(times)
    machine = environment.get("SLURM_NODEID", "")
    if not machine.isdecimal() or int(machine) >= len(tasks):
        return None
    return tasks[int(machine)]
