"""Whatever a constructor does, a program begins with the values of plain PyTorch; rank 0 alone builds them."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.runtime.constructors import CONSTRUCTORS, DIM, Mlp, plain
from tests.runtime.support import Ranks, lowered, require_success
from tests.support.programs import mlp
from zeroir.api.running.run_lowering import construction_note
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.state import initial_values
from zeroir.runtime.state.digests import Digester

SEED = 11


@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [
        *product(CONSTRUCTORS, [3], ["fp32"]),
        *product(["plain"], range(4), ["bf16"]),
        ("plain", 1, "fp32"),
    ],
)
def test_parameters_equal_those_of_plain_torch(name: str, stage: int, precision: str) -> None:
    torch.manual_seed(SEED)
    expected = dict(CONSTRUCTORS[name]().named_parameters())
    state = torch.get_rng_state()
    logical = mlp(dim=DIM, precision=precision)
    lockstep = Lockstep(lowered(logical, stage, 3))
    lockstep.initialise(CONSTRUCTORS[name], SEED)
    assert torch.equal(torch.get_rng_state(), state)
    found, whole = lockstep.full_parameters(), lockstep.full_state()
    assert found.keys() == expected.keys()
    for parameter, value in found.items():
        # Masters are not rounded.
        assert torch.equal(value, expected[parameter].detach().float()), parameter
    for flat in logical.flats:
        for slot in flat.slots:
            param = whole[flat.name, "param"][slot.offset : slot.offset + slot.numel]
            assert torch.equal(param, found[slot.name].to(param.dtype).flatten())


@pytest.mark.parametrize("message_bytes", [64, 1000, 5000])
def test_values_do_not_depend_on_the_size_of_messages(
    message_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small() -> nn.Module:
        module = Mlp(dim=24)
        module.pre.double()
        module.post.half()
        return module

    program = lowered(mlp(dim=24, precision="bf16"), 2, 2)
    wanted = Lockstep(program)
    wanted.initialise(small, SEED)
    monkeypatch.setattr(initial_values, "MESSAGE_BYTES", message_bytes)
    found = Lockstep(program)
    found.initialise(small, SEED)
    for key, value in wanted.full_state().items():
        assert torch.equal(found.full_state()[key], value)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "sparse_"), (3, "of another form"), (4, "discarding")]
)
def test_rank_0_alone_builds_and_all_ranks_have_its_values(
    tmp_path: Path, world_size: int, name: str
) -> None:
    results = Ranks(world_size, tmp_path, "initialise", name).wait()
    require_success(results)
    assert [out for _, out, _ in results] == ["built 4 times\n"] + ["built 0 times\n"] * (
        world_size - 1
    )


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_say_why_they_cannot_begin(tmp_path: Path) -> None:
    """A connection that damages a message, and a constructor that raises on rank 0."""
    results = Ranks(3, tmp_path, "bad-starts").wait()
    assert [code for code, _, _ in results] == [0, 0, 0], results
    damaged, failed = zip(*(out.splitlines() for _, out, _ in results), strict=True)
    assert len(set(damaged)) == 2  # the rank with the other values raises a UserError itself
    assert damaged[1].startswith("UserError: The values of 'pre.weight' on rank 1 differ")
    assert damaged[0].startswith("PeerError: The values of 'pre.weight' on rank 1")
    assert damaged[2] == damaged[0]
    assert re.match("UserError: .* 'blocks.2.weight'", failed[0])
    assert failed[1] == failed[2] == "PeerError: Rank 0 could not build the model."


@pytest.mark.slow
@pytest.mark.dist
def test_building_may_take_longer_than_a_collective_waits(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path, "build-slowly", "5.0", environment={"TEST_TIMEOUT_S": "2.5"})
    require_success(ranks.wait())


def test_a_constructor_leaves_nothing_behind() -> None:
    """The module is not kept, and what it changes of torch for itself is not changed for the steps of rank 0 alone."""
    made: list[weakref.ref[nn.Module]] = []

    def factory() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        module = Mlp()
        made.append(weakref.ref(module))
        return module

    engine = Engine(lowered(mlp(), 3, 1))
    engine.initialise(factory, 0)
    assert torch.get_default_dtype() is torch.float32
    gc.collect()
    assert [reference() for reference in made] == [None]


def test_what_building_takes_is_said_from_a_gibibyte_on() -> None:
    program = mlp()
    assert construction_note(program) is None
    (slot,) = program.flats[0].slots
    large = replace(program.flats[0], slots=(replace(slot, shape=(20_000, 20_000)),))
    note = construction_note(replace(program, flats=(large, *program.flats[1:])))
    assert note is not None
    assert "its host needs 1.6 GB more" in note


def test_buffers_that_the_users_code_keeps_stay_whole() -> None:
    """Weights of classes are made once, outside of the function that makes the module."""
    weights = torch.tensor([0.5, 2.0])

    def make() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("weights", weights)
        return model

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = (module(batch) * module.get_buffer("weights")).mean()
        return value

    compiled = zeroir.compile(make, torch.ones(3, 2), loss=loss, world_size=1)
    first = compiled.engine().step(torch.ones(3, 2)).loss
    assert torch.equal(weights, torch.tensor([0.5, 2.0]))
    assert compiled.engine().step(torch.ones(3, 2)).loss == first


def test_a_model_without_values_is_refused() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return plain()

    engine = Engine(lowered(mlp(dim=DIM), 3, 1))
    with pytest.raises(UserError, match=r"'pre.weight' is on the meta device"):
        engine.initialise(on_meta, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_digests_of_parts_add_up_and_see_every_change(dtype: torch.dtype) -> None:
    digest = Digester().digest
    values = (torch.randn(200_001) * 100).to(dtype)
    whole = digest(values, 0)
    shifted = torch.cat([values[:1], values])[1:]
    assert torch.equal(digest(shifted, 0), whole)
    for cut in (0, 1, 7, 65_536, 131_075, 200_001):
        assert torch.equal(digest(values[:cut], 0) + digest(values[cut:], cut), whole)
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.roll(1),
        lambda x: x.index_fill(0, torch.tensor([150_000]), 7),
        lambda x: torch.cat([x[65_536:131_072], x[:65_536], x[131_072:]]),
    ]
    for change in changes:
        assert not torch.equal(digest(change(values), 0), whole)
