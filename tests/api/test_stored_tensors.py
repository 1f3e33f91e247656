"""Tensors that a module's code stores while it computes are there after a step, as after one of plain PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zeroir
from tests.support.examples import examples
from zeroir.config.steps import MicroSteps
from zeroir.errors import ModelWarning, UserError
from zeroir.ir.reports import Storing
from zeroir.runtime.engine.engine import Engine

X = torch.linspace(-1, 1, 24).view(6, 4)


class Net(nn.Module):
    """Four equal blocks, and a place for what a test stores."""

    shared: Tensor

    def __init__(self, store: Callable[[Net, Tensor, Tensor], None] = lambda *_: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(4, 2)
        self.log: dict[str, Any] = {}
        self.history: list[Any] = []
        self.last: Any = None
        self.other: Any = None
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        z = self.head(y)
        self.store(self, y, z)
        loss: Tensor = z.square().mean()
        return loss


@dataclass
class Seen:
    """An object of the user's, outside the module."""

    values: dict[str, Tensor] = field(default_factory=dict)
    last: Tensor | None = None


seen = Seen()


def store_attribute(net: Net, _: Tensor, z: Tensor) -> None:
    net.last = z


def store_items(net: Net, y: Tensor, z: Tensor) -> None:
    net.log["hidden"], net.log["mean"] = y.detach(), z.mean().detach()


def store_everywhere(net: Net, y: Tensor, z: Tensor) -> None:
    """Store in attributes, items and objects: outputs, views, parameters, containers, and what replaces them."""
    net.last = z
    net.other = y
    net.other = net.other.detach() * 2 + z.sum().detach()
    store_items(net, y, z)
    net.log["both"] = {"both": (y.detach(), z.detach()), "count": 2, "none": None}
    net.log["input"] = (net.head.weight.detach().clone(), y.t().detach(), y.detach().argmax(-1))
    Net.shared = y.detach()
    seen.last = z.detach()
    seen.values["y"] = y[0].detach()


def engine_of(net: nn.Module, **options: Any) -> Engine:  # noqa: ANN401
    given = {
        "stage": 3,
        "lr": 0.1,
        "optimizer": "sgd",
        "world_size": 1,
        "evaluate": False,
        **options,
    }
    return zeroir.compile(net, X, **given).engine(self_check=False)


def eager(net: nn.Module, x: Tensor = X) -> Tensor:
    """A plain step, with the values of before it in the loss."""
    loss: Tensor = net(x)
    net.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
    return loss


def _detached(values: object) -> object:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, values)


def require_equal(found: object, expected: object) -> None:
    leaves, structure = pytree.tree_flatten(found)
    expected_leaves, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(leaves, expected_leaves, strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(one, other)
            assert not one.requires_grad
        else:
            assert one == other


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    yield
    seen.values.clear()
    seen.last = None
    if hasattr(Net, "shared"):
        del Net.shared


@pytest.mark.parametrize("ran_before", [False, True])
def test_what_forward_stores_is_there_after_each_step(ran_before: bool) -> None:
    net = Net(store_everywhere)
    if ran_before:
        net(X[:3])  # of another shape
    plain = Net(store_everywhere)
    engine = engine_of(net)
    for factor in (1.0, 2.0):
        eager(plain, X * factor)
        expected = _detached(
            (plain.last, plain.other, plain.log, Net.shared, seen.last, seen.values)
        )
        engine.step(X * factor)
        found = (net.last, net.other, net.log, Net.shared, seen.last, seen.values)
        require_equal(found, expected)
    program = engine.program
    engine.step(X)
    assert engine.program is program
    engine.close()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.shape == other.shape


def test_a_tensor_that_is_written_in_place_is_a_buffer() -> None:
    def store(net: Net, y: Tensor, _: Tensor) -> None:
        net.last.copy_(y.detach())

    net, plain = Net(store), Net(store)
    for each in (net, plain):
        each.last = torch.zeros(6, 4)
    engine = engine_of(net)
    engine.step(X)
    eager(plain)
    with engine.gathered() as module:
        assert isinstance(module, Net)
        require_equal(module.last, plain.last)


def hook_into(kept: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: object, output: Tensor) -> None:
        kept[name] = output.detach()

    return hook


@pytest.mark.slow
def test_hooks_that_keep_activations_may_come_and_go() -> None:
    net, plain = Net(), Net()
    own: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    engine = engine_of(net)
    for step in range(4):
        handles = []
        if step in (1, 3):
            handles = [
                net.get_submodule("blocks.2.0").register_forward_hook(hook_into(own, "third")),
                plain.get_submodule("blocks.2.0").register_forward_hook(
                    hook_into(expected, "third")
                ),
            ]
        engine.step(X)
        eager(plain)
        for handle in handles:
            handle.remove()
        require_equal(own, expected)
        own.clear()
        expected.clear()


@pytest.mark.slow
def test_a_step_is_watched() -> None:
    net, plain = Net(), Net()
    kept: dict[str, Tensor] = {}
    for name in ("blocks.0", "blocks.3", "head"):
        plain.get_submodule(name).register_forward_hook(hook_into(kept, name))
    engine = engine_of(net, evaluate=True)
    first = engine.program
    with engine.watch("blocks.[03]", "head") as watched:
        assert not watched
        for _ in range(2):
            engine.step(X)
            eager(plain)
            require_equal(dict(watched), kept)
        engine.evaluate(X)
        plain.eval()(X)
        require_equal(dict(watched), kept)
    assert not watched
    with pytest.raises(KeyError):
        watched["head"]
    engine.step(X)
    assert engine.program is first
    with pytest.raises(UserError, match=r"like layers\.\*; there are blocks, "):
        engine.watch("head", "layers.*")


def store_values(net: Net, y: Tensor, z: Tensor) -> None:
    """Store what Python reads of tensors: numbers, lists, and arrays of NumPy."""
    net.history.append(z.mean().item())
    net.log["statistics"] = {"mean": y.mean().item(), "rows": y.argmax(-1).tolist()}
    net.last = y.detach().cpu().numpy()
    net.other = (z.isfinite().all().item(), z.detach(), len(z))
    seen.last = z.max().item()  # type: ignore[assignment]


@pytest.mark.slow
def test_values_of_tensors_may_be_stored() -> None:
    net, plain = Net(store_values), Net(store_values)
    with warnings.catch_warnings(action="error"):
        engine = engine_of(net, evaluate=True)
    program = engine.program
    for factor in (1.0, 2.0, 3.0):
        eager(plain, X * factor)
        engine.step(X * factor)
        require_equal(
            [net.history, net.log, net.other], [plain.history, plain.log, _detached(plain.other)]
        )
        assert isinstance(net.last, np.ndarray)
        assert np.array_equal(net.last, plain.last)
    engine.evaluate(X)
    plain.eval()(X)
    require_equal(net.history, plain.history)
    assert engine.program is program


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value > 0,
        bool,
        lambda value: value * 2,
        lambda value: 2 - value,
        lambda value: f"{value:.2f}",
        lambda value: isinstance(value, float),
        lambda value: torch.ones(2) * value,
        torch.tensor,
        lambda value: round(value, 3),
        np.float32,
    ],
)
def test_values_that_are_used_are_refused(use: Callable[[Any], object]) -> None:
    """Also in ways that would not fail, but would go another way than with the number."""

    def store(net: Net, _: Tensor, z: Tensor) -> None:
        net.last = use(z.mean().item())

    with pytest.raises(UserError, match=r"test_stored_tensors.py:\d+ uses the values of a tensor"):
        engine_of(Net(store), units=zeroir.Units(opaque="none"))


class Planned(nn.Module):
    """An object has a part of a dict of its class, so a deep copy of the object has one of its own."""

    plan: ClassVar[dict[str, list[str]]] = {"line": ["inputs"]}

    def __init__(self) -> None:
        super().__init__()
        self.plans = dict(self.plan)
        self.line = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x).square().mean()
        return y


def test_a_module_that_shares_objects_with_its_class_is_watched() -> None:
    engine = engine_of(Planned())
    with engine.watch("line") as watched:
        engine.step(X)
        assert list(watched) == ["line"]


class Returning(nn.Module):
    """Returns what ``give`` makes of the loss and the results of its layer."""

    def __init__(self, give: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.give = nn.Linear(4, 2), give

    def forward(self, x: Tensor) -> object:
        y = self.line(x)
        return self.give(y.square().mean(), y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("give", "beside"),
    [
        (lambda loss, y: (loss, y), lambda y: y),
        (lambda loss, y: (loss, {"y": y, "n": 3}), lambda y: {"y": y, "n": 3}),
        (lambda loss, y: (loss, y, y.mean()), lambda y: (y, y.mean())),
        (lambda loss, y: {"loss": loss, "y": y, "n": 3}, lambda y: {"y": y}),
        (lambda loss, _: loss, lambda _: None),
    ],
    ids=["pair", "dict-in-pair", "triple", "dict", "nothing"],
)
@pytest.mark.parametrize("is_a_loss_function", [False, True])
def test_what_a_step_returns_beside_the_loss(
    give: Callable[[Tensor, Tensor], object],
    beside: Callable[[Tensor], object],
    is_a_loss_function: bool,
) -> None:
    net = Returning(give)
    options: dict[str, Any] = {"world_size": 1, "evaluate": False, "micro_steps": 2}
    if is_a_loss_function:
        options["loss"] = lambda model, batch: model(batch)
    engine = zeroir.compile(net, X, **options).engine(self_check=False)
    first = engine.program
    with pytest.raises(UserError, match=r"call engine.step\(batch, outputs=True\)"):
        _ = engine.step([X, -X]).outputs
    assert engine.program is first
    for _ in range(2):
        values = engine.full_parameters()
        with torch.no_grad():
            y = torch.nn.functional.linear(-X, values["line.weight"], values["line.bias"])
        require_equal(engine.step([X, -X], outputs=True).outputs, beside(y))
        engine.step([X, -X])
        assert engine.program is first
    with engine.eager():
        outputs = engine.step([X, X], outputs=True).outputs
    assert all(not x.requires_grad for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor))


@pytest.mark.slow
def test_an_engine_of_a_file_watches_nothing(tmp_path: Path) -> None:
    """Its program computes what the code stores, which no code in this process asks for."""
    zeroir.compile(Net(store_items), X, world_size=1).save(tmp_path / "net.zir")
    net = Net(store_items)
    engine = zeroir.load(tmp_path / "net.zir").engine(model=lambda: net, self_check=False)
    engine.step(X)
    assert net.log == {}
    with pytest.raises(UserError, match="the engine was made from a file"):
        engine.watch("head")


@pytest.mark.slow
def test_what_is_appended_counts_for_each_micro_batch() -> None:
    def store(net: Net, y: Tensor, z: Tensor) -> None:
        net.history.append(z.detach())
        net.history.append((y[0].detach(), 1))

    net, plain = Net(store), Net(store)
    engine = engine_of(net, micro_steps=2)
    engine.step([X, X * 2])
    engine.micro_step(X * 3)
    engine.update()
    assert len(net.history) == 6
    for factor in (1, 2):
        plain(X * factor)
    require_equal(net.history[:4], plain.history)
    net.history.clear()
    engine.step([X, X])
    assert len(net.history) == 4


@pytest.mark.slow
def test_a_full_deque_drops_its_first_items() -> None:
    last: deque[Tensor] = deque(maxlen=2)
    net = Net(lambda _, __, z: last.append(z.mean().detach()))
    last.extend([torch.zeros(()), torch.ones(())])
    losses = []
    engine = engine_of(net, lr=0.0)
    for factor in (1, 2, 3):
        engine.step(X * factor)
        losses.append(last[-1].item())
    assert len(last) == 2
    assert [each.item() for each in last] == losses[1:]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_variables_of_functions_and_globals() -> None:
    latest: Tensor | None = None

    def hook(_: nn.Module, __: object, output: Tensor) -> None:
        nonlocal latest
        latest = output.detach()

    net = Net()
    net.head.register_forward_hook(hook)
    engine = engine_of(net)
    engine.step(X)
    first = latest
    engine.step(X)
    assert isinstance(first, Tensor)
    assert isinstance(latest, Tensor)
    assert first.shape == latest.shape == (6, 2)
    assert not torch.equal(first, latest)


@pytest.mark.slow
def test_what_an_evaluation_stores_is_there_after_it() -> None:
    def store(net: Net, y: Tensor, z: Tensor) -> None:
        if net.training:
            net.last = y.detach()
        else:
            net.log["attention"] = z.detach().softmax(-1)

    net, plain = Net(store), Net(store)
    engine = engine_of(net, evaluate=True)
    engine.step(X)
    assert net.log == {}
    first = net.last
    found = engine.evaluate(X * 2)
    assert net.last is first
    eager(plain)
    assert found.loss == plain.eval()(X * 2).item()
    require_equal(net.log, plain.log)


@pytest.mark.slow
def test_a_batch_of_another_size_stores_what_is_its_own() -> None:
    net = Net(store_items)
    plain = Net(store_items)
    engine = engine_of(net, shapes="0: rows<=16, 4", micro_steps=2, evaluate=True)
    for rows in (6, 3, 11):
        batch = torch.linspace(-2, 1, 4 * rows).view(rows, 4)
        plain.load_state_dict(engine.state_dict())
        engine.step([batch, batch[:2]])
        plain(batch[:2])
        require_equal(net.log, _detached(plain.log))
        plain.load_state_dict(engine.state_dict())
        engine.evaluate(batch)
        plain(batch)
        require_equal(net.log, _detached(plain.log))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "precision": "bf16", "evaluate": True},
        {"recompute": "*", "offload": "parameters"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"stage": 0},
                {"stage": 1, "micro_steps": MicroSteps(count=2, order="layer")},
            )
        ),
    ],
    ids=str,
)
def test_kept_activations_under_other_options(options: dict[str, Any]) -> None:
    kept: dict[str, Tensor] = {}
    net = Net()
    for name in ("blocks.1.0", "blocks.3", "head"):
        net.get_submodule(name).register_forward_hook(hook_into(kept, name))
    plain = copy.deepcopy(net)
    engine = engine_of(net, **options)
    micro_steps = 2 if "micro_steps" in options else 1
    batches = [X * (1 + index) for index in range(micro_steps)]
    engine.step(batches if micro_steps > 1 else X)
    found = dict(kept)
    kept.clear()
    plain(batches[-1])
    for name, value in kept.items():
        tolerance = 0.02 if options.get("precision") == "bf16" else 0.0
        torch.testing.assert_close(found[name].float(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_groups_of_micro_batches_append_to_no_list() -> None:
    net = Net(lambda net, _, z: net.history.append(z.detach()))
    with pytest.raises(UserError, match=r"appends a tensor to a list .* --order layer"):
        engine_of(net, micro_steps=MicroSteps(count=2, order="layer"))


def test_what_is_read_again_is_state_and_is_refused() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 2)
            self.before: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            y = self.line(x) + 0.5 * self.before.get("y", 0.0)
            self.before["y"] = y.detach()
            loss: Tensor = y.square().mean()
            return loss

    with pytest.raises(UserError, match="changes before and computes something else"):
        engine_of(Momentum())


@pytest.mark.slow
def test_what_the_backward_stores_is_named_in_a_warning() -> None:
    kept: dict[str, Tensor] = {}
    net = Net(store_attribute)

    def hook(_: nn.Module, __: object, gradients: tuple[Tensor, ...]) -> None:
        kept["gradient"] = gradients[0].detach()

    net.head.register_full_backward_hook(hook)
    with pytest.warns(ModelWarning, match=r"stores .*kept\['gradient'\], and the program"):
        engine = engine_of(net)
    engine.step(X)
    assert isinstance(net.last, Tensor)
    assert kept == {}


@pytest.mark.parametrize(
    "names", [("kept[Linear]", "kept['same']", "kept['complex']"), ("first",)], ids=str
)
def test_what_cannot_be_stored_is_named_in_a_warning(names: tuple[str, ...]) -> None:
    """A key that is a module, a tensor that the code did not make, one of a dtype that programs do not have, and one
    that it stores at its first call only."""
    kept: dict[object, Tensor] = {}
    given = torch.ones(3)

    def hook(module: nn.Module, _: object, output: Tensor) -> None:
        if "first" in names:
            vars(module).setdefault("first", output.detach())
            return
        kept[module] = output.detach()
        kept["same"] = given
        kept["complex"] = torch.complex(output.detach(), output.detach())

    net = Net()
    net.head.register_forward_hook(hook)
    with pytest.warns(ModelWarning, match="stores .*, and the program") as warned:
        engine_of(net).step(X)
    text = str(warned[0].message)
    for name in names:
        assert name in text


@pytest.mark.slow
def test_the_text_of_a_program_says_what_it_stores() -> None:
    compiled = zeroir.compile(Net(store_items), X, world_size=1)
    stored = [(each.path, each.stored) for each in compiled.program.outputs]
    assert ("log['hidden']", Storing.STEP) in stored
    assert ("log['mean']", Storing.EVALUATION) in stored
    assert "output \"log['mean']\" : f32[] <- %stored.log.mean stored=step" in compiled.text()


@st.composite
def stores(draw: st.DrawFn) -> list[tuple[str, str]]:
    names = st.sampled_from(["last", "log", "item", "history", "seen"])
    values = st.sampled_from(["y", "z", "pair", "scalar"])
    return draw(
        st.lists(st.tuples(names, values), min_size=3, max_size=5, unique_by=lambda x: x[0])
    )


@pytest.mark.slow
@given(drawn=stores(), factors=st.lists(st.floats(-2, 2), min_size=1, max_size=3))
@examples(15)
def test_any_places_hold_what_eager_pytorch_leaves_there(
    drawn: list[tuple[str, str]], factors: list[float]
) -> None:
    def store(net: Net, y: Tensor, z: Tensor) -> None:
        y, z = y.detach(), z.detach()
        made: dict[str, Any] = {"y": y, "z": z, "pair": (y, z), "scalar": z.mean()}
        for place, name in drawn:
            value = made[name]
            match place:
                case "last":
                    net.last = value
                case "log":
                    net.log = {"value": value}
                case "item":
                    net.log["item"] = value
                case "history":
                    net.history.append(value)
                case _:
                    seen.last = value

    net, plain = Net(store), Net(store)
    engine = engine_of(net)
    for factor in factors:
        eager(plain, X * factor)
        of_plain = (plain.last, plain.log, plain.history, seen.last)
        engine.step(X * factor)
        require_equal((net.last, net.log, net.history, seen.last), of_plain)
    engine.close(return_values=False)
