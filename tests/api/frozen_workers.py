"""One rank that trains beside frozen modules that it shards: ``python -m tests.api.frozen_workers RECIPE``."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zeroir
from tests.runtime.support import join
from zeroir.runtime.engine.engine import Engine

STEPS, SAVED_AFTER = 4, 2
DECAY = 0.9


class Blocks(nn.Module):
    """Equal blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.last(x)
        return y


class Tower(nn.Module):
    """An encoder with running statistics, and a projector."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.projector = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.projector(self.encoder(x))
        return y


class Online(Tower):
    """A tower with a predictor, which its target lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.predictor(super().forward(x))
        return y


def of_mean_teacher(student: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        aim = teacher(x + 0.1)
    return functional.mse_loss(student(x), aim)


def of_byol(online: nn.Module, target: nn.Module, x: Tensor) -> Tensor:
    views = x, x.flip(1)
    losses: list[Tensor] = []
    for view, other in (views, views[::-1]):
        with torch.no_grad():
            aim = functional.normalize(target(other), dim=-1)
        losses.append(2 - 2 * (functional.normalize(online(view), dim=-1) * aim).sum(-1).mean())
    return losses[0] + losses[1]


@dataclass(frozen=True)
class Recipe:
    """The two modules, the loss, and whether the frozen one's flats are like those of the other one."""

    modules: Callable[[], tuple[nn.Module, nn.Module]]
    loss: Callable[[nn.Module, nn.Module, Tensor], Tensor]
    is_local: bool


RECIPES: Mapping[str, Recipe] = {
    "mean-teacher": Recipe(lambda: (Blocks(), Blocks()), of_mean_teacher, True),
    "byol": Recipe(lambda: (Online(), Tower()), of_byol, False),
}


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def made(recipe: Recipe, world_size: int) -> tuple[nn.Module, nn.Module, Engine]:
    model, frozen = recipe.modules()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return recipe.loss(model, frozen, x)

    engine = zeroir.compile(
        model,
        batch_of(0, 0),
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        stage=3,
        world_size=world_size,
        frozen={"other": frozen},
        evaluate=False,
    ).engine()
    return model, frozen, engine


class Replicas:
    """What plain PyTorch trains, one replica for each rank."""

    def __init__(self, recipe: Recipe, modules: tuple[nn.Module, nn.Module], count: int) -> None:
        self.recipe = recipe
        self.models = [copy.deepcopy(modules) for _ in range(count)]
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.05, fused=True) for model, _ in self.models
        ]

    def step(self, step: int) -> list[float]:
        losses: list[Tensor] = []
        for rank, ((model, frozen), own) in enumerate(
            zip(self.models, self.optimizers, strict=True)
        ):
            own.zero_grad()
            losses.append(self.recipe.loss(model, frozen, batch_of(rank, step)))
            losses[-1].backward()  # type: ignore[no-untyped-call]
        for parameters in zip(*(model.parameters() for model, _ in self.models), strict=True):
            total = parameters[0].grad.clone()
            for other in parameters[1:]:
                total += other.grad
            for parameter in parameters:
                parameter.grad = total / len(parameters)
        for own, (model, frozen) in zip(self.optimizers, self.models, strict=True):
            own.step()
            named = dict(model.named_parameters())
            for name, parameter in frozen.named_parameters():
                parameter.data.lerp_(named[name].data, 1 - DECAY)
        return [loss.item() for loss in losses]


def assert_equal(module: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def main() -> None:
    recipe = RECIPES[sys.argv[1]]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    torch.manual_seed(0)
    model, frozen, engine = made(recipe, world_size)
    with engine.gathered() as of_model, engine.gathered("other") as of_frozen:
        replicas = Replicas(recipe, (of_model, of_frozen), world_size)
    for step in range(STEPS):
        if step == SAVED_AFTER:
            folder = Path(os.environ["TEST_FOLDER"]) / "saved"
            engine.save(folder, wait=False)
            engine.update_frozen("other")  # not in the checkpoint
            engine.close(return_values=False)
            model, frozen, engine = made(recipe, world_size)
            engine.load(folder)
        found = engine.step(batch_of(rank, step)).loss
        expected = replicas.step(step)
        assert found == expected[rank], (step, found, expected)
        engine.update_frozen("other", ema=DECAY)
        (values,) = engine._values._following.values()
        assert bool(values.gathered) != recipe.is_local
    names = list(engine.state_dict())
    engine.close()
    expected_model, expected_frozen = replicas.models[rank]
    assert names == list(expected_model.state_dict())
    assert_equal(model, expected_model)
    assert_equal(frozen, expected_frozen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
