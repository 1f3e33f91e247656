"""The options of ``zeroir run`` and the rules on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zeroir.api.keywords import OffloadKeywords
from zeroir.errors import UserError

AUTO: Final = "auto"
NONE: Final = "none"

TIMEOUT_S: Final = 300
SHORTEST_TIMEOUT_S: Final = 30
"""A rank that prepares something for the others tells them every 20 seconds that it still does."""
LONGEST_TIMEOUT_S: Final = 7 * 24 * 3600

TENSORBOARDS: Final = ("tensorboard", "tensorboardX")
"""Packages that write TensorBoard's files; the first one that is installed does."""

_METRICS: Final = ("loss", "eval_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Where and when checkpoints are saved, and which are kept: ``keep`` newest ones and that with the lowest metric.

    ``every`` is None for one checkpoint at the end, and ``keep`` for all.
    """

    folder: str
    every: int | None = None
    keep: int | None = None
    keep_best: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything but the program that ``zeroir run`` is given; see its help.

    ``steps`` counts from the beginning of training, so a resumed run takes those that are left. ``micro_steps`` is None
    for as many as the program was compiled with, and ``order`` for their order there. ``offload`` are the options of
    what is kept outside device memory that replace the program's own; ``optimizer_bits`` does, too, but the model is
    traced again for it. ``log`` is a file of JSON lines and ``tensorboard`` a folder that reports are added to;
    ``machine`` is one of `zeroir simulate`.
    """

    steps: int
    micro_steps: int | None = None
    order: str | None = None
    offload: OffloadKeywords = field(default_factory=OffloadKeywords)
    optimizer_bits: int | None = None
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    save: SaveOptions | None = None
    resume: str = AUTO
    model: str | None = None
    allow_model_change: bool = False
    log: Path | None = None
    tensorboard: Path | None = None
    machine: str | None = None
    check_finite: bool = False
    trace: Path | None = None
    kernels: str = "eager"
    timeout_s: int = TIMEOUT_S
    cuda_graphs: bool = False
    self_check: bool = True
    as_json: bool = False


def save_options(
    folder: str | None,
    every: int | None,
    keep: int | None,
    keep_best: str | None,
    eval_every: int | None,
) -> SaveOptions | None:
    """The options of ``--save``, ``--save-every``, ``--keep`` and ``--keep-best``; None without ``--save``.

    Raises:
        UserError: where one of them has no effect.
    """
    if folder is None:
        for name, value in (("save-every", every), ("keep", keep), ("keep-best", keep_best)):
            if value is not None:
                raise UserError(
                    f"--{name} has an effect only with --save, which names the folder of the checkpoints."
                )
        return None
    if keep_best is not None:
        if keep is None:
            raise UserError(
                "--keep-best has an effect only with --keep, because all checkpoints are kept without it."
            )
        if keep_best not in _METRICS:
            raise UserError(
                f"There is no metric '{keep_best}': choose {' or '.join(_METRICS)} for --keep-best."
            )
        if keep_best == "eval_loss" and eval_every is None:
            raise UserError("--keep-best eval_loss needs evaluations: add --eval-every.")
        if keep_best == "eval_loss" and every is not None and eval_every and every % eval_every:
            raise UserError(
                f"--keep-best eval_loss needs an evaluation at each step that is saved: make --save-every ({every}) a "
                f"multiple of --eval-every ({eval_every})."
            )
    return SaveOptions(folder=folder, every=every, keep=keep, keep_best=keep_best)
