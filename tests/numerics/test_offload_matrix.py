"""Whatever is kept outside device memory, the numbers are those of the same run without, bit for bit.

Each case trains twice, with and without what it keeps elsewhere, saves both in the middle, and continues each of them
from the checkpoint of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from tests.runtime.support import begun, random_batches, require_same
from tests.support.covering import covering
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.config import CompileOptions, make_options
from zeroir.ir.program import Program
from zeroir.passes.base import Pass
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.passes.pipelines import for_options
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import Batch

EVERYTHING: Final = {"offload": "optimizer,gradients,parameters,activations"}
PAGES: Final = {"page_optimizer": "16KiB", "page_bytes": 8192}
ELSEWHERE: Final[Mapping[str, Mapping[str, object]]] = {
    "optimizer": {"offload": "optimizer"},
    "half-optimizer": {"offload": "optimizer", "offload_fraction": 0.5},
    "gradients": {"offload": "gradients"},
    "parameters": {"offload": "parameters"},
    "activations": {"offload": "activations"},
    "some-parameters": {"offload": "parameters", "offload_units": "blocks.1,root.post"},
    "optimizer-gradients": {"offload": "optimizer,gradients"},
    "optimizer-parameters": (both := {"offload": "optimizer,parameters"}),
    "some-optimizer-all-parameters": {**both, "offload_units": "optimizer:blocks.*"},
    "everything": EVERYTHING,
    "speculative-optimizer": {"offload": "optimizer", "speculate": True},
    "speculative-everything": {**EVERYTHING, "speculate": True},
    "everything-on-disk": {**EVERYTHING, "offload_to": "disk", "host_cache": "8KiB"},
    "optimizer-on-disk-rest-on-host": {
        **EVERYTHING,
        "offload_to": "optimizer=disk,activations=host",
    },
    "parameters-on-disk-optimizer-on-host": {**both, "offload_to": "parameters=disk"},
    "pages": PAGES,
    "pages-parameters": {**PAGES, "offload": "parameters"},
    "pages-parameters-on-disk": {**PAGES, "offload": "parameters", "offload_to": "disk"},
    "eight-bit-optimizer": (coded := {"optimizer_bits": 8, "offload": "optimizer"}),
    "eight-bit-optimizer-on-disk": {**coded, "offload_to": "disk"},
    "eight-bit-pages": {"optimizer_bits": 8, "page_optimizer": "8KiB", "page_bytes": 4096},
}
"""What a case keeps outside device memory: options by the name of the case."""

NUMBERS: Final = frozenset({"optimizer_bits"})
"""Options of these that change the numbers, so that the run without the others has them, too."""

CLIPS: Final = (None, 0.5, 4.0)
"""The largest norms: the first clips every step, the second clips the first step and none of the last."""

OVERFLOWING: Final = {"none": (), "one": (1,), "all": None}
"""The ranks that overflow in the second and the third step; None for all."""


@dataclass(frozen=True, slots=True)
class Case:
    """A training and what it keeps outside device memory."""

    kept: str
    stage: int
    world_size: int
    precision: str
    clip: float | None
    micro_steps: int
    overflow: str

    def __str__(self) -> str:
        parts = [self.kept, f"stage-{self.stage}", f"{self.world_size}-ranks", self.precision]
        parts += [f"clip-{self.clip:g}"] if self.clip is not None else []
        parts += [f"k-{self.micro_steps}"] if self.micro_steps > 1 else []
        parts += [f"{self.overflow}-overflow"] if self.overflow != "none" else []
        return "-".join(parts)

    @property
    def is_possible(self) -> bool:
        """Whether there is such a training.

        FP16 alone overflows, one rank of one is all, and only where a step may be clipped or skipped is there a guess.
        """
        is_speculative = "speculate" in ELSEWHERE[self.kept]
        if is_speculative and self.clip is None and self.precision != "fp16":
            return False
        if self.overflow == "none":
            return True
        return self.precision == "fp16" and (self.overflow == "all" or self.world_size > 1)

    def options(self, kept: Mapping[str, object]) -> CompileOptions:
        own = {key: value for key, value in asdict(self).items() if key not in ("kept", "overflow")}
        return make_options({**own, **kept})

    def batches(self) -> list[list[list[Batch]]]:
        steps = random_batches(4, self.world_size, self.micro_steps)
        ranks = OVERFLOWING[self.overflow]
        for step in steps[1:3]:
            for rank in range(self.world_size) if ranks is None else ranks:
                step[rank][-1] = {"x": torch.full((4, 6), 3e4)}
        return steps


def _possible(kept: Sequence[str]) -> list[Case]:
    """Every case."""
    chosen = product(
        kept, range(4), range(1, 5), ("fp32", "bf16", "fp16"), CLIPS, (1, 3), OVERFLOWING
    )
    return [case for case in starmap(Case, chosen) if case.is_possible]


CASES: Final = covering(_possible(tuple(ELSEWHERE)), astuple)
_QUICK: Final = 2
"""The first cases meet the most values, so these few are in the fast suite."""


def program(logical: Program, options: CompileOptions) -> Program:
    """The scheduled program, in which values of any size are offloaded, and pages are a quarter as large."""
    return applied(logical, tuple(map(_smaller, for_options(options))))


def _smaller(step: Pass) -> Pass:
    match step:
        case OffloadActivations():
            return replace(step, smallest=0)
        case PageOptimizer():
            device_bytes, page_bytes = step.device_bytes // 4, step.page_bytes // 4
            return replace(step, device_bytes=device_bytes, page_bytes=page_bytes)
        case _:
            return step


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if number < _QUICK else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_what_is_kept_elsewhere_changes_no_bit(case: Case, tmp_path: Path) -> None:
    settings = ELSEWHERE[case.kept]
    without = {key: value for key, value in settings.items() if key in NUMBERS}
    logical = mlp(
        precision=case.precision,
        clip=case.clip,
        micro_steps=case.micro_steps,
        has_codes="optimizer_bits" in without,
    )
    programs = {
        "without": program(logical, case.options(without)),
        "with": program(logical, case.options(settings)),
    }
    assert programs["with"].buffers != programs["without"].buffers
    steps = case.batches()
    results = {}
    for number, (name, scheduled) in enumerate(programs.items()):
        lockstep = begun(Lockstep(scheduled, schedule_seed=number))
        first = trained(lockstep, steps[:2])
        lockstep.save(str(tmp_path / name))
        results[name] = first, trained(lockstep, steps[2:]), lockstep.full_state()
    expected = results["without"]
    assert_same(results["with"], expected)
    for name, other in (("with", "without"), ("without", "with")):
        lockstep = Lockstep(programs[name], schedule_seed=7)
        lockstep.load(str(tmp_path / other))
        assert_same((expected[0], trained(lockstep, steps[2:]), lockstep.full_state()), expected)
    skipped = [is_skipped for _, is_skipped in (*expected[0], *expected[1])]
    assert any(skipped) == (case.overflow != "none")


Losses = list[tuple[float, bool]]
Results = tuple[Losses, Losses, Mapping[tuple[str, str], Tensor]]
"""The losses before and after the checkpoint, each with whether the step was skipped, and the last state."""


def trained(lockstep: Lockstep, steps: Sequence[Sequence[Sequence[Batch]]]) -> Losses:
    """The losses of all ranks and steps."""
    results = [result for step in steps for result in lockstep.step(step)]
    return [(float(result.loss), bool(result.is_skipped)) for result in results]


def assert_same(found: Results, expected: Results) -> None:
    for losses, expected_losses in zip(found[:2], expected[:2], strict=True):
        assert [repr(loss) for loss in losses] == [repr(loss) for loss in expected_losses]
    require_same(found[2], expected[2])
