"""What code reads without naming it: methods that Python calls, imports in functions, containers, clocks."""

from __future__ import annotations

import operator
import os
import random
import sys
import threading
import time
import weakref
from array import array
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.living_net import X
from zeroir.errors import UserError

Factor = Callable[[], Any]
"""A function whose result the loss is multiplied by."""


class Numbers:
    """Gives what it has by methods that Python calls."""

    def __init__(self) -> None:
        self._items = {"beta": 1.0}
        self._list = [1.0, 2.0]
        self.value = 1.0

    def __getitem__(self, name: str) -> float:
        return self._items[name]

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[float]:
        return iter(self._list)

    def __float__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        return self.value > 1

    def __rmul__(self, other: Tensor) -> Tensor:
        return other * self.value

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __enter__(self) -> float:
        return self.value

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return self.value == other

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        return str(self._list)


class Descriptor:
    """An attribute of a class whose value is computed from the attributes of the object that it is."""

    def __init__(self) -> None:
        self.factors = {"x": 1.0}

    def __get__(self, owner: object, kind: object) -> float:
        return 2 * self.factors["x"]


class Described:
    """Has a computed attribute."""

    factor = Descriptor()


numbers, described = Numbers(), Described()


def in_a_block() -> float:
    with numbers as value:
        return value


CALLED_BY_PYTHON: list[tuple[str, Factor, Callable[[pytest.MonkeyPatch], None]]] = [
    ("__getitem__", lambda: numbers["beta"], lambda m: m.setitem(numbers._items, "beta", 0.5)),
    ("__len__", lambda: len(numbers), lambda m: m.setattr(numbers, "_list", [1.0])),
    ("__iter__", lambda: sum(numbers), lambda m: m.setattr(numbers, "_list", [3.0])),
    ("__float__", lambda: float(numbers), lambda m: m.setattr(numbers, "value", 0.5)),
    ("__bool__", lambda: 2 if numbers else 1, lambda m: m.setattr(numbers, "value", 3.0)),
    ("__rmul__", lambda: numbers, lambda m: m.setattr(numbers, "value", 0.5)),
    ("__contains__", lambda: "b" in numbers, lambda m: m.setitem(numbers._items, "b", 0.5)),
    ("__enter__", in_a_block, lambda m: m.setattr(numbers, "value", 0.5)),
    ("__eq__", lambda: 2 if numbers == 1 else 1, lambda m: m.setattr(numbers, "value", 0.5)),
    ("__str__", lambda: len(f"{numbers}"), lambda m: m.setattr(numbers, "_list", [])),
    (
        "__get__",
        lambda: described.factor,
        lambda m: m.setitem(vars(Described)["factor"].factors, "x", 0.5),
    ),
]


@pytest.mark.parametrize(
    ("factor", "change"),
    [each[1:] for each in CALLED_BY_PYTHON],
    ids=[each[0] for each in CALLED_BY_PYTHON],
)
def test_what_methods_that_python_calls_read_counts(
    factor: Factor, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_refused(factor, lambda: change(monkeypatch))


class Counted:
    """Is equal to every other one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted)

    def __hash__(self) -> int:
        return 0


class Table(dict[str, float]):
    """A dict with an attribute."""

    scale = 1.0

    def scaled(self) -> float:
        return self["x"] * self.scale


held: dict[str, Any] = {
    "user dict": UserDict(x=1.0),
    "chain": ChainMap({}, {"x": 1.0}),
    "proxied": {"x": 1.0},
    "table": Table(x=1.0),
    "array": array("d", [1.0, 2.0]),
    "bytes": bytearray(b"ab"),
    "ordered": {"x": 1.0, "y": 2.0},
    "equal": Counted(1.0),
    "equals": [Counted(1.0)],
    "variable": ContextVar("variable", default=1.0),
    "thread": threading.local(),
    "read": operator.attrgetter("value"),
    "referred": weakref.ref(numbers),
    "module dict": nn.ModuleDict({"x": nn.Tanh(), "y": nn.ReLU()}),
}
held["thread"].x = 1.0
# Not held there, lest every other case looks at all their items.
many = [1.0] * 20_000
many_keys = dict.fromkeys(range(20_000), 1.0)
proxy = MappingProxyType(held["proxied"])


def moved_to_the_end(table: MutableMapping[str, Any] | nn.ModuleDict) -> None:
    table["x"] = table.pop("x")


CONTAINERS: list[tuple[str, Factor, Callable[[], object]]] = [
    ("user dict", lambda: held["user dict"]["x"], lambda: held["user dict"].update(x=0.5)),
    ("chain", lambda: held["chain"]["x"], lambda: held["chain"].update(x=0.5)),
    ("proxied", lambda: proxy["x"], lambda: held["proxied"].update(x=0.5)),
    ("table", lambda: 2 * held["table"].scaled(), lambda: setattr(held["table"], "scale", 0.5)),
    ("array", lambda: held["array"][0], lambda: held["array"].__setitem__(0, 0.5)),
    ("bytes", lambda: held["bytes"][0], lambda: held["bytes"].__setitem__(0, 3)),
    ("many", lambda: many[-1], lambda: many.__setitem__(-1, 0.5)),
    ("many keys", lambda: many_keys[1], lambda: many_keys.update({1: 0.5})),
    (
        "order",
        lambda: next(iter(held["ordered"].values())),
        lambda: moved_to_the_end(held["ordered"]),
    ),
    ("equal", lambda: held["equal"].value, lambda: held.update(equal=Counted(0.5))),
    (
        "equals",
        lambda: held["equals"][0].value,
        lambda: held["equals"].__setitem__(0, Counted(0.5)),
    ),
    ("variable", lambda: 2 * held["variable"].get(), lambda: held["variable"].set(0.5)),
    ("thread", lambda: held["thread"].x, lambda: setattr(held["thread"], "x", 0.5)),
    ("read", lambda: held["read"](numbers), lambda: setattr(numbers, "value", 0.25)),
    ("referred", lambda: held["referred"]().value, lambda: setattr(numbers, "value", 0.125)),
    (
        "module dict",
        lambda: next(iter(held["module dict"].values()))(torch.ones(())),
        lambda: moved_to_the_end(held["module dict"]),
    ),
    (
        "environment",
        lambda: float(os.environ.get("factor_of_a_test", "1")),  # noqa: SIM112
        lambda: os.environ.update(factor_of_a_test="2"),
    ),
]


@pytest.mark.parametrize(
    ("factor", "change"), [each[1:] for each in CONTAINERS], ids=[each[0] for each in CONTAINERS]
)
def test_what_pythons_own_containers_hold_counts(
    factor: Factor, change: Callable[[], object]
) -> None:
    value = numbers.value
    try:
        require_refused(factor, change)
    finally:
        numbers.value = value
        os.environ.pop("factor_of_a_test", None)


def imports_a_module() -> float:
    import settings_of_a_test  # type: ignore[import-not-found]

    value: float = settings_of_a_test.beta
    return value


def imports_from_a_module() -> float:
    from settings_of_a_test import beta

    value: float = beta
    return value


def imports_a_part() -> float:
    from settings_of_a_test import part

    value: float = part.beta
    return value


def imports_by_the_full_name() -> float:
    import settings_of_a_test.part as part  # type: ignore[import-not-found]

    value: float = part.beta
    return value


@pytest.mark.parametrize(
    "factor", [imports_a_module, imports_from_a_module, imports_a_part, imports_by_the_full_name]
)
def test_what_a_function_imports_counts(factor: Factor, monkeypatch: pytest.MonkeyPatch) -> None:
    package, part = ModuleType("settings_of_a_test"), ModuleType("settings_of_a_test.part")
    vars(package).update(beta=1.0, part=part)
    vars(part).update(beta=1.0)
    for module in (package, part):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def change() -> None:
        vars(package).update(beta=0.5)
        vars(part).update(beta=0.5)

    require_refused(factor, change, match=r"settings_of_a_test.*beta.* is 0\.5 now")


GENERATORS: list[tuple[object, Callable[[Any], float]]] = [
    (random.Random(0), lambda g: g.random()),
    (np.random.default_rng(0), lambda g: g.beta(0.4, 0.4)),
    (np.random.RandomState(0), lambda g: g.rand()),
]


@pytest.mark.parametrize(
    ("generator", "draw"), GENERATORS, ids=[type(each[0]).__name__ for each in GENERATORS]
)
@pytest.mark.parametrize("place", ["closure", "attribute", "teacher"])
def test_a_generator_that_the_code_draws_from_is_refused(
    generator: object, draw: Callable[[Any], float], place: str
) -> None:
    teacher, net = nn.Module(), nn.Linear(4, 2)
    own = {"teacher": teacher, "attribute": net}.get(place)
    if own is not None:
        vars(own)["draws"] = generator

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        present = {"teacher": teacher, "attribute": net}.get(place)
        drawn = draw(generator if present is None else vars(present)["draws"])
        value: Tensor = net(x).square().mean() * float(drawn)
        return value

    with pytest.raises(
        UserError, match=r"test_hidden_reads\.py:\d+: .* changes .*(generator|draws)"
    ):
        zeroir.compile(net, X, loss=loss, lr=0.1, world_size=1)


def test_a_generator_that_is_not_drawn_from_may_be_there() -> None:
    generator = random.Random(0)
    require_refused(lambda: len(type(generator).__name__), None)


CLOCKS: list[tuple[str, Factor]] = [
    ("time", lambda: time.time() % 7),
    ("whole days", lambda: time.time() // 86_400 - 20_000),
    ("unseeded", lambda: np.random.default_rng().random()),
]


@pytest.mark.parametrize("factor", [each[1] for each in CLOCKS], ids=[each[0] for each in CLOCKS])
def test_code_that_computes_with_a_clock_is_refused(factor: Factor) -> None:
    with pytest.raises(UserError, match=r"with a clock .* which .*test_hidden_reads\.py:\d+ reads"):
        require_refused(factor, None)


def scaled_by_the_time(x: Tensor) -> Tensor:
    return x * (time.time() % 7)


def test_a_clock_in_a_function_that_an_attribute_holds_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.scale = scaled_by_the_time

        def forward(self, x: Tensor) -> Tensor:
            value: Tensor = self.scale(self.layer(x)).mean()
            return value

    with pytest.raises(UserError, match=r"with a clock .* which .*test_hidden_reads\.py:\d+ reads"):
        zeroir.compile(Scaled(), X, lr=0.1, world_size=1)


def test_code_that_only_measures_its_time_is_compiled() -> None:
    def factor() -> float:
        begin = time.perf_counter()
        return 1.0 if time.perf_counter() >= begin else 2.0

    require_refused(factor, None)


def require_refused(
    factor: Factor, change: Callable[[], object] | None, *, match: str = "now, but"
) -> None:
    """A step is refused after the change of what a factor of the loss reads."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = net(x).square().mean() * factor()
        return value

    torch.manual_seed(0)
    compiled = zeroir.compile(nn.Linear(4, 2), X, loss=loss, lr=0.0, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False, compile_again=False)
    engine.step(X)
    if change is not None:
        change()
        with pytest.raises(UserError, match=match):
            engine.step(X)
    engine.close(return_values=False)
