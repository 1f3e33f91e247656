"""What a script freezes, trains again or sets to evaluation mode takes effect as in plain PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api import freezing_workers
from tests.runtime.support import Ranks, require_success
from zeroir.errors import CheckpointWarning, UserError
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.runtime.engine.code_follower import MOST_STATES
from zeroir.runtime.engine.engine import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The module .* is in evaluation mode"),
]

WIDTH = 16
"""The fused kernels of torch's optimizers compute the last elements of other numbers in another way."""

X = torch.linspace(-1, 9, 12 * WIDTH).view(12, WIDTH).sin()
Change = Callable[[nn.Sequential], object]


def net_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.0),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) - x).square().mean()
    return loss


class Pair:
    """A module in an engine and the same one under plain PyTorch; changes apply to both."""

    def __init__(
        self, optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: object
    ) -> None:
        self.net, self.plain = net_of(), net_of()
        self.optimizer = optimizer(self.plain)
        self.own = optimizer(self.net)
        compiled = zeroir.compile(
            self.net,
            X,
            loss=loss_of,
            optimizer=self.own,
            world_size=1,
            evaluate=False,
            **options,  # type: ignore[arg-type]
        )
        self.engine: Engine = compiled.engine(self_check=False)

    def change(self, change: Change) -> None:
        change(self.net)
        change(self.plain)

    def step(self, count: int = 2) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = loss_of(self.plain, X)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            assert self.engine.step(X).loss == loss.item()
        self.require_equal(self.engine.state_dict())

    def require_equal(self, found: dict[str, Tensor]) -> None:
        expected = self.plain.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    def close(self) -> None:
        self.engine.close()
        self.require_equal(self.net.state_dict())


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


def of_module(index: int, change: Callable[[nn.Module], object]) -> Change:
    return lambda net: change(net[index])


MODES: list[tuple[str, Change]] = [
    ("a norm", of_module(1, nn.Module.eval)),
    ("both norms", lambda net: (net[1].eval(), net[5].eval())),
    ("the model", nn.Module.eval),
    ("a norm without its statistics", lambda net: setattr(net[5], "momentum", 0.0)),
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", [each[1] for each in MODES], ids=[each[0] for each in MODES])
def test_modes_take_effect_at_the_next_step(change: Change, stage: int) -> None:
    pair = Pair(momentum, stage=stage)
    pair.step()
    pair.change(change)
    pair.step()
    pair.change(nn.Module.train)
    pair.step()
    pair.close()


def test_a_model_that_begins_in_evaluation_mode_may_leave_it() -> None:
    pair = Pair(momentum)
    pair.change(of_module(1, nn.Module.eval))
    pair.step()
    pair.change(of_module(1, nn.Module.train))
    pair.step()
    # The engine has the count now.
    assert pair.net[1].num_batches_tracked.is_meta
    pair.close()


def freeze(*indices: int) -> Change:
    return lambda net: [net[index].requires_grad_(False) for index in indices]


def thaw(*indices: int) -> Change:
    return lambda net: [net[index].requires_grad_(True) for index in indices]


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(net, nn.Sequential)
    groups = [
        {"params": net[3:].parameters(), "lr": 0.05},
        {"params": net[:3].parameters(), "lr": 0.2, "momentum": 0.5},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        *((momentum, stage) for stage in range(4)),
        (two_groups, 1),
        (two_groups, 3),
        (adamw, 0),
        (adamw, 2),
    ],
)
def test_what_is_frozen_half_way_goes_on_when_it_is_trained_again(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], stage: int
) -> None:
    pair = Pair(optimizer, stage=stage)
    pair.step()
    pair.change(freeze(0, 1))
    pair.step()
    pair.change(lambda net: net[3].bias.requires_grad_(False))
    pair.step()
    pair.change(thaw(0))
    pair.step()
    pair.change(thaw(1, 3))
    pair.step()
    pair.close()


def test_a_group_that_begins_frozen_is_trained_later() -> None:
    def frozen_first(net: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(net, nn.Sequential)
        freeze(0, 1)(net)
        return two_groups(net)

    pair = Pair(frozen_first)
    pair.step()
    assert len(pair.engine.optimizer.param_groups) == 1
    pair.change(thaw(0, 1))
    for group in (pair.own.param_groups[1], pair.optimizer.param_groups[1]):
        group["lr"] = 0.3
    pair.step()
    assert [group["lr"] for group in pair.engine.optimizer.param_groups] == [0.05, 0.3]
    pair.close()


def test_the_schedule_drives_a_group_that_is_trained_later() -> None:
    """From its first step on; settings that the other groups got in the engine stay."""
    net = net_of()
    freeze(0, 1)(net)
    optimizer = two_groups(net)
    compiled = zeroir.compile(
        net, X, loss=loss_of, optimizer=optimizer, schedule="linear{warmup=10,total=10}"
    )
    engine = compiled.engine(self_check=False)
    scheduler = engine.scheduler()
    groups = engine.optimizer.param_groups
    lr = 0.05 / 10
    for _ in range(2):
        engine.step(X)
        scheduler.step()
    groups[0]["momentum"] = 0.8
    thaw(0, 1)(net)
    engine.step(X)
    assert [group["lr"] for group in groups] == pytest.approx([2 * lr, 8 * lr])
    assert [group["momentum"] for group in groups] == [0.8, 0.5]
    scheduler.step()
    assert [group["lr"] for group in groups] == pytest.approx([3 * lr, 12 * lr])
    assert len(scheduler.state_dict()["lrs"]) == 2  # type: ignore[arg-type]


def test_layer_after_layer_is_trained() -> None:
    """As scripts unfreeze a model: more states than an engine compiles programs for."""

    def frozen_first(net: nn.Module) -> torch.optim.Optimizer:
        *others, _ = net.parameters()
        for parameter in others:
            parameter.requires_grad_(False)
        return adamw(net)

    pair = Pair(frozen_first)
    count = len(list(pair.net.parameters()))
    assert count > MOST_STATES + 1
    for number in range(1, count):
        pair.step(1)
        for net in (pair.net, pair.plain):
            list(net.parameters())[-1 - number].requires_grad_(True)
    pair.step(1)
    pair.close()


def test_what_the_optimizer_of_the_script_lacks_is_not_trained() -> None:
    def of_the_last(net: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(net, nn.Sequential)
        freeze(0)(net)
        return torch.optim.SGD(net[6].parameters(), lr=0.1, fused=True)

    pair = Pair(of_the_last)
    pair.step()
    pair.change(thaw(0))
    pair.step()
    pair.close()


def engine_of(**options: object) -> tuple[nn.Sequential, Engine]:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss_of, world_size=1, **options)  # type: ignore[arg-type]
    return net, compiled.engine(self_check=False)


def test_what_is_frozen_costs_neither_gradients_nor_states(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, engine = engine_of(optimizer="adamw")

    def held() -> int:
        quantities = ("grad", "exp_avg", "exp_avg_sq")
        contents = [(b.size_bytes, b.holds) for b in engine.program.buffers]
        return sum(
            size
            for size, content in contents
            if isinstance(content, FlatContent) and content.quantity in quantities
        )

    engine.step(X)
    before = held()
    net.requires_grad_(False)
    net[6].requires_grad_(True)
    engine.step(X)
    # Each flat is filled up to 256 elements.
    assert held() == 3 * 4 * (256 + 256) < before / 2
    net.requires_grad_(True)
    engine.step(X)
    net[0].bias.requires_grad_(False)
    engine.step(X)
    said = [
        record.getMessage() for record in caplog.records if "optimizer states" in record.message
    ]
    assert said[0].startswith("0.weight and 7 more parameters: frozen now; ")
    assert said[1].endswith("trained again, with the optimizer states that they had.")
    assert said[2] == (
        f"0.bias: frozen now; {2 * 4 * WIDTH} bytes of optimizer states wait in the memory of this host."
    )


def states_of(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's states by parameter and name."""
    return cast("dict[str, dict[str, Tensor]]", engine.optimizer_state_dict()["state"])


FORMS: tuple[dict[str, object], ...] = (
    {"optimizer": "adamw", "precision": "bf16", "ema": 0.9},
    {"optimizer": "adamw", "precision": "fp16", "loss_scale": 8.0, "clip": 1.0},
    {"optimizer": "adamw", "optimizer_bits": 8},
    {"optimizer": "adamw", "offload": "optimizer"},
    {"optimizer": "adafactor"},
    {"optimizer": "muon", "lr": 0.01},
    {"optimizer": "shampoo"},
)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_states_of_every_form_wait_unchanged(options: dict[str, object]) -> None:
    """So do master weights and averages of parameters in 16 bits."""
    net, engine = engine_of(**options)

    def values() -> dict[str, Tensor]:
        averages = {"ema": engine.full_parameters(ema=True)} if "ema" in options else {}
        found = {"parameters": engine.full_parameters(), **averages, **states_of(engine)}
        return {
            f"{name} {kind}": value
            for name, kinds in found.items()
            for kind, value in kinds.items()
            if "0." in f"{name} {kind}" and isinstance(value, Tensor)
        }

    for _ in range(2):
        engine.step(X)
    before = values()
    assert len(before) > 2
    freeze(0)(net)
    for _ in range(2):
        engine.step(X)
    thaw(0)(net)
    engine.evaluate(X)  # It goes on with the other program, too.
    after = values()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    engine.step(X)
    assert engine.step_count == 5


def test_parameters_in_16_bits_keep_their_values_in_32_while_they_are_frozen() -> None:
    net, engine = engine_of(optimizer="adamw", precision="bf16")
    engine.step(X)
    before = engine.full_parameters()
    freeze(0)(net)
    engine.step(X)
    assert engine.program.flat_by_name["0.frozen"].dtype is DType.BF16
    with engine.gathered(masters=True) as module:
        lent = module.state_dict()
        for found in (engine.full_parameters(), engine.state_dict(), lent):
            assert torch.equal(found["0.weight"], before["0.weight"])
    loaded = {name: value + 1 / 3 for name, value in engine.state_dict().items()}
    engine.load_state_dict(loaded)
    thaw(0)(net)
    engine.evaluate(X)
    rounded = loaded["0.weight"].bfloat16().float()
    assert torch.equal(engine.full_parameters()["0.weight"], rounded)
    freeze(3)(net)
    engine.step(X)
    trained = engine.full_parameters()
    engine.close()
    assert torch.equal(net.state_dict()["3.weight"], trained["3.weight"])
    assert not torch.equal(trained["3.weight"], trained["3.weight"].bfloat16().float())


def test_first_values_take_the_place_of_those_that_wait() -> None:
    net, engine = engine_of(optimizer="adamw", precision="bf16")
    engine.step(X)
    freeze(0)(net)
    engine.step(X)
    engine.initialise(net_of)
    expected = net_of().state_dict()["0.weight"].bfloat16().float()
    assert torch.equal(engine.full_parameters()["0.weight"], expected)
    thaw(0)(net)
    engine.evaluate(X)
    assert not states_of(engine)["0.weight"]["exp_avg"].any()


def test_a_step_that_has_begun_ends_with_the_parameters_of_its_start() -> None:
    net, engine = engine_of(optimizer="sgd", micro_steps=2)
    engine.micro_step(X, is_last=False)
    freeze(0)(net)
    with pytest.raises(UserError, match=r"0\.weight is frozen now.* call update\(\) before"):
        engine.micro_step(X)
    thaw(0)(net)
    engine.micro_step(X)
    engine.update()
    freeze(0)(net)
    engine.step([X, X])


def test_a_checkpoint_says_what_waits_or_was_counted_apart(tmp_path: Path) -> None:
    net, engine = engine_of(optimizer="adamw")
    engine.step(X)
    freeze(0)(net)
    engine.step(X)
    with pytest.warns(CheckpointWarning, match="lacks the optimizer states .* of 2 parameters"):
        engine.save(tmp_path / "frozen")
    with pytest.warns(CheckpointWarning, match="The state dict of the optimizer lacks .* of 2 par"):
        assert "0.weight" not in states_of(engine)
    thaw(0)(net)
    engine.step(X)
    steps = [states_of(engine)[name]["step"] for name in ("0.weight", "3.weight")]
    assert steps == [2, 3]
    engine.save(tmp_path / "apart")
    _, other = engine_of(optimizer="adamw")
    with pytest.warns(CheckpointWarning, match="counts the steps of parameters .* apart"):
        other.load(tmp_path / "apart")
    other.step(X)
    # The engine itself takes what it saved, and a count of all steps for each of its own.
    engine.load(tmp_path / "apart")
    assert engine.program.counts_of_steps == ("step", "step.1")
    assert [float(engine.buffer(name)) for name in engine.program.counts_of_steps] == [3, 2]
    other.save(tmp_path / "together")
    engine.load(tmp_path / "together")
    assert [float(engine.buffer(name)) for name in engine.program.counts_of_steps] == [4, 4]


def test_an_engine_goes_on_with_values_in_other_places() -> None:
    """Programs of other stages and units, with other flats."""
    torch.manual_seed(0)
    found: list[dict[str, Tensor]] = []
    usual: dict[str, object] = {}
    for choices in (
        [usual] * 4,
        [{"stage": 3}, {"stage": 1}, {"units": "*"}, {"offload": "optimizer"}],
    ):
        programs = [
            zeroir.compile(net_of(), X, loss=loss_of, world_size=1, optimizer="adamw", **each)  # type: ignore[arg-type]
            for each in choices
        ]
        engine = programs[0].engine(self_check=False)
        for program in programs:
            engine.go_on_with(program.program)
            engine.step(X)
            engine.step(X)
        found.append(engine.full_parameters())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_settings_outlive_a_program_with_others_and_new_first_values() -> None:
    first, other = (
        zeroir.compile(net_of(), X, loss=loss_of, world_size=1, optimizer="sgd", lr=lr)
        for lr in (0.1, 0.2)
    )
    engine = first.engine(self_check=False)
    engine.go_on_with(other.program, other.watch)
    engine.initialise(net_of)
    engine.step(X)
    assert engine.optimizer.param_groups[0]["lr"] == engine.buffer("lr").item() == 0.1


def test_a_program_that_counts_all_steps_alike_is_refused_after_a_thaw() -> None:
    net, engine = engine_of(optimizer="adamw")
    first = engine.program
    freeze(0)(net)
    engine.step(X)
    thaw(0)(net)
    engine.step(X)
    with pytest.raises(UserError, match=r"'0\.weight' was trained in 1 of 2 steps"):
        engine.go_on_with(first)
    engine.step(X)


@pytest.mark.dist
def test_three_ranks_freeze_and_train_again_as_eager_replicas(tmp_path: Path) -> None:
    """At stages 1 and 3, bit for bit; each rank keeps a part of the states that wait."""
    ranks = Ranks(
        freezing_workers.RANKS,
        tmp_path,
        module="tests.api.freezing_workers",
    )
    require_success(ranks.wait())
