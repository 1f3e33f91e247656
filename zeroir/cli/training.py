"""``zeroir run``: its arguments, and the ranks that it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from cyclopts import Parameter
from cyclopts.validators import Number

from zeroir.api.run_options import LONGEST_TIMEOUT_S, SHORTEST_TIMEOUT_S, TIMEOUT_S
from zeroir.api.sentences import LogLevel, show_log
from zeroir.cli.arguments import (
    AllowModelChange,
    InCounts,
    Kernels,
    MovedModel,
    ProgramFile,
    Ranks,
    Seed,
)
from zeroir.cli.option_groups import CHECKPOINTS, JOB, REPORTS, TRAINING, OffloadOptions
from zeroir.config.texts import text_of

if TYPE_CHECKING:
    from zeroir.api.keywords import OffloadKeywords


def run(
    program: ProgramFile,
    /,
    *,
    steps: Annotated[
        int,
        Parameter(
            group=TRAINING,
            validator=InCounts,
            help="Training steps, those before a resumed checkpoint included.",
        ),
    ] = 100,
    nproc: Annotated[Ranks, Parameter(group=JOB)] = None,
    micro_steps: Annotated[
        int | None,
        Parameter(
            group=TRAINING,
            validator=InCounts,
            help="Batches of a step. [default: as many as the program was compiled with]",
        ),
    ] = None,
    order: Annotated[
        str | None,
        Parameter(
            group=TRAINING,
            help="What runs next, as in `zeroir compile`: step, layer, or layer=G. [default: as compiled]",
        ),
    ] = None,
    offload: Annotated[
        OffloadOptions | None,
        Parameter(
            name="*", show_default=False, help="As in `zeroir compile`, whose options they replace."
        ),
    ] = None,
    optimizer_bits: Annotated[
        Literal[32, 8] | None,
        Parameter(
            group=TRAINING,
            help="Bits of an element of the optimizer's states, as in `zeroir compile`. [default: as compiled]",
        ),
    ] = None,
    seed: Annotated[Seed, Parameter(group=TRAINING)] = 0,
    log_every: Annotated[
        int,
        Parameter(
            group=REPORTS, validator=InCounts, help="Number of steps between two printed losses."
        ),
    ] = 10,
    log_level: Annotated[
        LogLevel | None,
        Parameter(
            group=REPORTS,
            help="Print what the model file and the libraries log, from this level on, with the rank. [default: what "
            "Python prints, warnings and errors, unless the model file configures logging]",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        Parameter(
            group=REPORTS, help="Add a JSON object for each report to the lines of this file."
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        Parameter(group=REPORTS, help="Write the reports for TensorBoard to this folder."),
    ] = None,
    machine: Annotated[
        str | None,
        Parameter(
            group=REPORTS,
            help="The machine, as in `zeroir simulate`, for the MFU. [default: known from the name of the GPU]",
        ),
    ] = None,
    check_finite: Annotated[
        bool,
        Parameter(
            group=TRAINING,
            negative=(),
            help="Look at all gradients before each update, and name the first parameter whose gradient is not finite.",
        ),
    ] = False,
    eval_every: Annotated[
        int | None,
        Parameter(
            group=TRAINING,
            validator=InCounts,
            help="Number of steps between two evaluations on the model file's eval_batches(). [default: none]",
        ),
    ] = None,
    save: Annotated[
        str | None,
        Parameter(
            group=CHECKPOINTS,
            help="Save a checkpoint in this folder after the last step, and after the present one on SIGTERM.",
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        Parameter(
            group=CHECKPOINTS, validator=InCounts, help="Save after every so many steps, too."
        ),
    ] = None,
    keep: Annotated[
        int | None,
        Parameter(
            group=CHECKPOINTS,
            validator=InCounts,
            help="Keep so many newest checkpoints. [default: all of them]",
        ),
    ] = None,
    keep_best: Annotated[
        str | None,
        Parameter(
            group=CHECKPOINTS,
            help="Keep the checkpoint with the lowest value of this, too: loss or eval_loss.",
        ),
    ] = None,
    resume: Annotated[
        str,
        Parameter(
            group=CHECKPOINTS,
            help="Go on from a checkpoint: its path, 'auto' for the newest whole one of --save, or 'none'.",
        ),
    ] = "auto",
    model: Annotated[MovedModel, Parameter(group=JOB)] = None,
    allow_model_change: Annotated[AllowModelChange, Parameter(group=JOB)] = False,
    trace: Annotated[
        Path | None,
        Parameter(
            group=REPORTS,
            help="Write the beginning and the end of every op of the last step, on all ranks, for ui.perfetto.dev.",
        ),
    ] = None,
    kernels: Annotated[Kernels, Parameter(group=JOB)] = "eager",
    timeout: Annotated[
        int,
        Parameter(
            group=JOB,
            validator=Number(gte=SHORTEST_TIMEOUT_S, lte=LONGEST_TIMEOUT_S),
            help="Seconds to wait in a collective for a rank that is alive; after a fifth, at most 60, without a sign "
            "of life from a rank the job ends.",
        ),
    ] = TIMEOUT_S,
    cuda_graphs: Annotated[
        bool,
        Parameter(
            group=JOB,
            negative=(),
            help="On a GPU, launch whole sections as CUDA graphs if possible.",
        ),
    ] = False,
    self_check: Annotated[
        bool,
        Parameter(
            group=JOB,
            name="--self-check",
            help="Compare each distinct kernel with its operators, on random numbers, before training.",
        ),
    ] = True,
    as_json: Annotated[
        bool,
        Parameter(
            group=REPORTS, name="--json", negative=(), help="Print one JSON object per line."
        ),
    ] = False,
) -> int:
    """Train a compiled program under torchrun: over NCCL on GPUs, over gloo or shared memory on CPUs.

    Example: torchrun --nproc-per-node 2 -m zeroir run gpt.zir --steps 100 --save checkpoints
    """
    from zeroir.api.job import is_rank_of_job, launch
    from zeroir.api.run import require_outputs, run_program
    from zeroir.api.run_options import RunOptions, save_options
    from zeroir.artifact import require_program

    given = {} if offload is None else offload.given
    options = RunOptions(
        steps=steps,
        micro_steps=micro_steps,
        order=order,
        offload=cast("OffloadKeywords", given),
        optimizer_bits=optimizer_bits,
        seed=seed,
        log_every=log_every,
        eval_every=eval_every,
        save=save_options(save, save_every, keep, keep_best, eval_every),
        resume=resume,
        model=model,
        allow_model_change=allow_model_change,
        log=log,
        tensorboard=tensorboard,
        machine=machine,
        check_finite=check_finite,
        trace=trace,
        kernels=kernels,
        timeout_s=timeout,
        cuda_graphs=cuda_graphs,
        self_check=self_check,
        as_json=as_json,
    )
    is_rank = is_rank_of_job(nproc)
    if not is_rank:
        require_outputs(options)
    if nproc is not None and not is_rank:
        require_program(program)
        values: dict[str, object | None] = {
            "--steps": steps,
            "--micro-steps": micro_steps,
            "--order": order,
            "--optimizer-bits": optimizer_bits,
            "--seed": seed,
            "--log-every": log_every,
            "--log-level": log_level,
            "--eval-every": eval_every,
            "--save": save,
            "--save-every": save_every,
            "--keep": keep,
            "--keep-best": keep_best,
            "--resume": resume,
            "--model": model,
            "--log": log,
            "--tensorboard": tensorboard,
            "--machine": machine,
            "--trace": trace,
            "--kernels": kernels,
            "--timeout": timeout,
        }
        flags = {
            "--allow-model-change": allow_model_change,
            "--check-finite": check_finite,
            "--cuda-graphs": cuda_graphs,
            "--no-self-check": not self_check,
            "--json": as_json,
        }
        values.update((f"--{name.replace('_', '-')}", text_of(v)) for name, v in given.items())
        arguments = ["run", str(program)]
        for name, value in values.items():
            arguments += [] if value is None else [name, str(value)]
        return launch(nproc, [*arguments, *(name for name, is_set in flags.items() if is_set)])
    if log_level is not None:
        show_log(log_level, os.environ.get("RANK", "0"))
    run_program(program, options)
    return 0
