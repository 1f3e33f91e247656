"""The options of ``zeroir run`` and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from zeroir.api.running.shared_options import (
    JOB,
    TRAINING,
    AllowModelChange,
    Kernels,
    MovedModel,
    Seed,
)
from zeroir.config.options import CompileOptions
from zeroir.config.table import Option, OptionObject
from zeroir.errors import UserError
from zeroir.ir.limits import MOST_COUNT

AUTO: Final = "auto"
NONE: Final = "none"

TIMEOUT_S: Final = 300
SHORTEST_TIMEOUT_S: Final = 30
"""A rank that prepares something for the others sends a sign of life every 20 seconds."""
LONGEST_TIMEOUT_S: Final = 7 * 24 * 3600

TENSORBOARDS: Final = ("tensorboard", "tensorboardX")
"""Packages that write TensorBoard's files; the first that is installed is used."""

_EVAL_LOSS: Final = "eval_loss"

_CHECKPOINTS: Final = "Checkpoints"
_REPORTS: Final = "Reports"

LOWERING_ROWS: Final = {
    name: row for name, row in CompileOptions.rows().items() if row.option.is_of_run
}
"""The compile options that a run may change: its program is lowered or traced again for them."""


class SaveOptions(OptionObject):
    """Where and when checkpoints are saved, and which are kept: ``keep`` newest ones and that with the lowest metric.

    ``every`` is None for one checkpoint at the end, and ``keep`` for all.
    """

    folder: Annotated[
        str,
        Option(
            name="save",
            group=_CHECKPOINTS,
            help="Save a checkpoint in this folder after the last step, and after the present one on SIGTERM.",
        ),
    ]
    every: Annotated[
        int | None,
        Field(ge=1, le=MOST_COUNT),
        Option(name="save_every", group=_CHECKPOINTS, help="Save after every so many steps, too."),
    ] = None
    keep: Annotated[
        int | None,
        Field(ge=1, le=MOST_COUNT),
        Option(group=_CHECKPOINTS, help="Keep so many newest checkpoints. [default: all of them]"),
    ] = None
    keep_best: Annotated[
        Literal["loss", "eval_loss"] | None,
        Option(
            group=_CHECKPOINTS,
            help="Keep the checkpoint with the lowest value of this, too: loss or eval_loss.",
        ),
    ] = None


class RunOptions(OptionObject):
    """Everything but the program and what it is lowered for that ``zeroir run`` is given.

    ``steps`` counts from the beginning of training, so a resumed run takes those that are left.
    """

    command: ClassVar[str | None] = "run"

    steps: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(
            group=TRAINING,
            help="Training steps, those before a resumed checkpoint included.",
        ),
    ] = 100
    seed: Seed = 0
    check_finite: Annotated[
        bool,
        Option(
            group=TRAINING,
            help="Look at all gradients before each update, and name the first parameter whose gradient is not finite.",
        ),
    ] = False
    skip_other_sizes: Annotated[
        bool,
        Option(
            group=TRAINING,
            help="Leave out batches of sizes that the program does not take, instead of ending the job; each rank then "
            "takes its next one.",
        ),
    ] = False
    eval_every: Annotated[
        int | None,
        Field(ge=1, le=MOST_COUNT),
        Option(
            group=TRAINING,
            help="Number of steps between two evaluations on the model file's eval_batches(). [default: none]",
        ),
    ] = None
    save: SaveOptions | None = None
    resume: Annotated[
        str,
        Option(
            group=_CHECKPOINTS,
            help="Go on from a checkpoint: its path, 'auto' for the newest whole one of --save, or 'none'.",
        ),
    ] = AUTO
    log_every: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(group=_REPORTS, help="Number of steps between two printed losses."),
    ] = 10
    log: Annotated[
        Path | None,
        Option(
            group=_REPORTS,
            help="Add a JSON object for each report to the lines of this file.",
            is_of_one_rank=True,
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        Option(
            group=_REPORTS,
            help="Write the reports for TensorBoard to this folder.",
            is_of_one_rank=True,
        ),
    ] = None
    machine: Annotated[
        str | None,
        Option(
            group=_REPORTS,
            help="The machine, as in `zeroir simulate`, for the MFU. [default: known from the name of the GPU]",
            is_of_one_rank=True,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        Option(
            group=_REPORTS,
            help="Write the beginning and the end of every op of the last step, on all ranks, for ui.perfetto.dev.",
        ),
    ] = None
    as_json: Annotated[
        bool,
        Option(
            group=_REPORTS,
            flag="--json",
            help="Print one JSON object per line.",
            is_of_one_rank=True,
        ),
    ] = False
    model: MovedModel = None
    allow_model_change: AllowModelChange = False
    kernels: Kernels = "eager"
    timeout_s: Annotated[
        int,
        Field(ge=SHORTEST_TIMEOUT_S, le=LONGEST_TIMEOUT_S),
        Option(
            name="timeout",
            group=JOB,
            help="Seconds to wait in a collective for a rank that is alive; after a fifth, at most 60, without a sign "
            "of life from a rank the job ends.",
        ),
    ] = TIMEOUT_S
    cuda_graphs: Annotated[
        bool,
        Option(group=JOB, help="On a GPU, launch whole sections as CUDA graphs if possible."),
    ] = False
    self_check: Annotated[
        bool,
        Option(
            group=JOB,
            help="Compare each distinct kernel with its operators, on random numbers, before training.",
        ),
    ] = True


def make_run_options(values: Mapping[str, object]) -> RunOptions:
    """Validate the options of a run, by flat name.

    Raises:
        UserError: on the first that is wrong or has no effect.
    """
    if values.get("save") is None:
        for name in ("save_every", "keep", "keep_best"):
            if values.get(name) is not None:
                flag = RunOptions.rows()[name].flag
                raise UserError(
                    f"{flag} has an effect only with --save, which names the folder of the checkpoints."
                )
        values = {name: value for name, value in values.items() if name != "save"}
    options = RunOptions.from_flat(values)
    save, eval_every = options.save, options.eval_every
    if save is None or save.keep_best is None:
        return options
    if save.keep is None:
        raise UserError(
            "--keep-best has an effect only with --keep, because all checkpoints are kept without it."
        )
    if save.keep_best != _EVAL_LOSS:
        return options
    if eval_every is None:
        raise UserError("--keep-best eval_loss needs evaluations: add --eval-every.")
    if save.every is not None and save.every % eval_every:
        raise UserError(
            f"--keep-best eval_loss needs an evaluation at each step that is saved: make --save-every ({save.every}) a "
            f"multiple of --eval-every ({eval_every})."
        )
    return options
