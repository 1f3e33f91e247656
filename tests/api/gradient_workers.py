"""One rank that reads gradients within steps: ``python -m tests.api.gradient_workers``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join
from zeroir.config.precision import FloatName

MICRO_STEPS = 2


def net_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(net: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = net(x).square().mean()
    return value


def batch_of(rank: int, index: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * index + rank))


def expected_gradients(world_size: int) -> dict[str, Tensor]:
    plain = net_of()
    for rank in range(world_size):
        for index in range(MICRO_STEPS):
            value = loss(plain, batch_of(rank, index)) / (MICRO_STEPS * world_size)
            value.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    expected = expected_gradients(world_size)
    cases: tuple[tuple[int, FloatName, float], ...] = (
        (0, "fp32", 1e-6),
        (1, "fp32", 1e-6),
        (3, "bf16", 0.02),
    )
    for stage, precision, tolerance in cases:
        engine = zeroir.compile(
            net_of(),
            batch_of(0, 0),
            loss=loss,
            stage=stage,
            precision=precision,
            micro_steps=MICRO_STEPS,
            communication=zeroir.Communication(overlap_update=False),
            world_size=world_size,
            evaluate=False,
        ).engine(self_check=False)
        for index in range(MICRO_STEPS):
            engine.micro_step(batch_of(rank, index))
        norms = engine.gradient_norms("0.*")
        found = engine.gradients()
        assert list(found) == list(expected), stage
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
        assert list(norms) == ["0.weight", "0.bias"]
        for name, norm in norms.items():
            assert abs(norm - found[name].norm().item()) < 1e-5, (stage, name)
        result = engine.update()
        assert result.mean_loss > 0
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
