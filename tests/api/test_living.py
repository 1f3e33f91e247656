"""What a script changes between steps counts, or is refused by name; nothing is ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zeroir
from tests.runtime.support import COMPILING_SOURCES, Ranks, require_success
from tests.support.examples import examples
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

X = torch.linspace(-1, 1, 24).view(6, 4)


@dataclass
class Settings:
    """An object of the user's that the loss reads."""

    weight: float = 0.25
    note: str = "unread"


class Scaled(nn.Module):
    """Reads attributes, a class attribute, and a list."""

    slope = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0
        self.epoch = 0
        self.factors = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.leaky_relu(x, self.slope) / self.tau
        return y * self.factors[0] + self.factors[1]


def net_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled(), nn.Linear(4, 2))


beta = 0.0
settings = Settings()
table = {"gain": 1.0}
unread: list[float] = []


def penalty(y: Tensor) -> Tensor:
    return beta * y.abs().mean() + settings.weight * y.square().mean() * table["gain"]


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return penalty(module(x))


def engine_of(net: nn.Module, loss: Callable[..., object] = loss, **options: object) -> Engine:
    compiled = zeroir.compile(net, X, loss=loss, world_size=1, **{"lr": 0.1, **options})  # type: ignore[arg-type]
    return compiled.engine(self_check=False, compile_again=False)


def set_global(name: str, value: object) -> Callable[[nn.Sequential], None]:
    return lambda _: globals().__setitem__(name, value)


def scaled(net: nn.Sequential) -> Scaled:
    return next(module for module in net if isinstance(module, Scaled))


CHANGES: list[tuple[str, Callable[[nn.Sequential], object], tuple[str, ...]]] = [
    ("a global", set_global("beta", 0.5), ("beta", "is 0.5 now", "was 0.0", "test_living.py:")),
    ("an item of a dict", lambda _: table.update(gain=2.0), ("table['gain']", "is 2.0")),
    (
        "an object's attribute",
        lambda _: setattr(settings, "weight", 0.5),
        ("settings.weight", "is 0.5"),
    ),
    ("a function", set_global("penalty", lambda y: y.mean()), ("penalty", "is another")),
    ("an attribute", lambda n: setattr(scaled(n), "tau", 2.0), ("2.tau", "is 2.0", "was 1.0")),
    ("an item", lambda n: scaled(n).factors.__setitem__(1, 3.0), ("2.factors[1]", "is 3.0")),
    ("a class attribute", lambda _: setattr(Scaled, "slope", 0.1), ("Scaled.slope", "is 0.1")),
    ("an attribute of torch's", lambda n: setattr(n[1], "momentum", 0.5), ("1.momentum", "0.5")),
    ("the mode", lambda n: n.eval(), ("The model", "evaluation mode")),
    ("one module's mode", lambda n: n[1].eval(), ("1 is in evaluation mode",)),
    (
        "freezing",
        lambda n: n[0].weight.requires_grad_(False),
        ("parameter 0.weight", "is frozen"),
    ),
    ("freezing all", lambda n: n.requires_grad_(False), ("parameter 0.weight", "is frozen")),
    ("a hook", lambda n: n[0].register_forward_hook(lambda *_: None), ("A hook of 0",)),
    ("a layer", lambda n: n.__setitem__(3, nn.Linear(4, 2)), ("submodule 3", "another Linear")),
    ("one more layer", lambda n: n.append(nn.ReLU()), ("submodule 4", "is ReLU")),
    (
        "a parameter",
        lambda n: setattr(n[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        ("0.weight is another tensor",),
    ),
]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("beta", "penalty"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setattr(settings, "weight", settings.weight)
    monkeypatch.setitem(table, "gain", table["gain"])
    monkeypatch.setattr(Scaled, "slope", Scaled.slope)


@pytest.mark.parametrize(
    ("change", "facts"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES]
)
def test_what_a_program_does_not_follow_is_refused_by_name(
    change: Callable[[nn.Sequential], object], facts: tuple[str, ...]
) -> None:
    net = net_of()
    engine = engine_of(net)
    engine.step(X)
    change(net)
    with pytest.raises(UserError) as refusal:
        engine.step(X)
    for fact in facts:
        assert fact in str(refusal.value)
    assert engine.step_count == 1
    engine.close(return_values=False)


def test_a_change_between_compiling_and_the_engine_is_refused() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, world_size=1)
    scaled(net).tau = 3.0
    with pytest.raises(UserError, match=r"2\.tau"):
        compiled.engine()
    assert not net[0].weight.is_meta


def test_training_goes_on_once_a_change_is_undone_or_ignored() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, world_size=1)
    engine = compiled.engine(self_check=False, ignore=["2.tau", "A*"], compile_again=False)
    scaled(net).tau = 3.0
    engine.step(X)
    set_global("beta", 0.5)(net)
    with pytest.raises(UserError, match="beta"):
        engine.micro_step(X)
    set_global("beta", 0.0)(net)
    engine.micro_step(X)
    engine.update()
    assert engine.step_count == 2


def test_what_no_step_reads_may_change() -> None:
    net = net_of()
    engine = engine_of(net)
    scaled(net).epoch = 7
    settings.note = "changed"
    unread.append(engine.step(X).loss)
    net.eval()
    engine.evaluate(X)
    net.train()
    engine.step(X)


def test_a_module_that_the_loss_reads_is_compared_too() -> None:
    other = Scaled()

    def with_other(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = other(module(x))
        return y.square().mean()

    engine = engine_of(net_of(), with_other)
    engine.step(X)
    other.tau = 0.5
    with pytest.raises(UserError, match=r"other of .*with_other.*\.tau.* is 0\.5 now"):
        engine.step(X)


def plain_step(net: nn.Module, loss: Tensor, lr: float) -> float:
    net.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=lr)
    return loss.item()


def test_tensors_outside_the_module_have_their_present_values() -> None:
    """Two that are equal at first, one that is replaced in its module, and one that only an evaluation reads."""
    first, second, shown = torch.ones(2), torch.ones(2), torch.ones(2)
    teacher = nn.Linear(4, 2).requires_grad_(False)

    def distance(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = module(x)
        aim = teacher(x)
        value: Tensor = (y * first - aim * second).square().mean()
        return value, {"y": y * shown}

    net, plain = net_of(), net_of()
    engine = engine_of(net, distance, optimizer="sgd")
    for step in range(3):
        expected = plain_step(plain, distance(plain, X)[0], 0.1)
        assert engine.step(X).loss == expected
        first.add_(0.5)
        second.data.mul_(0.5)
        shown.fill_(step)
        teacher.weight.data = torch.full((2, 4), 0.1 * step)
    plain.eval()
    value, outputs = distance(plain, X)
    evaluation = engine.evaluate(X)
    assert evaluation.loss == value.item()
    assert isinstance(evaluation.outputs, dict)
    assert torch.equal(evaluation.outputs["y"], outputs["y"])


def test_a_replaced_tensor_outside_is_refused() -> None:
    outside = SimpleNamespace(aim=torch.zeros(2))

    def distance(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x) - outside.aim
        return y.square().mean()

    engine = engine_of(net_of(), distance)
    engine.step(X)
    outside.aim = torch.ones(2)
    with pytest.raises(UserError, match="aim"):
        engine.step(X)


def test_the_scripts_own_optimizer_and_its_scheduler_drive_the_program() -> None:
    def optimizer_of(net: nn.Sequential) -> torch.optim.AdamW:
        groups: list[dict[str, object]] = [
            {"params": net[:2].parameters(), "lr": 0.1},
            {"params": net[3].parameters()},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    net, plain = net_of(), net_of()
    own, of_plain = optimizer_of(net), optimizer_of(plain)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (own, of_plain)]
    compiled = zeroir.compile(net, X, loss=loss, optimizer=own, world_size=1)
    engine = compiled.engine(self_check=False)
    for _ in range(5):
        of_plain.zero_grad()
        expected = loss(plain, X)
        expected.backward()  # type: ignore[no-untyped-call]
        of_plain.step()
        assert engine.step(X).loss == expected.item()
        for scheduler in schedulers:
            scheduler.step()
    own.param_groups[0]["betas"] = (0.5, 0.9)
    engine.step(X)
    assert engine.optimizer.param_groups[0]["betas"] == (0.5, 0.9)
    with pytest.raises(UserError, match=r"call engine\.step\(batch\)"):
        own.step()
    own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UserError, match="has 3 groups now, and had 2"):
        engine.step(X)


USES: list[tuple[str, Callable[[nn.Sequential], object]]] = [
    ("forward", lambda net: net(X)),
    ("state_dict", nn.Module.state_dict),
    ("to", lambda net: net.to(torch.float64)),
    ("deepcopy", copy.deepcopy),
    ("data", lambda net: net[0].weight.data),
    ("in place", lambda net: net.get_buffer("1.running_mean").zero_()),
    ("printing values", lambda net: net.get_parameter("0.weight").tolist()),
]


@pytest.mark.parametrize("use", [each[1] for each in USES], ids=[each[0] for each in USES])
def test_a_module_says_that_its_values_are_in_the_engine(
    use: Callable[[nn.Sequential], object],
) -> None:
    net = net_of()
    engine = engine_of(net)
    engine.step(X)
    with pytest.raises(UserError, match="values of this module are in the engine"):
        use(net)
    engine.close(return_values=False)


def test_a_module_without_values_can_be_described_and_saved_later(tmp_path: Path) -> None:
    net = net_of()
    shapes = [(name, p.shape, p.numel(), p.dtype) for name, p in net.named_parameters()]
    engine = engine_of(net)
    engine.step(X)
    described = [(name, p.shape, p.numel(), p.dtype) for name, p in net.named_parameters()]
    assert described == shapes
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert "in the engine" in repr(net[0].weight)
    expected = engine.state_dict()
    engine.close()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    saved = torch.load(tmp_path / "net.pt")
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert type(net[0].weight) is nn.Parameter


def test_values_are_not_given_back_while_an_exception_is_handled() -> None:
    net = net_of()
    engine = engine_of(net)

    def failing() -> None:
        try:
            raise ZeroDivisionError
        finally:
            engine.close()

    with pytest.raises(ZeroDivisionError):
        failing()
    assert net[0].weight.is_meta


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_train_beside_a_teacher_that_follows_and_end_with_the_values(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, module="tests.api.living_workers", sources=COMPILING_SOURCES)
    require_success(ranks.wait())


@st.composite
def changes(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, len(CHANGES) + 3), min_size=1, max_size=4))


@pytest.mark.slow
@given(seed=st.integers(0, 1000), drawn=changes())
@examples(60)
def test_no_change_makes_a_silent_difference_from_eager(seed: int, drawn: list[int]) -> None:
    require_no_silent_difference(seed, drawn, compile_again=False)


@pytest.mark.slow
@given(seed=st.integers(0, 1000), drawn=changes())
@examples(20)
@pytest.mark.filterwarnings("ignore:The module Sequential is in evaluation mode")
def test_a_program_compiled_again_computes_as_eager(seed: int, drawn: list[int]) -> None:
    require_no_silent_difference(seed, drawn, compile_again=True)


def require_no_silent_difference(seed: int, drawn: list[int], *, compile_again: bool) -> None:
    """A step after changes is refused, or has the loss of the user's code as it is then, on the same parameters."""
    before = {name: globals()[name] for name in ("beta", "penalty")}
    others = (settings.weight, table["gain"], Scaled.slope)
    net = net_of(seed)
    aim = torch.zeros(2)

    def with_aim(module: nn.Module, x: Tensor) -> Tensor:
        distance: Tensor = (module(x) - aim).square().mean()
        return loss(module, x) + distance

    compiled = zeroir.compile(net, X, loss=with_aim, lr=0.0, optimizer="sgd", world_size=1)
    engine = compiled.engine(self_check=False, compile_again=compile_again)
    try:
        for number in drawn:
            if number < len(CHANGES):
                CHANGES[number][1](net)
            else:
                aim.add_(number)
            try:
                found = engine.step(X).loss
            except UserError:
                continue
            with engine.gathered() as module, torch.no_grad():
                assert found == with_aim(copy.deepcopy(module), X).item()
    finally:
        globals().update(before)
        settings.weight, table["gain"], Scaled.slope = others
        engine.close(return_values=False)


def test_an_engine_goes_on_with_a_program_that_was_compiled_after_a_change() -> None:
    aim = torch.zeros(2)

    def distance(module: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = (module(x) - aim).square().mean()
        return value

    net = net_of()
    engine = engine_of(net, distance, lr=0.0, optimizer="sgd")
    first = engine.step(X).loss
    scaled(net).tau = 0.25
    aim.fill_(0.5)
    again = zeroir.compile(net, X, loss=distance, lr=0.0, optimizer="sgd", world_size=1)
    with pytest.raises(UserError, match=r"compiled\.watch"):
        engine.go_on_with(again.program)
    engine.go_on_with(again.program, again.watch)
    found = engine.step(X).loss
    with engine.gathered() as module, torch.no_grad():
        assert found == distance(copy.deepcopy(module), X).item() != first


def following_engine(net: nn.Module, **options: object) -> Engine:
    """An engine that compiles its program again after a change."""
    given = {"lr": 0.1, "optimizer": "sgd", **options}
    compiled = zeroir.compile(net, X, loss=loss, world_size=1, **given)  # type: ignore[arg-type]
    return compiled.engine(self_check=False)


def test_a_program_is_compiled_again_once_for_each_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, plain = net_of(), net_of()
    engine = following_engine(net, micro_steps=2)
    for value, tau in ((0.0, 1.0), (0.5, 1.0), (0.5, 0.25), (0.0, 1.0), (0.5, 0.25)):
        for module in (net, plain):
            set_global("beta", value)(module)
            scaled(module).tau = tau
        expected = plain_step(plain, loss(plain, X), 0.1)
        engine.micro_step(X)
        assert engine.update().loss == pytest.approx(expected, rel=1e-6)
    said = [record.message for record in caplog.records if "compiled again" in record.message]
    assert len(said) == 2
    assert "beta" in said[0]
    assert "is 0.5 now, but was 0.0" in said[0]
    engine.close()
    for name, value_of in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value_of)


def test_too_many_states_and_other_parameters_are_refused() -> None:
    net = net_of()
    engine = following_engine(net)
    for number in range(1, 8):
        scaled(net).tau = 1.0 + number
        engine.step(X)
    scaled(net).tau = 100.0
    with pytest.raises(UserError, match=r"2\.tau.* is 100\.0 now.*pass it with the batch"):
        engine.step(X)
    scaled(net).tau = 1.0
    engine.step(X)
    net[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"0\.weight is frozen now"):
        engine.step(X)


def test_programs_compiled_again_ignore_the_same_names() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, world_size=1)
    engine = compiled.engine(self_check=False, ignore=["2.tau"])
    scaled(net).factors[1] = 3.0
    engine.step(X)
    scaled(net).tau = 0.5
    engine.step(X)


def test_the_mode_of_an_evaluation_does_not_matter_when_an_engine_is_made() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, stage=3)  # for as many ranks as the job has
    net.eval()
    engine = compiled.engine(self_check=False)
    engine.evaluate(X)
    first = engine.program
    net.train()
    engine.step(X)
    assert engine.program is first
    net[1].eval()
    net[1].train()
    engine.step(X)
    assert engine.program is first
    scaled(net).tau = 0.5
    engine.step(X)
    assert engine.program is not first
    assert engine.program.mesh.world_size == 1


def test_a_step_in_the_mode_of_an_evaluation_is_refused() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, world_size=1)
    net.eval()
    engine = compiled.engine(self_check=False, compile_again=False)
    with pytest.raises(UserError, match="The model is in evaluation mode"):
        engine.step(X)
    net.train()
    engine.step(X)
