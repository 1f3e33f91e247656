"""Files, variables of the environment and cached results that a step reads count at the next step."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.living_net import X, require_counted
from zeroir.errors import UserError

VARIABLE = "ZEROIR_FACTOR_OF_A_TEST"
prefix = "FACTOR_OF_A_TEST"
path = Path("unset")
factor = 1.0


@functools.lru_cache
def cached(number: int) -> float:
    return number * factor


@functools.cache
def mask(size: int) -> Tensor:
    return torch.ones(size)


def clear_after_a_change() -> None:
    global factor  # noqa: PLW0603
    factor = 3.0
    cached.cache_clear()


def by_computed_name() -> float:
    return float(os.environ.get("ZEROIR_" + prefix, "1"))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], object]]] = {
    "text": (lambda: float(path.read_text()), lambda: path.write_text("2")),
    "json": (lambda: json.loads(path.read_text()), lambda: path.write_text("0.5")),
    "bytes": (lambda: len(path.read_bytes()), lambda: path.write_text("1\n1")),
    "variable": (by_computed_name, lambda: os.environ.update({VARIABLE: "2"})),
    "cache": (lambda: cached(2), clear_after_a_change),
    "cached tensor": (lambda: mask(2), lambda: mask(2).mul_(3)),
}


@pytest.mark.parametrize(("read", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_step_reads_outside_counts(
    read: Callable[[], Any],
    change: Callable[[], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "path", tmp_path / "factor.txt")
    monkeypatch.setitem(globals(), "factor", 1.0)
    monkeypatch.setenv(VARIABLE, "1")
    path.write_text("1")
    cached.cache_clear()
    mask.cache_clear()
    mask(2)

    require_counted(read, change)


def test_a_change_of_a_file_is_named_with_the_line_that_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "factor.txt"
    file.write_text("1")

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = net(x).mean() * float(file.read_text())
        return value

    compiled = zeroir.compile(nn.Linear(4, 2), X, loss=loss, lr=0.1, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False, compile_again=False)
    file.touch()
    engine.step(X)
    file.write_text("2")
    with pytest.raises(
        UserError, match=r"factor\.txt, which .*test_outside_reads\.py:\d+ reads, has other"
    ):
        engine.step(X)


def test_a_cached_result_stays_until_the_cache_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "factor", 1.0)
    cached.cache_clear()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = net(x).mean() * cached(2)
        return value

    compiled = zeroir.compile(nn.Linear(4, 2), X, loss=loss, lr=0.0, evaluate=False, world_size=1)
    engine = compiled.engine(self_check=False)
    before = engine.step(X).loss
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert engine.step(X).loss == before
    cached.cache_clear()
    assert engine.step(X).loss == pytest.approx(3 * before)
