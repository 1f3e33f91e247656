"""Logical programs and pipelines in every combination."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.base import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A logical program and what to make of it."""

    blocks: int
    dim: int
    precision: str
    optimizer: str
    micro_steps: int
    clip: float | None
    tied: bool
    keep_fp32: bool
    stage: int
    world_size: int
    elide: bool
    distance: int
    live: int
    bucket: int = 0

    def logical(self) -> Program:
        return mlp(
            blocks=self.blocks,
            dim=self.dim,
            precision=self.precision,
            optimizer=self.optimizer,
            micro_steps=self.micro_steps,
            clip=self.clip,
            tied=self.tied,
            keep_fp32=self.keep_fp32,
        )

    def passes(self) -> tuple[Pass, ...]:
        return for_stage(
            self.stage,
            self.world_size,
            elide=self.elide,
            bucket=self.bucket,
            distance=self.distance,
            live=self.live,
        )

    def scheduled(self) -> Program:
        """The program after the passes, not verified: for laws about many programs."""
        return applied(self.logical(), self.passes())


def cases(
    stages: tuple[int, ...] = (0, 1, 2, 3), world_sizes: tuple[int, int] = (1, 4)
) -> st.SearchStrategy[Case]:
    """Every combination; dim 16 fills its flats to the last of 256 elements, 8 does not."""
    return st.builds(
        Case,
        blocks=st.integers(1, 3),
        dim=st.sampled_from([8, 16]),
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        optimizer=st.sampled_from(["sgd", "momentum", "adam", "adamw"]),
        micro_steps=st.sampled_from([1, 2]),
        clip=st.sampled_from([None, 1.0]),
        tied=st.booleans(),
        keep_fp32=st.booleans(),
        stage=st.sampled_from(stages),
        world_size=st.integers(*world_sizes),
        elide=st.booleans(),
        distance=st.integers(0, 3),
        live=st.integers(1, 3),
    )
