"""Trainings that real ranks carry out, each with the run in lockstep whose bits it must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from tests.runtime.support import (
    Ranks,
    initial_flats,
    lowered,
    random_batches,
    require_run,
    require_success,
)
from tests.support.lockstep import LockstepResult, run_lockstep
from tests.support.lowering import applied
from tests.support.offloads import OFFLOADS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.ir.text import print_program
from zeroir.passes.base import Pass
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.torch_ops.batches import Batch

RANKS: Final = 3
BUCKET_BYTES: Final = 6_000
"""Two or three of the flats of the small program, and an FP32 one with a BF16 one."""
PAGES: Final = PageOptimizer(device_bytes=17_000, page_bytes=2048)
"""Pages for a part of the 28,672 bytes of states that each rank of the paged program has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A program and the passes that schedule it; without them, it runs in lockstep at ``reference_stage``.

    ``name`` is the name of the file of its results, without the suffix.
    """

    name: str
    logical: Program
    passes: tuple[Pass, ...]
    reference_stage: int
    steps: int = 4
    micro_steps: int = 1

    def scheduled(self) -> Program:
        """The program that ranks carry out."""
        return applied(self.logical, self.passes)

    def text_file(self, folder: Path) -> Path:
        """Where ranks find the scheduled program, since to parse it takes a tenth of the time of the passes."""
        return folder / f"{self.name}.txt"

    def batches(self) -> list[list[list[Batch]]]:
        """``[step][rank][micro_step]``."""
        return random_batches(self.steps, RANKS, self.micro_steps)

    def reference(self) -> LockstepResult:
        """The results that it must have."""
        return run_lockstep(
            lowered(self.logical, self.reference_stage, RANKS),
            initial=initial_flats(self.logical),
            inputs=self.batches(),
        )


def overlapped() -> Iterator[Training]:
    """Merged collectives and an update in the backward, with flats of two dtypes in each block."""
    logical = mlp(blocks=3, precision="bf16", keep_fp32=True)
    for stage in range(4):
        yield Training(
            name=f"stage {stage}",
            logical=logical,
            passes=tuple(for_stage(stage, RANKS, bucket=BUCKET_BYTES, overlap_update=True)),
            reference_stage=0,
            steps=6,
        )


def offloaded(*names: str) -> Iterator[Training]:
    """Those of ``OFFLOADS``, in a program deep enough that values are away from the device.

    What moves everything does so at every stage; the others take turns at the four.
    """
    for number, name in enumerate(names):
        # Of four steps, two are clipped.
        clip = 10.0 if "speculative" in name else None
        logical = mlp(blocks=4, precision="bf16", micro_steps=2, clip=clip)
        stages = (number % 2, 3 - number % 2) if name.startswith("everything") else (number % 4,)
        for stage in range(4) if name == "everything" else stages:
            passes = for_stage(stage, RANKS, overlap_update=True)
            yield Training(
                name=f"{name}, stage {stage}",
                logical=logical,
                passes=(*passes, *OFFLOADS[name], PlanMemory()),
                reference_stage=stage,
                micro_steps=2,
            )


def unit_by_unit() -> Iterator[Training]:
    """Micro-batches unit by unit, all of a step at every stage, and in groups; everything is away from the device."""
    logical = mlp(blocks=3, precision="bf16", micro_steps=4)
    whole = OrderByLayer(micro_batches=4, whole_step=True)
    groups = OrderByLayer(micro_batches=2)
    # A whole step adds up gradients on each rank at every stage, as stage 0 does.
    for stage, order, reference_stage in (*((s, whole, 0) for s in range(4)), (3, groups, 3)):
        passes = for_stage(stage, RANKS, overlap_update=True, order=order)
        yield Training(
            name=f"groups of {order.micro_batches}, stage {stage}",
            logical=logical,
            passes=(*passes, *OFFLOADS["everything"], PlanMemory()),
            reference_stage=reference_stage,
            micro_steps=4,
        )


def offloaded_with_averages() -> Iterator[Training]:
    """An optimizer on the host, with flats of two dtypes in each block and moving averages.

    Without clipping, the update is in the backward.
    """
    ways: dict[str, tuple[Pass, ...]] = {
        "optimizer": (OffloadOptimizer(),),
        "optimizer and gradients": (OffloadOptimizer(), OffloadGradients()),
    }
    for clip in (None, 0.5):
        logical = mlp(blocks=3, precision="bf16", keep_fp32=True, ema=0.9, clip=clip)
        for stage, (name, offload) in product((0, 3), ways.items()):
            passes = for_stage(stage, RANKS, overlap_update=clip is None)
            yield Training(
                name=f"{name}, clip={clip}, stage {stage}",
                logical=logical,
                passes=(*passes, *offload, SaveState(), PlanMemory()),
                reference_stage=0,
            )


def paged() -> Iterator[Training]:
    """Paged optimizer states, with the update after the backward and in it."""
    logical = mlp(blocks=2, dim=64)
    for stage, is_overlapped in product(range(4), (False, True)):
        passes = for_stage(stage, RANKS, overlap_update=is_overlapped)
        yield Training(
            name=f"overlap_update={is_overlapped}, stage {stage}",
            logical=logical,
            passes=(*passes, PAGES, SaveState(), PlanMemory()),
            reference_stage=0,
        )


TRAININGS: Final[Mapping[str, Callable[..., Iterator[Training]]]] = {
    function.__name__: function
    for function in (overlapped, offloaded, offloaded_with_averages, unit_by_unit, paged)
}
"""All of them, by the name that ranks get."""


def assert_ranks_compute_the_same(folder: Path, backend: str, name: str, *more: str) -> None:
    """Let ranks carry out the trainings of a name; each must have the losses and the state of its reference."""
    for training in TRAININGS[name](*more):
        training.text_file(folder).write_text(print_program(training.scheduled()))
    ranks = Ranks(RANKS, folder, backend, name, *more, module="tests.numerics.workers")
    require_success(ranks.wait())
    references: dict[tuple[Program, int], LockstepResult] = {}
    for training in TRAININGS[name](*more):
        key = training.logical, training.reference_stage
        if key not in references:
            references[key] = training.reference()
        expected = references[key]
        losses = [of_ranks[0] for of_ranks in expected.losses]
        require_run(folder / f"{training.name}.safetensors", losses, expected.state)
