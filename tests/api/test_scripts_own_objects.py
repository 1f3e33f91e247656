"""What a script does to its own optimizers, gradients and generators beside an engine counts, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeroir
from tests.api.living_net import X
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine


def squared(net: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = net(x).square().mean()
    return value


@contextmanager
def training(
    optimizer: object = None, net: nn.Module | None = None, **options: object
) -> Iterator[tuple[Engine, nn.Module]]:
    """An engine of a small network, and the network."""
    torch.manual_seed(0)
    net = net or nn.Linear(4, 2)
    given = {"optimizer": optimizer or "sgd", **({} if optimizer else {"lr": 0.1}), **options}
    compiled = zeroir.compile(net, X, loss=squared, evaluate=False, world_size=1, **given)  # type: ignore[arg-type]
    engine = compiled.engine(self_check=False)
    yield engine, net
    engine.close(return_values=False)


def test_a_scheduler_may_be_made_after_the_engine() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with training(optimizer, net) as (engine, _):
        scheduler = OneCycleLR(optimizer, max_lr=0.5, total_steps=5)
        for _ in range(3):
            engine.step(X)
            scheduler.step()
            live = engine.optimizer.param_groups[0]
            engine.step(X)
            assert live["lr"] == optimizer.param_groups[0]["lr"]
            assert live["momentum"] == optimizer.param_groups[0]["momentum"]


def test_a_hook_of_the_optimizers_step_is_refused() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def shrink(*_: object) -> None:
        pass

    with training(optimizer, net) as (engine, _):
        for register in (
            optimizer.register_step_pre_hook,
            optimizer.register_step_post_hook,
            register_optimizer_step_post_hook,
        ):
            engine.step(X)
            hook = register(shrink)
            with pytest.raises(UserError, match=r"has the hook .*shrink around its step"):
                engine.step(X)
            hook.remove()


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer, _: optimizer.state.clear(),
        lambda optimizer, net: optimizer.state[net.weight],
        lambda optimizer, _: list(optimizer.state.items()),
        lambda optimizer, _: setattr(optimizer, "state", {}),
    ],
    ids=["cleared", "read", "listed", "replaced"],
)
def test_states_of_the_scripts_optimizer_are_refused(
    use: Callable[[torch.optim.Optimizer, nn.Module], object],
) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def use_and_step() -> None:
        use(optimizer, net)
        engine.step(X)

    with training(optimizer, net) as (engine, _):
        engine.step(X)
        with pytest.raises(UserError, match="The engine has the states of this optimizer"):
            use_and_step()


def test_settings_of_an_optimizer_that_was_not_passed_are_refused() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    elsewhere = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with training(None, net) as (engine, _):
        elsewhere.param_groups[0]["lr"] = 0.01
        optimizer.param_groups[0]["note"] = "no setting of SGD"
        engine.step(X)
        optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(UserError, match=r"lr is 0\.01 now and was 0\.1 in the script's SGD"):
            engine.step(X)


def test_gradients_and_values_of_a_module_in_an_engine_are_refused() -> None:
    with training() as (engine, net):
        state = {name: torch.ones(value.shape) for name, value in net.named_parameters()}
        engine.step(X)
        net.zero_grad()
        with pytest.raises(UserError, match="a gradient that is set does not count"):
            next(net.parameters()).grad = torch.ones(2, 4)
        with pytest.raises(UserError, match=r"load others with engine\.load_state_dict"):
            net.load_state_dict(state)
        engine.load_state_dict(state)


def test_a_hook_of_a_gradient_that_is_removed_is_not_called_any_more() -> None:
    net = nn.Linear(4, 2)
    hook = net.weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[no-untyped-call]
    with training(net=net) as (engine, _):
        before = engine.full_parameters()["weight"].clone()
        engine.step(X)
        assert torch.equal(engine.full_parameters()["weight"], before)
        hook.remove()
        engine.step(X)
        assert not torch.equal(engine.full_parameters()["weight"], before)


def of_a_generator() -> Tensor:
    return torch.randn(2, generator=torch.Generator().manual_seed(0))


def seeded() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2)


def forked() -> Tensor:
    with torch.random.fork_rng():
        return torch.randn(2)


@pytest.mark.parametrize("noise", [of_a_generator, seeded, forked])
def test_code_that_chooses_the_seed_of_its_noise_is_refused(
    noise: Callable[[], Tensor],
) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = (net(x) + noise()).square().mean()
        return value

    with pytest.raises(UserError, match=r"test_scripts_own_objects\.py:\d+ (draws|seeds|sets)"):
        zeroir.compile(nn.Linear(4, 2), X, loss=loss, lr=0.1, world_size=1)
