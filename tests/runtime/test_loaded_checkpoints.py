"""What does not fit is refused by name before anything changes; weights alone begin a new training."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    StateDictOptions,
    set_optimizer_state_dict,
)

from tests.runtime.constructors import Mlp
from tests.runtime.support import begun, lowered, random_batches, require_same, trained_engine
from tests.support.groups import in_groups
from tests.support.programs import mlp
from zeroir.checkpoint.manifest import MASTER
from zeroir.checkpoint.reading import read_manifest
from zeroir.errors import CheckpointWarning, UserError
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint import loading
from zeroir.runtime.engine.engine import Engine


def saved_by(program: Program, folder: Path) -> Path:
    engine = trained_engine(program)
    engine.save(folder / "saved")
    engine.close()
    return folder / "saved"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (mlp(blocks=4), "has no parameter 'blocks.3.weight' (names like it are"),
        (mlp(blocks=2), "has a parameter 'blocks.2.weight', which the program lacks"),
        (mlp(features=7), "'pre.weight' has the shape [8, 6] in"),
        (mlp(optimizer="lion"), "was trained by adamw, and the program trains it by lion"),
        (mlp(optimizer="momentum"), "or load the weights alone (weights_only=True)"),
        (mlp(optimizer="sgd"), "compile the program with the optimizer of the checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, program: Program, message: str
) -> None:
    path = saved_by(lowered(mlp(), 2, 1), tmp_path)
    engine = begun(Engine(lowered(program, 0, 1)))
    before = {key: values.clone() for key, values in engine.full_state().items()}
    with pytest.raises(UserError) as refusal:
        engine.load(path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert engine.step_count == 0
    require_same(engine.full_state(), before)


def test_a_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = saved_by(lowered(mlp(), 0, 1), tmp_path)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.chmod(0o600)
    file.write_bytes(data)
    engine = trained_engine(lowered(mlp(), 3, 1))
    before = {key: values.clone() for key, values in engine.full_state().items()}
    with pytest.raises(UserError, match=r"rank-00000\.safetensors"):
        engine.load(path)
    require_same(engine.full_state(), before)
    engine.step(random_batches(1, 1)[0][0])


def test_weights_alone_begin_a_new_training(tmp_path: Path) -> None:
    source = trained_engine(lowered(mlp(), 0, 1))
    source.optimizer.param_groups[0]["lr"] = 0.5
    source.save(tmp_path / "saved", shared="not loaded")
    engine = Engine(lowered(mlp(optimizer="lion"), 3, 1))
    loaded = engine.load(tmp_path / "saved", weights_only=True)
    assert (engine.step_count, loaded.shared) == (0, None)
    assert engine.optimizer.param_groups[0]["lr"] == 0.01
    for name, values in source.full_parameters().items():
        assert torch.equal(engine.full_parameters()[name], values)
    fresh = Engine(lowered(mlp(optimizer="lion"), 3, 1))
    fresh.initialise_flats(
        {f"{f}.param": t for (f, q), t in source.full_state().items() if q == "param"}
    )
    batch = random_batches(1, 1)[0][0]
    assert engine.step(batch).loss == fresh.step(batch).loss
    require_same(engine.full_state(), fresh.full_state())


def test_a_checkpoint_of_weights_says_that_the_optimizer_begins_anew(tmp_path: Path) -> None:
    """As an import has it: one flat for each parameter, and no groups."""
    path = saved_by(lowered(mlp(), 0, 1), tmp_path)
    manifest = read_manifest(str(path))
    flats = tuple(
        flat.model_copy(
            update={"quantities": tuple(q for q in flat.quantities if q.name == MASTER)}
        )
        for flat in manifest.flats
    )
    weights = manifest.model_copy(update={"flats": flats, "groups": (), "scalars": ()})
    with patch.object(loading, "read_manifest", lambda _: weights):
        engine = Engine(lowered(mlp(), 2, 1))
        with pytest.warns(CheckpointWarning, match="has weights alone: the optimizer begins anew"):
            loaded = engine.load(path)
    assert loaded.notes == ("has weights alone: the optimizer begins anew",)
    state = engine.full_state()
    assert not any(values.any() for (_, quantity), values in state.items() if quantity == "exp_avg")


def test_settings_of_groups_come_back_by_name(tmp_path: Path) -> None:
    source = trained_engine(lowered(in_groups(mlp()), 1, 1))
    default, own = source.optimizer.param_groups
    own |= {"lr": 0.25, "betas": (0.5, 0.75), "initial_lr": 0.125}
    default["lr"] = 0.0625
    source.save(tmp_path / "saved")

    engine = Engine(lowered(in_groups(mlp()), 3, 1))
    engine.load(tmp_path / "saved")
    for group, expected in zip(engine.optimizer.param_groups, (default, own), strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }
    batch = random_batches(1, 1, seed=3)[0][0]
    assert engine.step(batch).loss == source.step(batch).loss
    require_same(
        {key: t for key, t in engine.full_state().items() if key[1] == "exp_avg"},
        {key: t for key, t in source.full_state().items() if key[1] == "exp_avg"},
    )

    alone = Engine(lowered(mlp(), 3, 1))
    alone.load(tmp_path / "saved")
    assert alone.optimizer.param_groups[0]["lr"] == 0.0625
    alone.save(tmp_path / "alone")
    with pytest.warns(CheckpointWarning, match="no settings for the optimizer's group own"):
        Engine(lowered(in_groups(mlp()), 3, 1)).load(tmp_path / "alone")


def test_a_running_engine_goes_back(tmp_path: Path) -> None:
    """Settings that were written before count again after the load."""
    engine = trained_engine(lowered(mlp(precision="fp16", clip=0.5, ema=0.5), 2, 1))
    engine.optimizer.param_groups[0] |= {"lr": 0.25, "betas": (0.5, 0.75)}
    batches = [step[0][0] for step in random_batches(3, 1, seed=6)]
    engine.step(batches[0])
    engine.save(tmp_path / "saved")
    losses = [engine.step(batch).loss for batch in batches]
    expected = {key: values.clone() for key, values in engine.full_state().items()}
    assert engine.load(tmp_path / "saved").step == engine.step_count == 2
    assert [engine.step(batch).loss for batch in batches] == losses
    require_same(engine.full_state(), expected)


# ---- State dictionaries of an engine are those of the module and of the optimizer of torch


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
