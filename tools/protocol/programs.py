"""The programs whose protocol is searched: 2 ranks, 2 micro-steps, every stage and every kind of offload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tests.support.artifacts import artifact_of
from tools.checker.program import Declarations, PlacedSection, visits
from tools.checker.reading import read_bytes
from zeroir.api.compiling import compile_with
from zeroir.artifact.file import to_bytes
from zeroir.config import make_options
from zeroir.ir.program import Program

_MODEL: Final = "tests/support/models/two_units.py"
_DISK: Final = "disk:/tmp/zeroir-protocol"  # programs name it, and nobody runs them
_ALL: Final = "optimizer,gradients,parameters"

KINDS: Final[Mapping[str, Mapping[str, object]]] = {
    "nothing": {},
    "nothing; fp16, clipped": {"precision": "fp16", "clip": 1.0},
    "nothing; order by layer": {"order": "layer"},
    "optimizer": {"offload": "optimizer"},
    "gradients": {"offload": "gradients"},
    "optimizer, gradients": {"offload": "optimizer,gradients"},
    "the same, speculative": {"offload": "optimizer,gradients", "clip": 1.0, "speculate": True},
    "parameters": {"offload": "parameters"},
    "optimizer, gradients, parameters": {"offload": _ALL},
    "activations of 4 units": {"offload": "activations"},
    "optimizer on disk": {"offload": "optimizer", "offload_to": _DISK},
    "optimizer, parameters on disk": {"offload": _ALL, "offload_to": _DISK},
    "pages of the optimizer": {"page_optimizer": "8KiB", "page_bytes": "4KiB"},
}
"""The options of each kind, by what is kept outside the device."""


def compiled(kind: str, stage: int) -> tuple[Program, Program]:
    """Return the program of a kind at a stage, and its logical program."""
    # An activation is offloaded while two other units compute.
    model = f"{_MODEL}:model(units=4)" if kind.startswith("activations") else _MODEL
    options = {"world_size": 2, "micro_steps": 2, "stage": stage, **KINDS[kind]}
    made = compile_with(model, make_options(options))
    return made.program, made.logical


def declarations(scheduled: Program, logical: Program) -> Declarations:
    """Return the program as the second checker reads it in the bytes of its file."""
    return Declarations(read_bytes(to_bytes(artifact_of(scheduled, logical))).scheduled)


def runs(names: Declarations) -> Iterator[list[PlacedSection]]:
    """Yield steps of two, one and two micro-steps, and one of two with evaluations and saves where they may be."""
    many = 2 if "micro_step" in names.sections else 1
    yield visits(names, False, (many, 1, many))
    yield visits(names, True, (many,))
