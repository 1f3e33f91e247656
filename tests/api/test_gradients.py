"""The gradients of a step, between its last micro-step and the update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zeroir
from tests.api.gradient_workers import batch_of, expected_gradients, loss, net_of
from tests.runtime.support import Ranks, require_success
from zeroir.config.precision import FloatName
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_they_are_those_of_replicas(world_size: int, tmp_path: Path) -> None:
    ranks = Ranks(world_size, tmp_path, module="tests.api.gradient_workers")
    require_success(ranks.wait())


def engine_of(*, overlaps: bool = False, precision: FloatName = "fp32") -> Engine:
    compiled = zeroir.compile(
        net_of(),
        batch_of(0, 0),
        loss=loss,
        precision=precision,
        loss_scale=128.0 if precision == "fp16" else zeroir.LossScale(),
        micro_steps=2,
        communication=zeroir.Communication(overlap_update=overlaps),
        world_size=1,
        evaluate=False,
    )
    return compiled.engine(self_check=False)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_they_are_unscaled_and_change_nothing(precision: FloatName) -> None:
    engine, other = engine_of(precision=precision), engine_of(precision=precision)
    for each in (engine, other):
        for index in range(2):
            each.micro_step(batch_of(0, index))
    found = engine.gradients("*.weight")
    assert set(found) == {"0.weight", "2.weight"}
    for name, value in found.items():
        torch.testing.assert_close(value, expected_gradients(1)[name], rtol=5e-3, atol=5e-4)
    norm = engine.gradient_norms("2.weight")["2.weight"]
    assert norm == pytest.approx(found["2.weight"].norm().item(), rel=1e-6)
    assert engine.update().loss == other.update().loss
    for name, value in engine.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_what_is_not_there_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(UserError, match=r"gradients\(\) needs at least one micro_step\(\)"):
        engine.gradients()
    engine.micro_step(batch_of(0, 0), is_last=False)
    with pytest.raises(UserError, match=r"gradient_norms\(\) needs a last micro-step"):
        engine.gradient_norms()
    engine.micro_step(batch_of(0, 0))
    with pytest.raises(UserError, match=r"No trained parameter has a name like head\.\*"):
        engine.gradients("head.*")
    engine.gradients()
    engine.update()
    overlapping = engine_of(overlaps=True)
    overlapping.micro_step(batch_of(0, 0))
    with pytest.raises(UserError, match=r"0\.weight is gone .*overlap_update=False"):
        overlapping.gradients()
