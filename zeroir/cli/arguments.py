"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from cyclopts.validators import Number

from zeroir.ir.limits import MOST_COUNT, MOST_LOCAL_RANKS

Model = Annotated[
    str,
    Parameter(
        help="MODEL.PY or PACKAGE.MODULE, which defines model() and batch(). :FACTORY after it names another function "
        "than model(), and :FACTORY(layers=12) gives it arguments."
    ),
]
ProgramFile = Annotated[Path, Parameter(help="A compiled program (.zir).")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON document.")]
InCounts = Number(gte=1, lte=MOST_COUNT)
InSeeds = Number(gte=-(2**63), lt=2**63)
"""The seeds that every function of torch accepts."""
At = Annotated[
    str | None,
    Parameter(
        help="Sizes of the batches, such as length=2048,rows=4, for a program with dims. [default: the largest]"
    ),
]
SizesHistogram = Annotated[
    str | None,
    Parameter(
        name="--histogram",
        help="How often batches have which sizes, for a program with dims: a CSV file with columns such as "
        "length,rows,count, or `batches` for the first 1,000 of the model file's batches().",
    ),
]
Ranks = Annotated[
    int | None,
    Parameter(
        validator=Number(gte=1, lte=MOST_LOCAL_RANKS),
        help="Start this many local ranks with torchrun.",
    ),
]
Machine = Annotated[
    str,
    Parameter(
        help="The machine: 1xh100-pcie, 8x4090-pcie, cpu-local, dgx-2, dgx-a100-80g, dgx-h100, hgx-h200, or a "
        "TOML file."
    ),
]
DEFAULT_MACHINE: Final = "dgx-h100"
