"""Options that several commands on a program take, each declared once."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from zeroir.config.table import Option

TRAINING: Final = "Training"
JOB: Final = "Job and kernels"

Seed = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63),
    Option(group=TRAINING, help="Seed of weights, data and dropout."),
]
"""A seed that every function of torch accepts."""

MovedModel = Annotated[
    str | None,
    Option(
        group=JOB,
        help="The model file, if it has moved, or was compiled from an absolute path or one that leads upwards.",
        is_of_one_rank=True,
    ),
]

AllowModelChange = Annotated[
    bool,
    Option(
        group=JOB,
        help="Run even if the model file changed since compilation.",
        is_of_one_rank=True,
    ),
]

KernelsName = Literal["eager", "inductor"]

Kernels = Annotated[
    KernelsName,
    Option(
        group=JOB,
        help="The kernels of segments: torch's operators one by one, or code compiled once and kept on disk.",
    ),
]
