"""Micro-steps one by one, their results and their sentences; a program for one batch that gets several."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.runtime.support import begun, lowered, random_batches, require_same
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.frontend.lowering.accumulate import accumulate
from zeroir.ir.program import Program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.torch_ops.batches import Batch

ACCUMULATING = mlp(micro_steps=2)


Weight = Callable[[Batch], object]


def opened(
    logical: Program,
    stage: int = 3,
    *,
    weight: Weight | None = None,
    accumulating: Callable[[], Program] | None = None,
) -> Engine:
    return begun(
        Engine(lowered(logical, stage, 1), EngineSettings(weight=weight), accumulating=accumulating)
    )


def x_of(batch: Batch) -> torch.Tensor:
    assert isinstance(batch, dict)
    x = batch["x"]
    assert isinstance(x, torch.Tensor)
    return x


def largest(batch: Batch) -> float:
    return float(x_of(batch).abs().max())


def without_labels(batch: Batch) -> object:
    assert isinstance(batch, dict)
    return batch["labels"]


def batches_of(count: int, seed: int = 1) -> list[Batch]:
    ((own,),) = random_batches(1, 1, count, seed=seed)
    return own


@pytest.mark.parametrize("says_last", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_micro_steps_one_by_one_are_a_step(stage: int, says_last: bool) -> None:
    engine, other = opened(ACCUMULATING, stage), opened(ACCUMULATING, stage)
    for count in (3, 1, 2):
        batches = batches_of(count, seed=count)
        expected = engine.step(batches)
        losses = []
        for index, batch in enumerate(batches):
            is_last = index == count - 1 if says_last else None
            losses.append(other.micro_step(batch, is_last))
        result = other.update()
        assert result.loss == expected.loss
        assert result.weight == expected.weight == count
        mean = torch.tensor([loss.loss for loss in losses]).sum() / count
        assert result.loss == pytest.approx(float(mean), rel=1e-6)
    assert engine.step_count == other.step_count == 3
    require_same(engine.full_state(), other.full_state())


def test_a_loss_is_known_when_the_micro_step_has_run() -> None:
    engine, reference = opened(ACCUMULATING), opened(ACCUMULATING)
    first, second, third = batches_of(3)
    result = engine.micro_step(first)
    with pytest.raises(UserError, match=r"runs with a later call of micro_step or update"):
        _ = result.loss
    following = engine.micro_step(second)
    assert result.loss == reference.step(first).loss
    with pytest.raises(UserError, match="read its loss afterwards"):
        _ = following.loss
    engine.update()
    assert math.isfinite(following.loss)
    assert math.isfinite(engine.micro_step(third, is_last=False).loss)


def test_calls_in_a_wrong_order_are_refused() -> None:
    engine, other = opened(ACCUMULATING), opened(ACCUMULATING)
    first, second, third = batches_of(3)
    with pytest.raises(UserError, match=r"update\(\) needs at least one micro_step"):
        engine.update()
    engine.micro_step(first)
    with pytest.raises(UserError, match=r"call update\(\) before step\(\)"):
        engine.step(first)
    with pytest.raises(UserError, match=r"call update\(\) before evaluate\(\)"):
        engine.evaluate(first)
    engine.micro_step(second, is_last=True)
    with pytest.raises(UserError, match=r"call update\(\) before the next micro_step"):
        engine.micro_step(third)
    engine.update()
    engine.micro_step(first, is_last=False)
    with pytest.raises(UserError, match=r"update\(\) needs a last micro-step"):
        engine.update()
    engine.micro_step(second, is_last=True)
    engine.update()
    # Nothing that was refused has left a trace.
    other.step([first, second])
    other.step([first, second])
    require_same(engine.full_state(), other.full_state())


def test_a_refused_micro_step_can_be_made_good() -> None:
    engine, other = opened(ACCUMULATING), opened(ACCUMULATING)
    first, second = batches_of(2)
    with pytest.raises(UserError, match="compiled for"):
        engine.micro_step({**first, "x": torch.ones(1)} if isinstance(first, dict) else first)
    engine.micro_step(first)
    engine.micro_step(second)
    (group,) = engine.optimizer.param_groups
    lr, group["lr"] = group["lr"], math.nan
    with pytest.raises(UserError, match="lr of group default"):
        engine.update()
    group["lr"] = lr
    engine.update()
    other.step([first, second])
    require_same(engine.full_state(), other.full_state())


def test_a_step_without_a_batch_is_refused() -> None:
    with pytest.raises(UserError, match="at least one batch"):
        opened(ACCUMULATING).step([])


def test_a_program_for_one_batch_says_how_it_takes_several() -> None:
    engine = opened(mlp())
    with pytest.raises(UserError, match="Compile with --micro-steps 2"):
        engine.step(batches_of(2))
    with pytest.raises(UserError, match="Compile with --micro-steps 2"):
        engine.micro_step(batches_of(1)[0], is_last=False)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_program_for_one_batch_goes_on_with_several(
    precision: str, one_by_one: bool, is_weighted: bool
) -> None:
    """Parameters, masters, states, the step count and the loss scale are those of a program that always could."""
    logical = mlp(precision=precision, is_weighted=is_weighted)
    weight = largest if is_weighted else None
    engine = opened(logical, weight=weight, accumulating=lambda: lowered(accumulate(logical), 3, 1))
    other = opened(mlp(precision=precision, is_weighted=is_weighted, micro_steps=2), weight=weight)
    for one in (engine, other):
        one.optimizer.param_groups[0]["lr"] = 0.05
    for seed in range(3):
        (batch,) = batches_of(1, seed=seed)
        assert engine.step(batch).loss == other.step(batch).loss
    for seed in range(3):
        batches = batches_of(3, seed=seed)
        if one_by_one:
            for batch in batches:
                engine.micro_step(batch)
            loss = engine.update().loss
        else:
            loss = engine.step(batches).loss
        assert loss == other.step(batches).loss
    assert engine.step_count == other.step_count == 6
    assert engine.loss_scale == other.loss_scale
    require_same(engine.full_state(), other.full_state())


@pytest.mark.slow
def test_the_loss_scale_can_be_read() -> None:
    assert opened(mlp()).loss_scale == 1.0
    engine = opened(mlp(precision="fp16", micro_steps=2))
    assert engine.loss_scale == 1024.0
    bad = {"x": torch.full((4, 6), 3e4)}
    for expected in (1024.0, 512.0):
        assert engine.step([bad, *batches_of(1)]).is_skipped
        assert engine.loss_scale == expected


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (lambda _: "three", r"weight\(batch\) returned str; return one number"),
        (lambda _: True, r"weight\(batch\) returned bool"),
        (lambda _: -1, r"returned -1; return a finite number that is not negative"),
        (lambda _: math.nan, r"returned nan"),
        (x_of, r"a tensor of the shape \(4, 6\)"),
        (without_labels, r"weight\(batch\) failed: KeyError: 'labels'"),
        (None, r"give the engine the function weight\(batch\)"),
    ],
)
def test_a_wrong_weight_is_one_sentence(weight: Weight | None, expected: str) -> None:
    engine = opened(mlp(is_weighted=True), weight=weight)
    with pytest.raises(UserError, match=expected):
        engine.step(batches_of(1)[0])


def test_a_weight_may_be_a_tensor() -> None:
    engine = opened(mlp(is_weighted=True), weight=lambda one: torch.tensor(largest(one)))
    other = opened(mlp(is_weighted=True), weight=largest)
    for batch in batches_of(3):
        result, expected = engine.step(batch), other.step(batch)
        assert result.weight == expected.weight
        assert result.loss == expected.loss
    require_same(engine.full_state(), other.full_state())


def test_a_wrong_batch_among_several_leaves_nothing_behind() -> None:
    """All are checked before the first one runs, and before a program for one batch is lowered again."""
    lowered_again: list[str] = []

    def accumulating() -> Program:
        lowered_again.append("lowered")
        return lowered(accumulate(mlp()), 3, 1)

    first, second = batches_of(2)
    engine, other = opened(mlp(), accumulating=accumulating), opened(ACCUMULATING)
    with pytest.raises(UserError, match="has no 'x'"):
        engine.step([first, {"y": torch.zeros(4, 6)}])
    assert not lowered_again
    assert engine.step([first, second]).loss == other.step([first, second]).loss
    assert lowered_again == ["lowered"]
    require_same(engine.full_state(), other.full_state())


def test_a_step_that_failed_half_way_is_not_gone_on_with() -> None:
    """A weight that cannot be computed shows only when its micro-step begins, and the one before has run."""
    first, second = batches_of(2)
    engine = opened(
        mlp(micro_steps=2, is_weighted=True), weight=lambda one: 1 if one is first else "many"
    )
    with pytest.raises(UserError, match="returned str"):
        engine.step([first, second])
    with pytest.raises(UserError, match="An earlier step failed after its first micro-step"):
        engine.step([first, first])
