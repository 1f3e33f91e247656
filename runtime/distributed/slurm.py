"""Translates the variables of a task that Slurm's ``srun`` has started to those of torchrun, so that it is a rank.

srun numbers the tasks of a job step, in total and on each machine (srun(1), "output environment variables"). It
provides no address for the rendezvous, so the user exports MASTER_ADDR and MASTER_PORT as for torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from zeroir.errors import UserError


def become_rank_of_step(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in a task of a job step of several tasks.

    Nothing changes where RANK is set, as under torchrun, or in a batch script or a step of one task.

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
    """Return the number of the step's tasks on this machine; None where it is unknown.

    Slurm lists the tasks of each machine in run-length encoding: ``2(x3),1`` is three machines of two tasks, and one
    machine of one task.
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
