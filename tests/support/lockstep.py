"""Whole runs of a program in lockstep, from given values: the results that other ways of running it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir.program import Program
from zeroir.runtime.engine.results import RankResult
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.training.micro_batch_weights import WeightFunction
from zeroir.torch_ops.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepResult:
    """``losses[step][rank]``; ``state[flat, quantity]``, unsharded; ``skipped[step]``, whether the step was skipped.

    ``told[step][rank]`` is everything else that the step reports, by name, without what the program does not report.
    """

    losses: Sequence[Sequence[float]]
    state: Mapping[tuple[str, str], Tensor]
    skipped: Sequence[bool]
    told: Sequence[Sequence[Mapping[str, float]]]
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
    lr_factor: float = 1.0,
) -> LockstepResult:
    """Run a program from given values: ``inputs[step][rank][micro_step]`` are batches.

    Before each step the learning rates of all groups are multiplied by ``lr_factor``.

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
    told: list[list[dict[str, float]]] = []
    for batches in inputs:
        for group in lockstep.optimizer.param_groups if lr_factor != 1 else ():
            group["lr"] *= lr_factor
        results = lockstep.step(batches)
        losses.append([float(result.loss) for result in results])
        told.append([_told(result) for result in results])
        skips = {result.is_skipped is not None and bool(result.is_skipped) for result in results}
        if len(skips) != 1:
            raise InternalError("some ranks skipped the step and some did not")
        skipped.append(skips.pop())
    return LockstepResult(
        losses=losses,
        state=lockstep.full_state(),
        skipped=skipped,
        told=told,
        lockstep=lockstep,
    )


def _told(result: RankResult) -> dict[str, float]:
    values = {
        "mean_loss": result.mean_loss,
        "weight": result.weight,
        "grad_norm": result.grad_norm,
        "is_redone": result.is_redone,
    }
    return {name: float(value) for name, value in values.items() if value is not None}
