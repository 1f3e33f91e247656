"""What code reads without naming it: methods that Python calls, imports in functions, generators, clocks."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
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


def test_code_that_only_measures_its_time_is_compiled() -> None:
    def factor() -> float:
        begin = time.perf_counter()
        return 1.0 if time.perf_counter() >= begin else 2.0

    require_refused(factor, None)


def require_refused(
    factor: Factor, change: Callable[[], None] | None, *, match: str = "now, but"
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
