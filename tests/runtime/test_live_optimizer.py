"""Live settings of optimizer groups: torch's schedulers drive a program as they drive torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tests.runtime.support import begun, initial_flats, lowered, random_batches
from tests.support.lowering import proved_for
from tests.support.programs import mlp
from zeroir.config import CompileOptions, make_options
from zeroir.errors import UserError
from zeroir.frontend import load_model_file, trace
from zeroir.ir.program import Program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.lockstep import Lockstep

# All sizes are multiples of the widest vectors, so that torch's kernels round every element in one way.
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 16)

    def forward(self, x, y):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.head(x) - y).square().mean()

def model():
    return Net()

def batch():
    return torch.zeros(4, 16), torch.zeros(4, 16)
"""

Optimizer = torch.optim.Optimizer
Scheduler = LRScheduler | ReduceLROnPlateau

SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(
        o, [lambda n: 0.9**n, lambda n: 1 / (1 + n), lambda n: 0.5 + n % 3]
    ),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=25, eta_min=1e-5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.02, 0.03, 0.04], total_steps=40),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5, threshold=0.2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10),
            lr_scheduler.CosineAnnealingLR(o, T_max=190),
        ],
        milestones=[10],
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-3, max_lr=0.02, step_size_up=5),
}
ADAMW: dict[str, object] = {"no_decay": True, "weight_decay": 0.1, "group": "head.weight:lr=0.002"}
INF, NAN = float("inf"), float("nan")
MOMENTUM: dict[str, object] = {**ADAMW, "optimizer": "momentum", "lr": 0.01}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "net.py"
    path.write_text(MODEL)
    return path


class EagerTraining:
    """Data-parallel training with an optimizer of torch in groups: gradients are added in rank order."""

    def __init__(self, path: Path, options: CompileOptions) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = load_model_file(str(path)).model()
        self.world_size = options.world_size
        every = dict(self.module.named_parameters())
        head = every.pop("head.weight")
        groups = [
            {"params": [p for p in every.values() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in every.values() if p.ndim == 1], "weight_decay": 0.0},
            {"params": [head], "weight_decay": 0.1, "lr": 0.002},
        ]
        self.optimizer: Optimizer
        lr = options.optimizer.lr
        if options.optimizer.algorithm == "momentum":
            self.optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=True)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """One step; the loss of rank 0."""
        losses: list[float] = []
        sums: dict[str, Tensor] = {}
        for batch in batches:
            self.module.zero_grad()
            loss = self.module(*batch)
            loss.backward()
            losses.append(float(loss.detach()))
            for name, parameter in self.module.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        for name, parameter in self.module.named_parameters():
            parameter.grad = sums[name] / self.world_size
        self.optimizer.step()
        return losses[0]


def batches_of(steps: int, world_size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        drawn = [torch.randn(2, 4, 16, generator=generator) for _ in range(world_size)]
        yield [(x, 0.1 * y) for x, y in drawn]


def advance(scheduler: Scheduler, loss: float) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def program_of(path: Path, options: CompileOptions) -> Program:
    return proved_for(trace(load_model_file(str(path)), options).program, options)


def require_equal_training(
    path: Path, options: CompileOptions, make: Callable[[Optimizer], Scheduler], steps: int
) -> None:
    """Both must have the same losses in every step, the same settings and, in the end, the same parameters."""
    eager = EagerTraining(path, options)
    lockstep = Lockstep(program_of(path, options))
    lockstep.initialise(load_model_file(str(path)).model, 0)
    schedulers = make(eager.optimizer), make(lockstep.optimizer)
    rates: set[float] = set()
    for step, batches in enumerate(batches_of(steps, options.world_size)):
        expected = eager.step(batches)
        loss = float(lockstep.step([[batch] for batch in batches])[0].loss)
        assert loss == expected, step
        for scheduler in schedulers:
            advance(scheduler, loss)
        both = eager.optimizer.param_groups, lockstep.optimizer.param_groups
        for theirs, ours in zip(*both, strict=True):
            shared = (ours.keys() & theirs.keys()) - {"params"}
            assert all(ours[key] == theirs[key] for key in shared)
            rates.add(ours["lr"])
    assert len(rates) > 3
    parameters = lockstep.full_parameters()
    for name, parameter in eager.module.named_parameters():
        assert torch.equal(parameters[name], parameter.detach()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "stage", "world_size", "steps"),
    [
        *((name, ADAMW, 3, 3, 30) for name in SCHEDULERS),
        # These change the momentum, too, or begin anew.
        *((name, MOMENTUM, 1, 3, 30) for name in ("one cycle", "cyclic", "restarts")),
        ("cosine", ADAMW, 0, 1, 200),
        ("sequential", ADAMW, 2, 4, 200),
    ],
)
def test_every_scheduler_drives_a_program(
    path: Path, name: str, settings: dict[str, object], stage: int, world_size: int, steps: int
) -> None:
    options = make_options({"stage": stage, "world_size": world_size, **settings})
    require_equal_training(path, options, SCHEDULERS[name], steps)


# ------------------------------------------------------------------------------------------------------- an engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    logical = mlp()
    engine = begun(Engine(lowered(logical, 3, 1)))
    yield engine
    engine.close()


def a_batch() -> dict[str, Tensor]:
    batch = random_batches(1, 1)[0][0][0]
    assert isinstance(batch, dict)
    return batch


def test_a_change_counts_from_the_next_update(engine: Engine) -> None:
    (group,) = engine.optimizer.param_groups
    assert (group["name"], group["lr"], group["betas"]) == ("default", 0.01, (0.9, 0.999))
    shapes = dict(zip(group["param_names"], (p.shape for p in group["params"]), strict=True))
    assert shapes["pre.weight"] == (8, 6)
    group["lr"] = 0.0
    group["weight_decay"] = 0.0
    before = engine.full_parameters()
    engine.step(a_batch())
    after = engine.full_parameters()
    assert all(torch.equal(after[name], before[name]) for name in before)
    group["lr"] = np.float32(0.5)
    group["betas"] = [0.5, 0.75]
    engine.step(a_batch())
    assert not torch.equal(engine.full_parameters()["pre.weight"], before["pre.weight"])
    assert engine.buffer("lr").tolist() == [0.5]
    assert engine.buffer("hyper").tolist() == [0.5, 0.75, 1e-8, 0.0]


def test_what_did_not_change_is_not_written(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.25
    engine.step(a_batch())
    engine.buffer("lr").fill_(0.125)
    engine.buffer("hyper")[3] = 0.5
    engine.step(a_batch())
    assert engine.buffer("lr").tolist() == [0.125]
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.step(a_batch())
    assert engine.buffer("lr").tolist() == [0.5]
    assert engine.buffer("hyper").tolist()[3] == 0.5
    # With first values the buffers have first settings, and the optimizer's own are written again.
    engine.initialise_flats(initial_flats(mlp()))
    assert engine.buffer("lr").tolist() == [0.01]
    engine.step(a_batch())
    assert engine.buffer("lr").tolist() == [0.5]


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        *(("lr", x, f"lr of group default of engine.optimizer is {x}") for x in (-1.0, NAN, INF)),
        ("lr", torch.tensor(0.1), "is a tensor, but should be a number"),
        ("lr", "fast", "is 'fast', but should be a number."),
        ("lr", None, "is None, but should be a number."),
        ("betas", (0.9, 1.0), "beta2 of group default of engine.optimizer is 1.0"),
        *(("betas", betas, "but should be 2 numbers.") for betas in (0.9, (0.9, None))),
        ("eps", -1e-8, "eps of group default"),
        ("weight_decay", -0.1, "weight_decay of group default"),
    ],
)
def test_an_invalid_setting_is_refused_before_the_step(
    engine: Engine, key: str, value: object, sentence: str
) -> None:
    before = engine.full_parameters()
    valid = engine.optimizer.param_groups[0][key]
    engine.optimizer.param_groups[0][key] = value
    with pytest.raises(UserError) as caught:
        engine.step(a_batch())
    assert sentence in str(caught.value)
    assert engine.step_count == 0
    assert torch.equal(engine.full_parameters()["pre.weight"], before["pre.weight"])
    engine.optimizer.param_groups[0][key] = valid
    engine.step(a_batch())


@pytest.mark.parametrize(
    ("optimizer", "changes", "sentence"),
    [
        ("sgd", {"momentum": 0.9}, "because the program was compiled without momentum"),
        ("momentum", {"momentum": 1.0}, "at least 0 and below 1"),
        ("momentum", {"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
        ("momentum", {"nesterov": True, "dampening": 0.5}, "nesterov needs .* no dampening"),
    ],
)
def test_settings_of_sgd_go_together(
    optimizer: str, changes: dict[str, object], sentence: str
) -> None:
    lockstep = begun(Lockstep(lowered(mlp(optimizer=optimizer), 3, 2)))
    assert lockstep.optimizer.param_groups[0]["nesterov"] is False
    lockstep.optimizer.param_groups[0].update(changes)
    with pytest.raises(UserError, match=sentence):
        lockstep.step(random_batches(1, 2)[0])


def test_it_steps_with_the_engine_alone(engine: Engine) -> None:
    optimizer = engine.optimizer
    optimizer.zero_grad()
    with pytest.raises(UserError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UserError, match=r"needs at least one micro_step\(\) before it"):
        optimizer.step()
    with pytest.raises(UserError, match="takes no further groups"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))
    with pytest.raises(UserError, match="has 2 groups, but the program was compiled with 1"):
        engine.step(a_batch())


def test_a_step_of_the_optimizer_is_the_engines_update(engine: Engine) -> None:
    scheduler = lr_scheduler.StepLR(engine.optimizer, step_size=1)
    engine.micro_step(a_batch())
    engine.optimizer.param_groups[0]["lr"] = 0.25
    engine.optimizer.step()
    scheduler.step()
    assert engine.step_count == 1
    assert engine.buffer("lr").tolist() == [0.25]
    with pytest.raises(UserError, match="needs at least one micro_step"):
        engine.optimizer.step()


def test_hooks_and_schedulers_see_the_updates_of_the_engine(engine: Engine) -> None:
    calls: list[object] = []
    engine.optimizer.register_step_post_hook(lambda *given: calls.append(given))
    scheduler = lr_scheduler.StepLR(engine.optimizer, step_size=1)
    engine.step(a_batch())
    scheduler.step()  # Warnings are errors here: torch warns of a scheduler that comes before the optimizer.
    assert len(calls) == 1


def test_a_scheduler_before_the_first_update_is_warned_of(engine: Engine) -> None:
    """So the test above can fail."""
    scheduler = lr_scheduler.StepLR(engine.optimizer, step_size=1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_settings_are_saved_and_loaded(engine: Engine) -> None:
    scheduler = lr_scheduler.OneCycleLR(engine.optimizer, max_lr=0.1, total_steps=10)
    for _ in range(3):
        engine.step(a_batch())
        scheduler.step()
    saved = engine.optimizer.state_dict(), scheduler.state_dict()
    assert saved[0]["state"] == {}
    other = begun(Engine(lowered(mlp(), 3, 1)))
    resumed = lr_scheduler.OneCycleLR(other.optimizer, max_lr=0.1, total_steps=10)
    other.optimizer.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for one, its in ((engine, scheduler), (other, resumed)):
        one.step(a_batch())
        its.step()
    assert other.buffer("lr").tolist() == engine.buffer("lr").tolist()
    assert other.buffer("hyper").tolist() == engine.buffer("hyper").tolist()
    ours, theirs = other.optimizer.param_groups[0], engine.optimizer.param_groups[0]
    assert {k: v for k, v in ours.items() if k != "params"} == {
        k: v for k, v in theirs.items() if k != "params"
    }
    other.close()


def test_states_of_parameters_and_other_groups_are_not_loaded(engine: Engine) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    theirs = torch.optim.AdamW([parameter])
    theirs.step()
    with pytest.raises(UserError, match="which belong to checkpoints"):
        engine.optimizer.load_state_dict(theirs.state_dict())
    fresh = torch.optim.AdamW([parameter]).state_dict()
    with pytest.raises(UserError, match="cannot take over these settings"):
        engine.optimizer.load_state_dict(fresh)
    fresh["param_groups"] *= 2
    with pytest.raises(UserError, match="has 1 groups, but the state to load has 2"):
        engine.optimizer.load_state_dict(fresh)
