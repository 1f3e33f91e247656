"""The options of ``zeroir profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from zeroir.api.running.shared_options import AllowModelChange, Kernels, MovedModel, Seed
from zeroir.config.table import Option, OptionObject
from zeroir.ir.limits import MOST_COUNT


class ProfileOptions(OptionObject):
    """What is measured, and how, beside the program, the machine file that is written, and the sizes of batches."""

    command: ClassVar[str | None] = "profile"

    machine: Annotated[
        str, Option(help="The machine that gives the figures that are not measured.")
    ] = "cpu-local"
    disk: Annotated[
        Path | None,
        Option(help="Measure the disk of this folder, too. [default: no disk is measured]"),
    ] = None
    rounds: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(help="Number of rounds; each times some steps and records one."),
    ] = 20
    seed: Seed = 0
    model: MovedModel = None
    allow_model_change: AllowModelChange = False
    kernels: Kernels = "eager"
    as_json: Annotated[bool, Option(flag="--json", help="Print one JSON document.")] = False
