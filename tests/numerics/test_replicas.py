"""Every ZeRO stage against the outside reference: N eager PyTorch replicas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.support import initial_flats, lowered, parameters_of, random_batches
from tests.support.lockstep import run_lockstep
from tests.support.programs import mlp
from zeroir.ir.program import Program

STEPS = 20


def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    h = x @ parameters["pre.weight"].t()
    blocks = sum(name.endswith(".bias") for name in parameters)
    for i in range(blocks):
        weight, bias = parameters[f"blocks.{i}.weight"], parameters[f"blocks.{i}.bias"]
        h = F.relu(F.linear(h, weight, bias)) + h
    return F.mse_loss(h @ parameters["post.weight"].t(), x)


def train_replicas(
    logical: Program, world_size: int, clip: float | None
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """One set of parameters stands for all the replicas, which never differ; gradients are added in rank order."""
    flats = initial_flats(logical)
    parameters: dict[str, Tensor] = {}
    for flat in logical.flats:
        for name, value in parameters_of(flat, flats[f"{flat.name}.param"]).items():
            parameters[name] = value.clone().requires_grad_()
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.01, fused=True)
    losses: list[list[float]] = []
    for batches in random_batches(STEPS, world_size):
        totals: dict[str, Tensor] = {}
        losses.append([])
        for rank in range(world_size):
            (batch,) = batches[rank]
            assert isinstance(batch, dict)
            loss = forward(parameters, batch["x"])
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for name, gradient in zip(parameters, gradients, strict=True):
                totals[name] = totals[name] + gradient if name in totals else gradient
            losses[-1].append(float(loss.detach()))
        for name, parameter in parameters.items():
            parameter.grad = totals[name] / world_size
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_fp32_equals_replicas_bit_for_bit(world_size: int) -> None:
    logical = mlp()
    losses, expected = train_replicas(logical, world_size, None)
    for stage in range(4):
        result = run_lockstep(
            lowered(logical, stage, world_size),
            initial=initial_flats(logical),
            inputs=random_batches(STEPS, world_size),
            schedule_seed=stage,
        )
        assert result.losses == losses
        found = result.lockstep.full_parameters()
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), f"stage {stage}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 5e-3)]
)
def test_clipping_and_low_precision_follow_replicas(precision: str, tolerance: float) -> None:
    """Not bit for bit: clipping folds into one division, and 16-bit gradients are rounded."""
    logical = mlp(precision=precision, clip=0.5)
    losses, _ = train_replicas(mlp(), 3, 0.5)
    result = run_lockstep(
        lowered(logical, 3, 3), initial=initial_flats(logical), inputs=random_batches(STEPS, 3)
    )
    torch.testing.assert_close(
        torch.tensor(result.losses), torch.tensor(losses), rtol=tolerance, atol=tolerance
    )
