"""Any number of micro-steps at run time, and weights of micro-batches: the same bits however a step is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.support import begun, initial_flats, parameters_of, random_batches, require_same
from tests.runtime.workers_cases import weight_of_values
from tests.support.covering import covering
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import Batch

COUNTS = (2, 1, 3)
"""Micro-steps of each step."""
Steps = list[list[list[Batch]]]
"""``[step][rank][micro_step]`` batches."""


def drawn(world_size: int, counts: Sequence[int] = COUNTS, seed: int = 1) -> Steps:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            [{"x": torch.randn(4, 6, generator=generator)} for _ in range(count)]
            for _ in range(world_size)
        ]
        for count in counts
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Losses by step and rank, and the final state."""

    losses: list[list[float]]
    state: Mapping[tuple[str, str], Tensor]
    lockstep: Lockstep

    def assert_equals(self, other: Trained) -> None:
        assert self.losses == other.losses
        require_same(self.state, other.state)


def train(
    program: Program,
    steps: Steps,
    *,
    one_by_one: bool = False,
    weight: Callable[[Batch], object] | None = None,
    schedule_seed: int = 0,
) -> Trained:
    lockstep = begun(Lockstep(program, schedule_seed=schedule_seed, weight=weight))
    losses: list[list[float]] = []
    for batches in steps:
        if one_by_one:
            count = len(batches[0])
            for index in range(count):
                lockstep.micro_step([own[index] for own in batches], is_last=index == count - 1)
            results = lockstep.update()
        else:
            results = lockstep.step(batches)
        losses.append([float(result.loss) for result in results])
    return Trained(losses=losses, state=lockstep.full_state(), lockstep=lockstep)


def program_of_one_rank(program: Program) -> Program:
    """Flats of all these programs begin with the same values."""
    return mlp(precision=program.options.texts["precision"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "clip", "world_size", "replicas"),
    [
        ("fp32", None, 3, None),
        ("fp32", None, 4, 2),
        ("bf16", 1.0, 1, None),
        ("bf16", 1.0, 3, None),
        ("bf16", 1.0, 4, 2),
        ("fp16", None, 4, None),
        ("fp16", None, 4, 2),
    ],
)
def test_a_step_is_the_same_however_it_is_called(
    precision: str, clip: float | None, world_size: int, replicas: int | None
) -> None:
    """Stages 0 and 1, and 2 and 3 with local sums, add over micro-steps first; 2 and 3 over ranks first."""
    logical = mlp(precision=precision, clip=clip, micro_steps=2)
    steps = drawn(world_size)
    first: dict[bool, Trained] = {}
    for stage in range(4):
        for is_local in (False, True) if stage >= 2 else (True,):
            for is_overlapped in (False, True):
                program = applied(
                    logical,
                    for_stage(
                        stage,
                        world_size,
                        replicas=replicas,
                        overlap_update=is_overlapped,
                        accumulate_locally=is_local and stage >= 2,
                    ),
                )
                at_once = train(program, steps, schedule_seed=stage)
                at_once.assert_equals(train(program, steps, one_by_one=True, schedule_seed=7))
                # On two axes, stages 0 and 1 sum whole gradients in another order.
                first.setdefault(is_local, at_once).assert_equals(at_once)


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_weights_of_one_change_nothing(micro_steps: int, is_overlapped: bool) -> None:
    steps = drawn(3, (micro_steps, micro_steps))
    for precision in ("fp32", "fp16"):
        for stage in range(4):
            plain, weighted = (
                applied(
                    mlp(precision=precision, micro_steps=micro_steps, is_weighted=is_weighted),
                    for_stage(stage, 3, overlap_update=is_overlapped),
                )
                for is_weighted in (False, True)
            )
            train(weighted, steps, weight=lambda _: 1).assert_equals(train(plain, steps))


def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    h = x @ parameters["pre.weight"].t()
    blocks = sum(name.endswith(".bias") for name in parameters)
    for i in range(blocks):
        weight, bias = parameters[f"blocks.{i}.weight"], parameters[f"blocks.{i}.bias"]
        h = F.relu(F.linear(h, weight, bias)) + h
    return F.mse_loss(h @ parameters["post.weight"].t(), x)


def replicas_of_torch(
    steps: Steps, weight: Callable[[Batch], float] = weight_of_values, clip: float | None = None
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Eager PyTorch: the gradient of Σ weight × loss, divided by Σ weight, with the sums of stage 0.

    One set of parameters stands for all the replicas, which never differ; gradients are added in rank order.
    """
    parameters: dict[str, Tensor] = {}
    flats = initial_flats(mlp())
    for flat in mlp().flats:
        for name, value in parameters_of(flat, flats[f"{flat.name}.param"]).items():
            parameters[name] = value.clone().requires_grad_()
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.01, fused=True)
    losses: list[list[float]] = []
    for ranks in steps:
        totals: dict[str, Tensor] = {}
        losses.append([])
        for batches in ranks:
            own: dict[str, Tensor] = {}
            loss_sum, weight_sum = torch.zeros(()), 0.0
            for batch in batches:
                assert isinstance(batch, dict)
                loss, factor = forward(parameters, batch["x"]), weight(batch)
                wanted = list(parameters.values())
                gradients = torch.autograd.grad(loss, wanted, torch.tensor(factor))
                for name, gradient in zip(parameters, gradients, strict=True):
                    own[name] = own[name] + gradient if name in own else gradient
                loss_sum = loss_sum + loss.detach() * factor
                weight_sum += factor
            losses[-1].append(float(loss_sum / weight_sum))
            for name, gradient in own.items():
                totals[name] = totals[name] + gradient if name in totals else gradient
        whole = sum(weight(batch) for batches in ranks for batch in batches)
        for name, parameter in parameters.items():
            parameter.grad = totals[name] / whole
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_stage_equals_eager_replicas_bit_for_bit(world_size: int) -> None:
    steps = random_batches(20, world_size)
    losses, parameters = replicas_of_torch(steps, lambda _: 1.0)
    for stage in range(4):
        trained = train(applied(mlp(), for_stage(stage, world_size)), steps, schedule_seed=stage)
        assert trained.losses == losses
        require_same(trained.lockstep.full_parameters(), parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 5e-3)]
)
def test_clipping_and_low_precision_follow_replicas(precision: str, tolerance: float) -> None:
    """Not bit for bit: clipping folds into one division, and 16-bit gradients are rounded."""
    steps = random_batches(20, 3)
    losses, _ = replicas_of_torch(steps, lambda _: 1.0, clip=0.5)
    trained = train(applied(mlp(precision=precision, clip=0.5), for_stage(3, 3)), steps)
    found, expected = torch.tensor(trained.losses), torch.tensor(losses)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_weighted_steps_equal_eager_replicas(world_size: int, is_overlapped: bool) -> None:
    steps = drawn(world_size, (2, 3, 1, 2))
    losses, parameters = replicas_of_torch(steps)
    logical = mlp(micro_steps=2, is_weighted=True)
    for stage in range(4):
        is_local = stage >= 2
        program = applied(
            logical,
            for_stage(stage, world_size, overlap_update=is_overlapped, accumulate_locally=is_local),
        )
        trained = train(program, steps, weight=weight_of_values)
        assert trained.losses == losses
        require_same(trained.lockstep.full_parameters(), parameters)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 1.0])
def test_weighted_steps_of_one_batch_equal_eager_replicas(clip: float | None) -> None:
    steps = drawn(3, (1, 1, 1))
    losses, parameters = replicas_of_torch(steps)
    for stage in range(4):
        program = applied(mlp(is_weighted=True, clip=clip), for_stage(stage, 3))
        trained = train(program, steps, weight=weight_of_values)
        assert trained.losses[0] == losses[0]
        if clip is None:
            assert trained.losses == losses
            require_same(trained.lockstep.full_parameters(), parameters)


def test_k_batches_are_one_batch_of_as_many_rows() -> None:
    """Where all sums are exact, k batches of b rows that weigh b, on any ranks, are one batch of k·b rows."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-2, 3, (8, 8), generator=generator).float()

    def trained(batch: int, world_size: int, pieces: Sequence[Sequence[Tensor]]) -> Lockstep:
        logical = mlp(
            batch=batch,
            features=8,
            dim=8,
            blocks=1,
            optimizer="sgd",
            micro_steps=2,
            is_weighted=True,
        )
        program = applied(logical, for_stage(3, world_size))
        lockstep = Lockstep(program, weight=lambda _: batch)
        flats = {
            name: (value * 8).round() / 4 for name, value in initial_flats(logical, seed=2).items()
        }
        lockstep.initialise_flats(flats)
        lockstep.step([[{"x": piece} for piece in own] for own in pieces])
        return lockstep

    whole = trained(8, 1, [[rows]]).full_parameters()
    quarters = [rows[start : start + 2] for start in range(0, 8, 2)]
    for pieces in ([quarters], [quarters[:2], quarters[2:]], [[quarter] for quarter in quarters]):
        require_same(trained(2, len(pieces), pieces).full_parameters(), whole)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_batch_of_weight_zero_counts_nothing(
    stage: int, precision: str, is_overlapped: bool
) -> None:
    """Its data may be anything whose gradient is finite; the other ranks' mean is the step's."""
    logical = mlp(precision=precision, micro_steps=2, is_weighted=True)
    program = applied(logical, for_stage(stage, 3, overlap_update=is_overlapped))
    steps = drawn(3, (2,))
    marked = {id(steps[0][1][0]), id(steps[0][1][1])}
    trained = train(program, steps, weight=lambda one: 0 if id(one) in marked else 2)
    assert math.isnan(trained.losses[0][1])
    steps[0][1] = [{"x": torch.ones(4, 6)}, {"x": torch.zeros(4, 6)}]
    marked = {id(steps[0][1][0]), id(steps[0][1][1])}
    other = train(program, steps, weight=lambda one: 0 if id(one) in marked else 2)
    require_same(trained.state, other.state)


SKIPPED = covering(product((0, 3), ("fp32", "fp16"), (False, True), (1, 2)), tuple)


@pytest.mark.parametrize(("stage", "precision", "is_overlapped", "micro_steps"), SKIPPED)
def test_a_step_whose_weights_are_all_zero_changes_nothing(
    stage: int, precision: str, is_overlapped: bool, micro_steps: int
) -> None:
    logical = mlp(precision=precision, micro_steps=micro_steps, is_weighted=True)
    program = applied(logical, for_stage(stage, 3, overlap_update=is_overlapped))
    first, empty, second = drawn(3, (micro_steps,) * 3)
    expected = train(program, [first, second], weight=lambda _: 2)
    lockstep = Lockstep(program, weight=lambda one: 0 if id(one) in marked else 2)
    marked = {id(batch) for own in empty for batch in own}
    lockstep.initialise_flats(initial_flats(program_of_one_rank(program)))
    skipped = [
        [bool(result.is_skipped) for result in lockstep.step(batches)]
        for batches in (first, empty, second)
    ]
    assert skipped == [[False] * 3, [True] * 3, [False] * 3]
    require_same(lockstep.full_state(), expected.state)
    for name in ("step", "loss_scale"):
        now, then = (one.buffers(0)[name] for one in (lockstep, expected.lockstep))
        assert torch.equal(now, then)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("is_local", [False, True])
def test_an_overflow_in_one_micro_step_of_one_rank_skips_everywhere(
    stage: int, is_local: bool
) -> None:
    logical = mlp(precision="fp16", clip=1.0, micro_steps=2)
    program = applied(logical, for_stage(stage, 3, accumulate_locally=is_local and stage >= 2))
    first, bad, second = drawn(3, (2, 3, 1))
    bad[1][1] = {"x": torch.full((4, 6), 3e4)}
    lockstep = begun(Lockstep(program))
    lockstep.step(first)
    before = {key: value.clone() for key, value in lockstep.full_state().items()}
    assert all(bool(result.is_skipped) for result in lockstep.step(bad))
    require_same(lockstep.full_state(), before)
    assert not any(bool(result.is_skipped) for result in lockstep.step(second))
    assert all(torch.isfinite(value).all() for value in lockstep.full_state().values())
