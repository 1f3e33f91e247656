"""``engine.detect_anomaly``: the operator, the line and the unit of the first NaN of a step."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.anomaly_workers import BAD, net
from tests.runtime.support import Ranks, require_success
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine


def engine_of(module: nn.Module, batch: Tensor, **options: object) -> Engine:
    given = {"world_size": 1, "optimizer": "sgd", "lr": 0.01, **options}
    return zeroir.compile(module, batch, **given).engine(self_check=False)  # type: ignore[arg-type]


def refusal(engine: Engine, batch: Tensor) -> str:
    with engine.detect_anomaly(), pytest.raises(UserError) as caught:
        engine.step(batch)
    return str(caught.value)


def test_the_first_nan_of_the_forward_is_named() -> None:
    sentence = refusal(engine_of(net(), BAD), BAD)
    assert "anomaly_workers.py:" in sentence
    assert "aten.log.default in unit blocks.1 (@block.forward) makes 8 of 8 values NaN" in sentence
    assert "from f32[2, 4] between -1e-06 and -1e-06" in sentence


class Root(nn.Module):
    """Has a square root, whose gradient at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.line(x).sqrt() * 0.0).sum()
        return y


def test_a_nan_of_the_backward_is_named_with_the_infinities_before_it() -> None:
    module = Root()
    nn.init.zeros_(module.line.weight)
    nn.init.zeros_(module.line.bias)
    sentence = refusal(engine_of(module, torch.ones(2, 4)), torch.ones(2, 4))
    assert "test_anomalies.py:" in sentence
    assert ".backward" in sentence
    assert "values NaN, from " in sentence


def test_what_has_nans_already_is_named() -> None:
    engine = engine_of(net(), torch.rand(2, 4))
    sentence = refusal(engine, torch.full((2, 4), torch.nan))
    assert sentence.startswith("%input.0 has NaNs already, as it is read in unit blocks.0")


class Decides(nn.Module):
    """Decides by a value, and divides by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x) if x.sum() < 100 else 0 * self.line(x) / torch.zeros(4)
        return y


@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_code_that_runs_as_it_is_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decides()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x).square().mean()
            return y

    engine = engine_of(Model(), torch.ones(2, 4))
    sentence = refusal(engine, torch.full((2, 4), 100.0))
    assert re.search(
        r"test_anomalies.py:(\d+) aten.div.Tensor in unit root .* makes 8 of 8 values NaN", sentence
    )
    assert sentence.endswith("f32[4] between 0 and 0.")


def test_the_first_nan_of_eager_steps_is_named() -> None:
    """Of the forward; and of the backward, by the line of the forward."""
    engine = engine_of(net(), BAD)
    with engine.eager():
        forward = refusal(engine, BAD)
    assert re.search(r"anomaly_workers.py:\d+ aten.log.default in unit .* makes 8 of 8", forward)
    assert "from f32[2, 4] between -1e-06 and -1e-06" in forward
    module = Root()
    nn.init.zeros_(module.line.weight)
    nn.init.zeros_(module.line.bias)
    engine = engine_of(module, torch.ones(2, 4))
    with engine.eager():
        backward = refusal(engine, torch.ones(2, 4))
    line = inspect.getsourcelines(Root.forward)[1] + 1
    assert f"test_anomalies.py:{line} aten.div.Tensor" in backward
    assert "values NaN, from " in backward


def test_a_block_within_a_block_leaves_the_outer_one_on() -> None:
    engine = engine_of(net(), BAD, lr=0.0)
    with engine.detect_anomaly():
        with engine.detect_anomaly():
            engine.step(torch.rand(2, 4) + 1)
        with pytest.raises(UserError, match="makes 8 of 8 values NaN"):
            engine.step(BAD)


def test_steps_without_nans_are_what_they_are() -> None:
    batches = [torch.rand(2, 4) + 1 for _ in range(6)]
    plain = engine_of(net(), batches[0], micro_steps=2)
    watched = engine_of(net(), batches[0], micro_steps=2)
    for number in range(3):
        pair = batches[2 * number : 2 * number + 2]
        expected = plain.step(pair).loss
        if number != 1:
            assert watched.step(pair).loss == expected
            continue
        with watched.detect_anomaly():
            watched.micro_step(pair[0], is_last=False)
            watched.micro_step(pair[1], is_last=True)
            assert watched.update().loss == expected


@pytest.mark.slow
@pytest.mark.dist
def test_all_ranks_say_what_one_of_them_found(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path, module="tests.api.anomaly_workers")
    require_success(ranks.wait())
