"""Zeroir's own contestants: its stages, its kernels, and stage 3 with one technique left out each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import zeroir
from tools.peers import gpt
from zeroir.api.compiled import CompiledProgram
from zeroir.api.keywords import CompileKeywords
from zeroir.api.model_of_program import load_model
from zeroir.config.communication import Communication
from zeroir.config.steps import Recompute
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine import engine as engines
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.kernels.choice import KernelBackend

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of zeroir's own contestants: the options that compile it, and the settings of its engine."""

    options: CompileKeywords
    kernels: KernelBackend = KernelBackend.EAGER
    backend: Backend | None = None
    keeps_memory: bool = True

    @property
    def is_alone(self) -> bool:
        """Whether every process trains by itself."""
        return self.options["world_size"] == 1

    def compile(self) -> CompiledProgram:
        """The program of the comparison's GPT."""
        return zeroir.compile(gpt.__file__, **self.options)


def variants(world_size: int) -> dict[str, Variant]:
    """Zeroir's own contestants: the stages, with compiled kernels, and stage 3 with one technique left out each."""
    inductor = KernelBackend.INDUCTOR
    contestants = {"zeroir alone": Variant(options={"stage": 0, "world_size": 1})}
    for stage in range(4):
        contestants[f"zeroir {stage}"] = Variant(options={"stage": stage, "world_size": world_size})
    for name, variant in list(contestants.items()):
        contestants[f"{name} inductor"] = replace(variant, kernels=inductor)
    whole = contestants["zeroir 3"]
    contestants["zeroir 3 again"] = whole
    without: dict[str, CompileKeywords] = {
        "select-saved": {"recompute": Recompute(select_saved=False)},
        "prefetch": {"prefetch": 0},
        "elided gathers": {"communication": Communication(elide=False)},
        "overlapped update": {"communication": Communication(overlap_update=False)},
    }
    for technique, options in without.items():
        contestants[f"zeroir 3 without {technique}"] = replace(
            whole, options={**whole.options, **options}
        )
    contestants["zeroir 3 without shared memory"] = replace(whole, backend=Backend.GLOO)
    contestants["zeroir 3 without kept memory"] = replace(whole, keeps_memory=False)
    return contestants


def build(program: Path, variant: Variant) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """The step of a compiled program on this rank."""
    compiled = zeroir.load(program)
    model_file = load_model(compiled.artifact, compiled.path)
    if not variant.keeps_memory:
        mock.patch.object(engines, "keep_freed_memory", return_value=False).start()
    engine = engines.Engine(
        compiled.program,
        EngineSettings(backend=variant.backend, kernels=variant.kernels, seed=SEED),
    )
    engine.initialise(model_file.model, SEED)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tensor(engine.step(batch).loss)

    return step
