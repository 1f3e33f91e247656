"""Running programs on lockstep from given values, and comparing what comes out bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.support.examples import IS_THOROUGH
from tests.support.lockstep import LockstepResult, run_lockstep
from zeroir.ir.contents import FlatContent
from zeroir.ir.program import Program
from zeroir.torch_ops.batches import Batch

STEPS = 3 if IS_THOROUGH else 2
"""The second begins with what the first has left."""
Inputs = list[list[list[Batch]]]


def initial(program: Program, seed: int = 0) -> Mapping[str, Tensor]:
    """Small random parameters, zero where there is padding, by the first buffer that holds each flat's."""
    flats: set[str] = set()
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for buffer in program.buffers:
        match buffer.holds:
            case FlatContent(quantity="param", flat=name) if name not in flats:
                flats.add(name)
                value = torch.zeros(program.flat_by_name[name].padded_numel)
                for slot in program.flat_by_name[name].slots:
                    part = torch.randn(slot.numel, generator=generator) * 0.3
                    value[slot.offset : slot.offset + slot.numel] = part
                found[buffer.name] = value
            case _:
                pass
    return found


def inputs(program: Program, world_size: int, micro_steps: int, *, is_same: bool = False) -> Inputs:
    """Batches by step, rank and micro-step; the same on every rank if asked."""
    generator = torch.Generator().manual_seed(1)
    (binding,) = program.inputs
    found: Inputs = []
    for _ in range(STEPS):
        of_ranks: list[list[Batch]] = []
        for rank in range(world_size):
            if is_same and rank > 0:
                of_ranks.append(of_ranks[0])
                continue
            drawn = [torch.randn(binding.shape, generator=generator) for _ in range(micro_steps)]
            of_ranks.append([{binding.path: batch} for batch in drawn])
        found.append(of_ranks)
    return found


def run(program: Program, batches: Inputs, schedule_seed: int = 0) -> LockstepResult:
    return run_lockstep(
        program, initial=initial(program), inputs=batches, schedule_seed=schedule_seed
    )


def assert_equal(
    result: LockstepResult, expected: LockstepResult, ranks: Sequence[int], what: str
) -> None:
    assert result.skipped == expected.skipped, what
    for mine, theirs in zip(result.losses, expected.losses, strict=True):
        assert mine == [theirs[rank] for rank in ranks], what
    assert result.state.keys() == expected.state.keys(), what
    for key, value in result.state.items():
        assert torch.isfinite(value).all(), (what, key)
        numel = min(value.numel(), expected.state[key].numel())
        assert torch.equal(value[:numel], expected.state[key][:numel]), (what, key)


def assert_same(
    program: Program,
    plain: Program,
    micro_steps: int = 1,
    seeds: Sequence[int] = (0,),
    batches: Inputs | None = None,
) -> LockstepResult:
    """Compare two programs for equally many ranks, the first one in these orders; what it leaves in the last one."""
    ranks = plain.mesh.world_size
    batches = inputs(plain, ranks, micro_steps) if batches is None else batches
    result = expected = run(plain, batches)
    for seed in seeds:
        result = run(program, batches, seed)
        assert_equal(result, expected, range(ranks), f"{program.passes}, order {seed}")
    return result
