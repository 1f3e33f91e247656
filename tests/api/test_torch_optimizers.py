"""Classes and instances of torch.optim as the optimizer of a compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir.optim
from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_model
from zeroir.api.search.plan import plan
from zeroir.api.torch_optimizers import translated
from zeroir.config.groups import parse_groups
from zeroir.errors import UserError
from zeroir.ir.ops import Algorithm
from zeroir.runtime.execution.lockstep import Lockstep

WORLD_SIZE = 3


class Net(nn.Module):
    """All sizes are multiples of the widest vectors, so that torch's kernels round every element in one way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.head(self.norm(x)).square().mean()
        return loss


BATCH = (torch.zeros(4, 16),)


def a_module() -> Net:
    torch.manual_seed(0)
    return Net()


def a_batch(step: int, rank: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(4, 16, generator=generator),)


def decayed(module: nn.Module) -> list[dict[str, object]]:
    """The usual two groups, and one of a single parameter."""
    every = dict(module.named_parameters())
    head = every.pop("head.weight")
    return [
        {"params": [p for p in every.values() if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in every.values() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [head], "lr": 0.05, "name": "head"},
    ]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decayed(module), lr=0.01, betas=(0.8, 0.99), fused=True)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def decoupled(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        module.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, fused=True
    )


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    groups = decayed(module)
    groups[1].update(momentum=0.0, dampening=0.0, nesterov=False)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, fused=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(decayed(module), lr=0.01, fused=True)


def head_alone(module: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(module, Net)
    return torch.optim.AdamW(module.head.parameters(), lr=0.01, fused=True)


def muon_and_adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in module.named_parameters() if p.ndim == 2 and "head" not in n]
    others = [p for n, p in module.named_parameters() if p.ndim < 2 or "head" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.9, ns_steps=4, weight_decay=0.05),
        torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.99), fused=True),
    ]


def adafactor(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.05, eps=(1e-4, 1e-2), d=2.0)


INSTANCES = [adamw, adam, decoupled, momentum, sgd, head_alone]


def eager(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int) -> nn.Module:
    """The module after data-parallel training by the instance, gradients added in rank order."""
    module = a_module()
    optimizer = make(module)
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for rank in range(WORLD_SIZE):
            module.zero_grad()
            module(*a_batch(step, rank)).backward()
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        for name, parameter in module.named_parameters():
            parameter.grad = sums[name] / WORLD_SIZE
        optimizer.step()
    return module


def trained(compiled: CompiledProgram, module: nn.Module, steps: int) -> dict[str, Tensor]:
    lockstep = Lockstep(compiled.program)
    values = copy.deepcopy(module)
    lockstep.initialise(lambda: values, 0)
    for step in range(steps):
        lockstep.step([[a_batch(step, rank)] for rank in range(WORLD_SIZE)])
    return lockstep.full_parameters()


@pytest.mark.slow
@pytest.mark.parametrize("make", INSTANCES, ids=lambda make: make.__name__)
def test_a_program_trains_as_the_instance_would(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    module = a_module()
    compiled = compile_model(
        module, BATCH, optimizer=make(module), world_size=WORLD_SIZE, units="blocks.*"
    )
    parameters = trained(compiled, module, 4)
    for name, parameter in eager(make, 4).named_parameters():
        assert torch.equal(parameters[name], parameter.detach()), name
    # The user's module stays as it was.
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_groups_keep_their_order_their_names_and_their_parameters() -> None:
    module = a_module()
    compiled = compile_model(module, BATCH, optimizer=adamw(module), world_size=1)
    optimizer = Lockstep(compiled.program).optimizer
    assert [
        (g["name"], g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups
    ] == [
        ("default", 0.01, (0.8, 0.99), 0.2),
        ("group1", 0.01, (0.8, 0.99), 0.0),
        ("head", 0.05, (0.8, 0.99), 0.01),
    ]
    assert optimizer.param_groups[2]["param_names"] == ["head.weight"]
    assert set(optimizer.param_groups[0]["param_names"]) == {"blocks.0.weight", "blocks.1.weight"}


def test_equal_parameters_of_blocks_are_one_pattern_where_they_are_in_one_group() -> None:
    module = a_module()
    options = translated(adamw(module), module, {}).options
    (rest, head) = parse_groups(options["group"])  # type: ignore[arg-type]
    assert rest.patterns == ("blocks.*.bias", "norm.weight", "norm.bias", "head.bias")
    assert head.patterns == ("head.weight",)
    apart = [
        {"params": [p for n, p in module.named_parameters() if n != "blocks.1.bias"]},
        {"params": [module.get_parameter("blocks.1.bias")]},
    ]
    options = translated(torch.optim.AdamW(apart, lr=1e-3), module, {}).options
    (own,) = parse_groups(options["group"])  # type: ignore[arg-type]
    assert own.patterns == ("blocks.1.bias",)


def test_a_tied_parameter_is_not_taken_by_a_pattern_of_another_group() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[2].bias = module[0].bias
    groups = [
        {"params": [module[0].weight, module[0].bias, module[1].weight, module[2].weight]},
        {"params": [module[1].bias]},
    ]
    options = translated(torch.optim.SGD(groups, lr=0.1), module, {}).options
    (own,) = parse_groups(options["group"])  # type: ignore[arg-type]
    assert own.patterns == ("1.bias",)


def test_what_the_instance_does_not_hold_is_not_trained() -> None:
    module = a_module()
    compiled = compile_model(module, BATCH, optimizer=head_alone(module), world_size=1)
    assert {
        slot.name for flat in compiled.program.flats if flat.is_trainable for slot in flat.slots
    } == {"head.weight", "head.bias"}


@pytest.mark.slow
def test_several_instances_are_the_groups_of_one_program() -> None:
    module = a_module()
    compiled = compile_model(module, BATCH, optimizer=muon_and_adamw(module), world_size=1)
    muon, adamw = Lockstep(compiled.program).optimizer.param_groups
    assert muon["param_names"] == ["blocks.0.weight", "blocks.1.weight"]
    theirs = torch.optim.Muon([torch.zeros(2, 2)]).param_groups[0]
    assert muon.keys() - {"name", "param_names"} == theirs.keys()
    assert (muon["lr"], muon["momentum"], muon["nesterov"], muon["ns_steps"]) == (
        0.02,
        0.9,
        True,
        4,
    )
    assert muon["ns_coefficients"] == theirs["ns_coefficients"]
    assert type(muon["ns_steps"]) is int
    assert (adamw["name"], adamw["lr"], adamw["betas"]) == ("group1", 0.01, (0.8, 0.99))
    assert [g.algorithm for g in compiled.program.groups] == [Algorithm.MUON, Algorithm.ADAMW]


def test_the_settings_of_adafactor_are_as_torch_has_them() -> None:
    module = a_module()
    compiled = compile_model(module, BATCH, optimizer=adafactor(module), world_size=1)
    (ours,) = Lockstep(compiled.program).optimizer.param_groups
    (theirs,) = adafactor(module).param_groups
    assert {key: ours[key] for key in theirs.keys() - {"params", "foreach", "maximize"}} == {
        key: theirs[key] for key in theirs.keys() - {"params", "foreach", "maximize"}
    }


def test_a_parameter_of_two_instances_is_refused() -> None:
    module = a_module()
    with pytest.raises(UserError, match=r"Group 0 of the Adam has blocks\.0\.bias, which another"):
        translated([adamw(module), adam(module)], module, {})


def test_coefficients_of_muon_are_those_of_all_groups() -> None:
    module = a_module()
    weights = [p for p in module.parameters() if p.ndim == 2]
    groups: list[dict[str, object]] = [
        {"params": weights[:1]},
        {"params": weights[1:], "ns_coefficients": (3.0, -4.0, 2.0)},
    ]
    with pytest.raises(UserError, match="Group 1 of the Muon has other ns_coefficients"):
        translated(torch.optim.Muon(groups), module, {})


def test_groups_are_called_as_in_the_instance() -> None:
    module = a_module()
    groups = decayed(module)[:2]
    groups[0]["name"], groups[1]["name"] = "decay", "no_decay"
    compiled = compile_model(module, BATCH, optimizer=torch.optim.AdamW(groups), world_size=1)
    assert [group.name for group in compiled.program.groups] == ["decay", "no_decay"]
    alone = torch.optim.AdamW([{"params": module.parameters(), "name": "all"}])
    compiled = compile_model(module, BATCH, optimizer=alone, world_size=1)
    assert [group.name for group in compiled.program.groups] == ["all"]


def test_an_optimizer_with_settings_has_those_of_its_class() -> None:
    plain, moving = zeroir.optim.SGD(momentum=0.0), zeroir.optim.SGD(momentum=0.8)
    assert (plain.algorithm, moving.algorithm) == (Algorithm.SGD, Algorithm.MOMENTUM)
    assert moving.hyper == (0.8, 0.0, 0.0, 0.0)
    assert {zeroir.optim.Adam().algorithm, zeroir.optim.AdamW().algorithm} == {
        Algorithm.ADAM,
        Algorithm.ADAMW,
    }
    assert set(dir(zeroir.optim)) == {algorithm.class_name for algorithm in Algorithm}
    with pytest.raises(AttributeError, match="has no Lamb; it has SGD, Adam"):
        _ = zeroir.optim.Lamb
    with pytest.raises(UserError, match="no setting nesterov; its settings are lr, weight_decay"):
        zeroir.optim.Adam(nesterov=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (torch.optim.AdamW, {}, (Algorithm.ADAMW, 1e-3, (0.9, 0.999, 1e-8, 0.01))),
        (torch.optim.AdamW, {"lr": 0.5}, (Algorithm.ADAMW, 0.5, (0.9, 0.999, 1e-8, 0.01))),
        (torch.optim.Adam, {}, (Algorithm.ADAM, 1e-3, (0.9, 0.999, 1e-8, 0.0))),
        (torch.optim.SGD, {}, (Algorithm.SGD, 1e-3, (0.0, 0.0, 0.0, 0.0))),
    ],
)
def test_a_class_brings_its_defaults(
    kind: type[torch.optim.Optimizer],
    given: dict[str, float],
    expected: tuple[Algorithm, float, tuple[float, ...]],
) -> None:
    compiled = compile_model(
        a_module,
        BATCH,
        optimizer=kind,
        world_size=1,
        **given,  # type: ignore[arg-type]
    )
    options = compiled.options.optimizer
    assert (options.algorithm, options.lr, options.hyper) == expected


def test_a_class_takes_groups_by_pattern() -> None:
    compiled = compile_model(
        a_module,
        BATCH,
        optimizer=zeroir.optim.AdamW(no_decay=True),
        world_size=1,
        group="head:lr=0.5",
    )
    assert [group.name for group in compiled.program.groups] == [
        "default",
        "no_decay",
        "head",
        "head.no_decay",
    ]


class Mine(torch.optim.AdamW):
    """A subclass, whose step may be another."""


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(module)
    module(*a_batch(0, 0)).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda m: torch.optim.RMSprop(m.parameters()),
            "zeroir has no optimizer torch.optim.rmsprop.RMSprop; of",
        ),
        (lambda m: Mine(m.parameters()), "zeroir has no optimizer"),
        (
            lambda m: type("Adafactor", (Mine,), {})(m.parameters()),
            ".Adafactor, which is not torch.optim.Adafactor: to train with the latter, pass torch.optim.Adafactor or",
        ),
        (
            lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
            "has amsgrad=True, which zeroir does not",
        ),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True), "has maximize=True"),
        (
            lambda m: torch.optim.Adam(m.parameters(), differentiable=True),
            "has differentiable=True",
        ),
        (
            lambda _: torch.optim.AdamW([nn.Parameter(torch.zeros(2, 3))]),
            "of shape [2, 3] that is not one of",
        ),
        (stepped, "has the states of 8 parameters already"),
        (lambda _: RuntimeError("no optimizer"), "should be a name (sgd, momentum, adam, adamw"),
        (lambda _: torch.optim.LBFGS, "zeroir has no optimizer torch.optim.lbfgs.LBFGS"),
        (lambda _: int, "zeroir has no optimizer builtins.int"),
    ],
)
def test_what_a_program_would_not_honour_is_refused_by_name(
    make: Callable[[nn.Module], object], sentence: str
) -> None:
    module = a_module()
    with pytest.raises(UserError) as caught:
        translated(make(module), module, {})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_instance_needs_its_module_and_no_further_settings() -> None:
    module = a_module()
    compile_it = partial(compile_model, batch=BATCH, optimizer=adamw(module), world_size=1)
    with pytest.raises(UserError, match="has the parameters of a module: compile that module"):
        compile_it(a_module)
    for given in ({"lr": 0.1}, {"group": "head:lr=1"}):
        with pytest.raises(UserError, match="has no effect beside an instance of AdamW"):
            compile_it(module, **given)


@pytest.mark.slow
def test_a_plan_takes_a_class_and_no_instance() -> None:
    path = Path(__file__).parents[2] / "examples" / "gpt.py"
    planned = plan(path, "cpu-local", optimizer=torch.optim.SGD, world_size=2, most_tried=1)
    assert planned.compiled.options.optimizer.algorithm is Algorithm.SGD
    with pytest.raises(UserError, match="has the parameters of a module: compile that module"):
        plan(path, "cpu-local", optimizer=adamw(a_module()), world_size=2)


def test_a_learning_rate_may_be_a_tensor_of_the_instance() -> None:
    module = a_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.5))
    assert translated(optimizer, module, {}).options["lr"] == 0.5
