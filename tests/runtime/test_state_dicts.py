"""State dictionaries of an engine are those of the module and of the optimizer of torch."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    StateDictOptions,
    set_optimizer_state_dict,
)

from tests.runtime.constructors import Mlp
from tests.runtime.support import lowered, random_batches, require_same, trained_engine
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine


@pytest.mark.parametrize("stage", range(4))
def test_the_state_dict_is_that_of_the_module(stage: int) -> None:
    engine = Engine(lowered(mlp(precision="bf16"), stage, 1))
    module = Mlp()
    engine.initialise(module, keep_module=True)
    expected = module.state_dict()
    state = engine.state_dict()
    assert list(state) == list(expected)
    for name, values in expected.items():
        assert torch.equal(state[name], values)
    engine.step(random_batches(1, 1)[0][0])
    module.load_state_dict(engine.state_dict())
    for name, values in engine.full_parameters().items():
        assert torch.equal(module.get_parameter(name), values)


def test_a_state_dict_is_taken_over() -> None:
    """The next step computes with the new weights alone, whatever the last one has left for it."""
    program = lowered(mlp(), 3, 1)
    engine = trained_engine(program)
    torch.manual_seed(1)
    weights = Mlp().state_dict()
    assert engine.load_state_dict(weights) == ([], [])
    for name, values in engine.state_dict().items():
        assert torch.equal(values, weights[name])
    again = trained_engine(program)
    missing, unknown = again.load_state_dict({"post.weight": weights["post.weight"]}, strict=False)
    assert len(missing) == 7
    assert unknown == []
    again.load_state_dict(weights)
    batch = random_batches(1, 1, seed=8)[0][0]
    assert engine.step(batch).loss == again.step(batch).loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"post.wieght": torch.zeros(6, 8)},
            "has 'post.wieght', which the model lacks (names like",
        ),
        ({"post.weight": torch.zeros(6, 9)}, "'post.weight' has the shape [6, 9], but [6, 8]"),
        ({}, "lacks 'pre.weight'"),
    ],
)
def test_a_state_dict_of_another_model_changes_nothing(
    change: dict[str, Tensor], message: str
) -> None:
    engine = trained_engine(lowered(mlp(), 2, 1))
    before = {key: values.clone() for key, values in engine.full_state().items()}
    state = {**Mlp().state_dict(), **change} if change else {}
    with pytest.raises(UserError) as refusal:
        engine.load_state_dict(state)
    assert message in str(refusal.value)
    require_same(engine.full_state(), before)


def test_the_optimizer_state_is_that_of_torch() -> None:
    """A torch optimizer that loads it takes the same next step."""
    program = lowered(mlp(), 3, 1)
    engine = trained_engine(program)
    module = Mlp()
    module.load_state_dict(engine.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.01)
    set_optimizer_state_dict(
        module,
        optimizer,
        optim_state_dict=cast("OptimizerStateType", engine.optimizer_state_dict()),
        options=StateDictOptions(full_state_dict=True),
    )
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01
    for name, parameter in module.named_parameters():
        own = optimizer.state[parameter]
        (flat,) = (f for f in program.flats if any(s.name == name for s in f.slots))
        (slot,) = (s for s in flat.slots if s.name == name)
        for quantity in ("exp_avg", "exp_avg_sq"):
            whole = engine.full_state()[flat.name, quantity]
            values = whole[slot.offset : slot.offset + slot.numel].view(slot.shape)
            assert torch.equal(own[quantity], values)
        assert own["step"] == 1
