"""Whole runs of a program in lockstep, from given values: the results that other ways of running it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir.program import Program
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.lockstep import Lockstep
from zeroir.runtime.weights import WeightFunction
from zeroir.torch_ops.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepResult:
    """``losses[step][rank]``; ``state[flat, quantity]``, unsharded; ``skipped[step]``, whether the step was skipped."""

    losses: Sequence[Sequence[float]]
    state: Mapping[tuple[str, str], Tensor]
    skipped: Sequence[bool]
    lockstep: Lockstep


def run_lockstep(
    program: Program,
    *,
    initial: Mapping[str, Tensor],
    inputs: Sequence[Sequence[Sequence[Batch]]],
    seed: int = 0,
    schedule_seed: int = 0,
    kernels: KernelBackend = KernelBackend.EAGER,
    weight: WeightFunction | None = None,
) -> LockstepResult:
    """Run a program from given values: ``inputs[step][rank][micro_step]`` are batches.

    Raises:
        InternalError: where the program uses an unallocated buffer, its streams deadlock, or ranks end with different
            state.
    """
    lockstep = Lockstep(
        program, seed=seed, schedule_seed=schedule_seed, kernels=kernels, weight=weight
    )
    lockstep.initialise_flats(initial)
    losses: list[list[float]] = []
    skipped: list[bool] = []
    for batches in inputs:
        results = lockstep.step(batches)
        losses.append([float(result.loss) for result in results])
        skips = {result.is_skipped is not None and bool(result.is_skipped) for result in results}
        if len(skips) != 1:
            raise InternalError("some ranks skipped the step and some did not")
        skipped.append(skips.pop())
    return LockstepResult(
        losses=losses, state=lockstep.full_state(), skipped=skipped, lockstep=lockstep
    )
