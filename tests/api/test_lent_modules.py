"""Modules that two engines lend each other, and other modules that a loss uses and the optimizer does not train."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.lent_workers import (
    Critic,
    Generator,
    batch_of,
    critics_loss,
    generators_loss,
    trained,
)
from tests.runtime.support import Ranks, require_success
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

REAL, Z = batch_of(0, 0)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_modules_are_trained_against_each_other(world_size: int, tmp_path: Path) -> None:
    ranks = Ranks(world_size, tmp_path, module="tests.api.lent_workers")
    require_success(ranks.wait())


def settled() -> Generator:
    """A generator whose running statistics stay as they are."""
    generator = Generator()
    generator.norm.eval()
    return generator


def engine_of(module: nn.Module, batch: object, loss: object, **options: object) -> Engine:
    given = {"optimizer": trained(module), "world_size": 1, **options}
    compiled = zeroir.compile(module, batch, loss=loss, evaluate=False, **given)  # type: ignore[arg-type]
    return compiled.engine(self_check=False)


@pytest.mark.slow
def test_a_module_that_the_optimizer_lacks_is_not_trained() -> None:
    torch.manual_seed(0)
    critic, generator = Critic(), settled()
    plain = copy.deepcopy(critic)
    before = copy.deepcopy(generator)

    def loss(critic: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, z = batch
        own: Tensor = critic(generator(z)).mean()
        return critics_loss(critic, generator, real, z) + own

    engine, optimizer = engine_of(critic, (REAL, Z), loss), trained(plain)
    for _ in range(3):
        optimizer.zero_grad()
        expected = critics_loss(plain, generator, REAL, Z) + plain(generator(Z)).mean()
        expected.backward()
        optimizer.step()
        assert engine.step((REAL, Z)).loss == pytest.approx(expected.item(), rel=1e-6)
        with torch.no_grad():
            generator.last.bias.add_(0.5)
    engine.close()
    assert torch.equal(generator.first.weight, before.first.weight)
    assert generator.first.weight.requires_grad


def test_without_an_optimizer_of_the_script_it_must_be_frozen() -> None:
    critic, generator = Critic(), settled()

    def loss(critic: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return critics_loss(critic, generator, *batch)

    with pytest.raises(
        UserError, match=r"is no parameter of the model\. .*requires_grad_\(False\)"
    ):
        engine_of(critic, (REAL, Z), loss, optimizer="adamw")


def test_the_modules_own_original_is_still_refused() -> None:
    critic = Critic()
    with pytest.raises(UserError, match="uses the module that it is given"):
        engine_of(critic, REAL, lambda _, x: critic(x).mean())


def test_values_of_an_engine_that_is_gone_are_refused() -> None:
    generator, critic = settled(), Critic()
    owner = engine_of(critic, REAL, lambda critic, x: critic(x).mean())
    engine = engine_of(generator, Z, lambda generator, z: generators_loss(generator, critic, z))
    engine.step(Z)
    owner.close(return_values=False)
    del owner
    gc.collect()
    with pytest.raises(UserError, match="A tensor outside the model"):
        engine.step(Z)
    engine.close()


@pytest.mark.slow
def test_a_lent_module_may_change_its_program() -> None:
    """A frozen layer moves to another flat of the lender, which the borrower does not notice."""
    torch.manual_seed(0)
    generator, critic = settled(), Critic()
    plain = copy.deepcopy(critic)
    owner = engine_of(critic, REAL, lambda critic, x: critic(x).square().mean())
    engine = engine_of(generator, Z, lambda generator, z: generators_loss(generator, critic, z))
    critic.last.requires_grad_(False)
    owner.step(REAL)
    with engine.gathered() as module, owner.gathered() as lent, torch.no_grad():
        plain.load_state_dict(lent.state_dict())
        expected = generators_loss(module, plain, Z).item()
    assert engine.step(Z).loss == pytest.approx(expected, rel=1e-6)
    engine.close()
    owner.close()
