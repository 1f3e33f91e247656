"""``zeroir run``: its arguments, and the ranks that it starts."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from zeroir.api.running.run_options import LOWERING_ROWS, RunOptions, make_run_options
from zeroir.api.sentences import LogLevel, show_log
from zeroir.cli.arguments import ProgramFile, Ranks
from zeroir.cli.option_groups import RUN_ROWS, RunParameters, group
from zeroir.config.table import arguments_of


def run(
    program: ProgramFile,
    /,
    *,
    nproc: Annotated[Ranks, Parameter(group=group("run", "Job and kernels"))] = None,
    log_level: Annotated[
        LogLevel | None,
        Parameter(
            group=group("run", "Reports"),
            help="Print what the model file and the libraries log, from this level on, with the rank. [default: what "
            "Python prints, warnings and errors, unless the model file configures logging]",
        ),
    ] = None,
    options: Annotated[RunParameters | None, Parameter(name="*")] = None,
) -> int:
    """Train a compiled program under torchrun: over NCCL on GPUs, over gloo or shared memory on CPUs.

    Example: torchrun --nproc-per-node 2 -m zeroir run gpt.zir --steps 100 --save checkpoints
    """
    from zeroir.api.running.job import is_rank_of_job, launch
    from zeroir.api.running.run import require_outputs, run_program
    from zeroir.artifact import require_program

    given = {} if options is None else options.given
    made = make_run_options({name: given[name] for name in given if name in RunOptions.rows()})
    changes = {name: given[name] for name in given if name in LOWERING_ROWS}
    is_rank = is_rank_of_job(nproc)
    if not is_rank:
        require_outputs(made)
    if nproc is not None and not is_rank:
        require_program(program)
        logged = [] if log_level is None else ["--log-level", log_level]
        return launch(nproc, ["run", str(program), *logged, *arguments_of(given, RUN_ROWS)])
    if log_level is not None:
        show_log(log_level, os.environ.get("RANK", "0"))
    run_program(program, made, changes)
    return 0
