"""What the loss's other modules read counts as what the model itself reads: criteria, teachers, and lent modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.living_net import X
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

scale = 1.0


class Teacher(nn.Module):
    """Reads attributes, a class attribute and a global."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.act = nn.Softplus()
        self.drop = nn.Dropout(0.0)
        self.gain = 1.0
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.act(self.line(x)))
        return self.gain * self.slope * scale * y if self.is_on else y.detach()


class Loss(nn.Module):
    """A loss that is a module, with modules of its own and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0
        self.distance = nn.HuberLoss(delta=1.0)

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        (teacher,) = teachers["all"]
        y: Tensor = net(x)
        value: Tensor = self.weight * self.distance(4 * y, teacher(x))
        likelihood: Tensor = criterion(y, y.detach().argmax(1))
        return value + likelihood


teachers = {"all": [Teacher().requires_grad_(False)]}
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
loss = Loss()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.manual_seed(0)
    engine = _engine(nn.Linear(4, 2), loss)
    engine.step(X)
    yield engine
    engine.close(return_values=False)


def doubled(self: Teacher, x: Tensor) -> Tensor:
    y: Tensor = 2 * self.line(x)
    return y


(teacher,) = teachers["all"]
CHANGES: list[tuple[object, str, object, str]] = [
    (criterion, "label_smoothing", 0.5, "criterion.label_smoothing"),
    (criterion, "reduction", "sum", "criterion.reduction"),
    (loss, "weight", 0.5, "Loss.weight"),
    (loss.distance, "delta", 0.5, "Loss.distance.delta"),
    (teacher, "gain", 0.5, "teachers['all'][0].gain"),
    (teacher, "is_on", False, "teachers['all'][0].is_on"),
    (teacher.act, "beta", 2.0, "teachers['all'][0].act.beta"),
    (teacher.drop, "p", 0.5, "teachers['all'][0].drop.p"),
    (Teacher, "slope", 0.5, "Teacher.slope"),
    (Teacher, "forward", doubled, "Teacher.forward"),
    (None, "scale", 0.5, "scale"),
]


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"), CHANGES, ids=[change[-1] for change in CHANGES]
)
def test_what_a_module_of_the_loss_reads_counts(
    engine: Engine,
    owner: object,
    name: str,
    value: object,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if owner is None:
        monkeypatch.setitem(globals(), name, value)
    else:
        monkeypatch.setattr(owner, name, value)
    with pytest.raises(UserError) as refusal:
        engine.step(X)
    assert said in str(refusal.value)
    monkeypatch.undo()
    engine.step(X)


def test_a_forward_hook_of_a_module_of_the_loss_reads_what_counts() -> None:
    other, strength = nn.Linear(4, 2).requires_grad_(False), {"value": 1.0}
    other.register_forward_hook(lambda *given: strength["value"] * given[2])

    def distance(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = (net(x) - other(x)).square().mean()
        return value

    engine = _engine(nn.Linear(4, 2), distance)
    engine.step(X)
    strength["value"] = 0.5
    with pytest.raises(UserError, match=r"strength of .*\['value'\].* is 0\.5 now"):
        engine.step(X)


def test_the_attributes_of_a_module_that_another_engine_has_count() -> None:
    generator, critic = nn.Linear(4, 4), Teacher()

    def of_generator(generator: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = critic(generator(x)).square().mean()
        return value

    engines = [
        _engine(critic, lambda critic, x: critic(x).square().mean()),
        _engine(generator, of_generator),
    ]
    before = engines[1].step(X).loss
    critic.gain = 3.0
    with pytest.raises(UserError, match=r"critic of .*\.gain.* is 3\.0 now"):
        engines[1].step(X)
    critic.gain = 1.0
    assert engines[1].step(X).loss == before


def _engine(net: nn.Module, loss: Callable[..., object]) -> Engine:
    compiled = zeroir.compile(
        net,
        X,
        loss=loss,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        micro_steps=zeroir.MicroSteps(mean_over="batches"),
        evaluate=False,
        world_size=1,
    )
    return compiled.engine(self_check=False, compile_again=False)
