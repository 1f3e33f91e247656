"""What a script changes between steps counts, or is refused by name; nothing is ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zeroir
from tests.api import living_net
from tests.api.living_net import (
    Scaled,
    X,
    engine_of,
    loss,
    net_of,
    plain_step,
    scaled,
    set_global,
    settings,
    table,
)
from tests.support.examples import examples
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine


@pytest.fixture(autouse=True)
def changes_undone() -> Iterator[None]:
    with living_net.restored():
        yield


unread: list[float] = []


CHANGES: list[tuple[str, Callable[[nn.Sequential], object], tuple[str, ...]]] = [
    ("a global", set_global("beta", 0.5), ("beta", "is 0.5 now", "was 0.0", "living_net.py:")),
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


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[nn.Sequential, Engine]]:
    net = net_of()
    engine = engine_of(net)
    engine.step(X)
    yield net, engine
    engine.close(return_values=False)


@pytest.mark.parametrize(
    ("change", "facts"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES]
)
def test_what_a_program_does_not_follow_is_refused_by_name(
    trained: tuple[nn.Sequential, Engine],
    change: Callable[[nn.Sequential], object],
    facts: tuple[str, ...],
) -> None:
    net, engine = trained
    before = engine.step_count
    with living_net.restored(net):
        change(net)
        with pytest.raises(UserError) as refusal:
            engine.step(X)
    for fact in facts:
        assert fact in str(refusal.value)
    assert engine.step_count == before
    engine.step(X)


def test_a_change_between_compiling_and_the_engine_is_refused() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, evaluate=False, world_size=1)
    scaled(net).tau = 3.0
    with pytest.raises(UserError, match=r"2\.tau"):
        compiled.engine()
    assert not net[0].weight.is_meta


def test_training_goes_on_once_a_change_is_undone_or_ignored() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, evaluate=False, world_size=1)
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
    engine = engine_of(net, evaluate=True)
    scaled(net).epoch = 7
    settings.note = "changed"
    unread.append(engine.step(X).loss)
    net.eval()
    engine.evaluate(X)
    net.train()
    engine.step(X)


class Aimed:
    """A module in an engine, and a loss that reads a tensor outside besides."""

    def __init__(self, *, compile_again: bool) -> None:
        self.net, self.aim = net_of(), torch.zeros(2)
        compiled = zeroir.compile(
            self.net,
            X,
            loss=self.loss,
            lr=0.0,
            optimizer="sgd",
            evaluate=False,
            world_size=1,
        )
        self.engine = compiled.engine(self_check=False, compile_again=compile_again)

    def loss(self, module: nn.Module, x: Tensor) -> Tensor:
        distance: Tensor = (module(x) - self.aim).square().mean()
        return loss(module, x) + distance

    def change(self, number: int) -> None:
        if number < len(CHANGES):
            CHANGES[number][1](self.net)
        else:
            self.aim.add_(number)

    def is_refused(self) -> bool:
        """Whether a step is refused; else it has the loss of the user's code as it is, on the same parameters."""
        try:
            found = self.engine.step(X).loss
        except UserError:
            return True
        with self.engine.gathered() as module, torch.no_grad():
            assert found == self.loss(copy.deepcopy(module), X).item()
        return False


@pytest.fixture(scope="module")
def aimed() -> Iterator[Aimed]:
    made = Aimed(compile_again=False)
    yield made
    made.engine.close(return_values=False)


@pytest.mark.slow
@given(drawn=st.lists(st.integers(0, len(CHANGES) + 3), min_size=1, max_size=4))
@examples(200)
def test_no_change_makes_a_silent_difference_from_eager(aimed: Aimed, drawn: list[int]) -> None:
    with living_net.restored(aimed.net):
        for number in drawn:
            aimed.change(number)
            aimed.is_refused()
    aimed.aim.zero_()
    assert not aimed.is_refused()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.filterwarnings("ignore:The module Sequential is in evaluation mode")
def test_a_program_compiled_again_computes_as_eager(part: int) -> None:
    """Each change is made once, some after others; those come last that no program follows."""
    made = Aimed(compile_again=True)
    refused = ("freezing all", "a layer", "a parameter")
    numbers = sorted(range(len(CHANGES) + 1), key=lambda each: names_of_changes[each] in refused)
    for number in numbers[part::3]:
        made.change(number)
        assert made.is_refused() == (names_of_changes[number] in refused)
    made.engine.close(return_values=False)


names_of_changes = [*(name for name, _, _ in CHANGES), "a tensor outside"]


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
    given = {"lr": 0.1, "optimizer": "sgd", "evaluate": False, **options}
    compiled = zeroir.compile(net, X, loss=loss, world_size=1, **given)  # type: ignore[arg-type]
    return compiled.engine(self_check=False)


@pytest.mark.slow
def test_a_program_is_compiled_again_once_for_each_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, plain = net_of(), net_of()
    engine = following_engine(net, micro_steps=2)
    for value, slope in ((0.0, 0.5), (0.5, 0.5), (0.5, 0.25), (0.0, 0.5), (0.5, 0.25)):
        set_global("beta", value)(net)
        Scaled.slope = slope
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


@pytest.mark.slow
def test_too_many_states_and_other_layers_are_refused() -> None:
    net = net_of()
    engine = following_engine(net)
    for number in range(1, 8):
        Scaled.slope = 0.5 + number
        engine.step(X)
    Scaled.slope = 100.0
    with pytest.raises(UserError, match=r"Scaled\.slope.* is 100\.0 now.*pass it with the batch"):
        engine.step(X)
    Scaled.slope = 0.5
    engine.step(X)
    net[3] = nn.Linear(4, 2)
    with pytest.raises(UserError, match=r"submodule 3 is another Linear"):
        engine.step(X)


@pytest.mark.slow
def test_programs_compiled_again_ignore_the_same_names() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False, ignore=["2.tau"])
    scaled(net).factors[1] = 3.0
    engine.step(X)
    scaled(net).tau = 0.5
    engine.step(X)


@pytest.mark.slow
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
    compiled = zeroir.compile(net, X, loss=loss, evaluate=False, world_size=1)
    net.eval()
    engine = compiled.engine(self_check=False, compile_again=False)
    with pytest.raises(UserError, match="The model is in evaluation mode"):
        engine.step(X)
    net.train()
    engine.step(X)


def test_engines_of_one_program_do_not_share_what_they_ignore() -> None:
    net = net_of()
    compiled = zeroir.compile(net, X, loss=loss, evaluate=False, world_size=1)
    first = compiled.engine(self_check=False, ignore="2.tau")
    scaled(net).tau = 0.5
    first.step(X)
    first.close()
    with pytest.raises(UserError, match=r"2\.tau is|2\.tau, which"):
        compiled.engine(self_check=False)
    scaled(net).tau = 1.0
    second = compiled.engine(self_check=False)
    second.step(X)


@pytest.mark.slow
def test_a_change_of_code_keeps_a_change_of_the_optimizer_and_steps_of_several_batches() -> None:
    net = net_of()
    own = torch.optim.SGD(net.parameters(), lr=0.5)
    compiled = zeroir.compile(net, X, loss=loss, optimizer=own, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False)
    engine.step(X)
    own.param_groups[0]["lr"] = 0.25
    scaled(net).tau = 2.0
    engine.step(X)
    assert engine.optimizer.param_groups[0]["lr"] == 0.25
    scaled(net).tau = 4.0
    engine.step([X, X])
    assert engine.step_count == 3


def test_autocast_around_an_engine_is_refused(trained: tuple[nn.Sequential, Engine]) -> None:
    _, engine = trained
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UserError, match=r"within torch\.autocast\('cpu'\), which changes nothing"),
    ):
        engine.step(X)
    engine.step(X)


def test_a_hook_of_all_modules_is_refused(trained: tuple[nn.Sequential, Engine]) -> None:
    _, engine = trained
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: given[2])
    try:
        with pytest.raises(UserError, match="A hook of all modules is there now, but was not"):
            engine.step(X)
    finally:
        handle.remove()
    engine.step(X)
