"""Modules that an engine lends hold the present values, for the time of the loan and for reading."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.runtime.constructors import Mlp
from tests.runtime.support import (
    ROOT,
    Ranks,
    begun,
    initial_flats,
    lowered,
    random_batches,
    require_parameters,
    require_success,
)
from tests.support.eager import traced
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir.buffers import whole
from zeroir.ir.text import print_program
from zeroir.memory.placement import places_to_run
from zeroir.runtime.comm.base import CollectiveTensors
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.comm.lockstep import LockstepComm
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.full_parameters import flat_buffers, flat_part, whole_parameters
from zeroir.runtime.state.state import initialise_flats

MODULE = "tests.runtime.gathered_workers"


def engine_with_module(precision: str = "fp32", stage: int = 3, ema: float | None = None) -> Engine:
    engine = Engine(lowered(mlp(precision=precision, ema=ema), stage, 1))
    torch.manual_seed(0)
    engine.initialise(Mlp())
    return engine


def step(engine: Engine) -> None:
    engine.step(random_batches(1, 1)[0][0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_lent_module_has_the_present_values(stage: int, precision: str) -> None:
    engine = engine_with_module(precision, stage)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    before = engine.full_parameters()
    assert dict(engine.parameters()).keys() == before.keys()
    for _ in range(2):
        step(engine)
        expected = engine.full_parameters()
        assert not torch.equal(expected["post.weight"], before["post.weight"])
        with engine.gathered() as whole:
            assert isinstance(whole, Mlp)
            require_parameters(whole, "", expected, dtype)
        with engine.gathered("blocks.1") as block, engine.gathered("post") as post:
            assert isinstance(block, nn.Linear)
            require_parameters(block, "blocks.1", expected, dtype)
            require_parameters(post, "post", expected, dtype)
            x = torch.ones(2, 8, dtype=dtype)
            assert block(x).shape == (2, 8)
        with engine.gathered(masters=True) as whole:
            require_parameters(whole, "", expected, torch.float32)


def test_averages_are_lent() -> None:
    engine = engine_with_module("bf16", ema=0.5)
    step(engine)
    averages = engine.full_parameters(ema=True)
    assert not torch.equal(averages["post.weight"], engine.full_parameters()["post.weight"])
    with engine.gathered(ema=True) as module:
        require_parameters(module, "", averages, torch.bfloat16)
    with engine.gathered(masters=True, ema=True) as module:
        require_parameters(module, "", averages, torch.float32)
    with (
        pytest.raises(UserError, match="keeps no moving average"),
        engine_with_module().gathered(ema=True),
    ):
        pass


def test_every_lent_tensor_has_memory_of_its_own() -> None:
    """So that one that is saved takes its own bytes alone."""
    with engine_with_module().gathered("blocks") as blocks:
        assert isinstance(blocks, nn.ModuleList)
        for parameter in blocks.parameters():
            assert not parameter.is_meta
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_after_its_block_a_module_is_freed_and_says_so() -> None:
    engine = engine_with_module()
    with engine.gathered("post") as post:
        assert isinstance(post, nn.Linear)
        weight = post.weight
        storage = weakref.ref(weight.untyped_storage())
        post(torch.ones(1, 8))
    gc.collect()
    assert storage() is None
    assert post.weight.shape == (6, 8)
    assert "freed" in repr(post.weight)
    uses: list[Callable[[], object]] = [
        lambda: post(torch.ones(1, 8)),
        post.state_dict,
        weight.sum,
        lambda: weight + 1,
        post.weight.tolist,
    ]
    for use in uses:
        with pytest.raises(UserError, match="whose block has ended"):
            use()
    step(engine)
    with engine.gathered("post") as again:
        assert again is not post
    with pytest.raises(UserError, match="whose block has ended"):
        post(torch.ones(1, 8))


def test_a_module_is_freed_after_an_error_in_its_block() -> None:
    engine = engine_with_module()
    modules: list[nn.Module] = []

    def fail() -> None:
        with engine.gathered("post") as post, torch.no_grad():
            modules.append(post)
            post.get_parameter("weight").add_(1)  # The error of the block is the one to see.
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(UserError, match="whose block has ended"):
        modules[0](torch.ones(1, 8))


def test_changes_in_place_are_refused() -> None:
    engine = engine_with_module()
    expected = engine.full_parameters()
    with (
        pytest.raises(UserError, match=r"The block changed 'post.weight' in place.*for reading"),
        engine.gathered("post") as post,
        torch.no_grad(),
    ):
        post.get_parameter("weight").mul_(2)
    with engine.gathered() as module:
        require_parameters(module, "", expected, torch.float32)


def test_loans_work_in_inference_mode_and_with_other_dtypes() -> None:
    engine = engine_with_module()
    with torch.inference_mode(), engine.gathered("post") as post:
        assert post(torch.ones(1, 8)).shape == (1, 6)
    with engine.gathered("post") as post:
        assert post.half()(torch.ones(1, 8).half()).dtype is torch.float16
    step(engine)


def test_wrong_names_are_answered_with_near_ones() -> None:
    engine = engine_with_module()
    for name, message in (
        ("block.1", r"has no module 'block.1'; names like it are 'blocks.1'"),
        ("post.weight", r"'post.weight' is a tensor of the module 'post'.*pass 'post'"),
        ("zzz", r"has no module 'zzz'; names like it are 'pre', 'blocks', 'blocks.0'"),
    ):
        with pytest.raises(UserError, match=message), engine.gathered(name):
            pass


def test_an_engine_without_a_module_lends_none() -> None:
    program = lowered(mlp(), 3, 1)
    engine = begun(Engine(program))
    with pytest.raises(UserError, match="not initialised from a module"), engine.gathered():
        pass


def test_a_module_in_hand_is_lent_in_the_mode_that_the_user_left_it_in() -> None:
    module = Mlp()
    engine = Engine(lowered(mlp(), 3, 1))
    engine.initialise(module)
    for is_training in (False, True):
        module.train(is_training)
        with engine.gathered() as gathered:
            assert gathered is not module
            assert gathered.training is is_training
            assert gathered.get_submodule("blocks.0").training is is_training


def test_loans_follow_the_engine_to_another_program() -> None:
    """When it first accumulates; the self-check of the new program leaves the parameters alone."""
    losses: list[list[float]] = []
    for is_checked in (False, True):
        engine = Engine(
            lowered(mlp(), 3, 1),
            EngineSettings(self_check=is_checked),
            accumulating=lambda: lowered(mlp(micro_steps=2), 3, 1),
        )
        torch.manual_seed(0)
        engine.initialise(Mlp())
        first, second = random_batches(1, 1, micro_steps=2)[0][0]
        losses.append([engine.step(first).loss, engine.step([first, second]).loss])
        with engine.gathered() as module:
            require_parameters(module, "", engine.full_parameters(), torch.float32)
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("backend", [Backend.GLOO, Backend.PEER_MEMORY])
def test_modules_are_gathered_from_all_ranks(tmp_path: Path, backend: Backend) -> None:
    require_success(Ranks(3, tmp_path, "gathered", backend, module=MODULE).wait())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("name", "precision"), [("llama", "bf16"), ("gpt2", "fp32")])
def test_a_lent_model_of_hugging_face_generates(tmp_path: Path, name: str, precision: str) -> None:
    path = ROOT / "tests" / "support" / "models" / f"{name}.py"
    logical = traced(path, world_size=2, precision=precision, lr=0.05)
    (tmp_path / "program.zir").write_text(print_program(logical))
    require_success(Ranks(2, tmp_path, "generate", name, precision, module=MODULE).wait())


@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parts_of_a_flat_are_those_of_the_whole(stage: int, replicas: int | None) -> None:
    """In lockstep; of a part, the ranks without elements of it send nothing."""
    logical = mlp(dim=32, precision="bf16")
    program = lowered(logical, stage, 4, replicas)
    placed = places_to_run(program)
    memories = [RankMemory(program, rank, torch.device("cpu"), placed=placed) for rank in range(4)]
    values = initial_flats(logical)
    initialise_flats(program, memories, values)
    comm = LockstepComm(program)
    generator = random.Random(stage)
    for flat in program.flats:
        for quantity, dtype in (("param", torch.bfloat16), ("master", torch.float32)):
            buffers = flat_buffers(program, flat.name, (quantity,))
            expected = torch.zeros(flat.padded_numel)
            given = values[f"{flat.name}.param"]
            expected[: given.numel()] = given
            for _ in range(8 if buffers else 0):
                start, stop = sorted(generator.choices(range(flat.padded_numel + 1), k=2))
                holders = [(whole(buffer), content) for buffer, content in buffers]
                parts = flat_part(program, memories, comm, holders, dtype, range(start, stop))
                assert all(torch.equal(part, expected[start:stop].to(dtype)) for part in parts)


def test_parameters_alone_travel_where_they_are_less_than_half_of_their_flat() -> None:
    """Of a flat of many parameters, one is broadcast by the ranks that hold elements of it."""
    logical = mlp(dim=32)
    (flat,) = [flat for flat in logical.flats if flat.unit == "blocks.0"]
    assert [slot.name for slot in flat.slots] == ["blocks.0.weight", "blocks.0.bias"]
    program = lowered(logical, 3, 4)
    lockstep = begun(Lockstep(program))
    expected = lockstep.full_parameters()
    memories = lockstep._memories
    comm = CountingComm(program)
    for name, (gathers, broadcasts) in {
        "blocks.0.weight": (1, 0),
        "blocks.0.bias": (0, 1),
        "post.weight": (1, 0),
    }.items():
        comm.gathers = comm.broadcasts = 0
        ((slot, values),) = whole_parameters(program, memories, comm, {name}, masters=True)
        assert slot.name == name
        assert all(torch.equal(value, expected[name]) for value in values)
        assert (comm.gathers, comm.broadcasts) == (gathers, broadcasts)


class CountingComm(LockstepComm):
    """Counts its collectives."""

    gathers = broadcasts = 0

    def all_gather(self, tensors: CollectiveTensors) -> None:
        self.gathers += 1
        super().all_gather(tensors)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        self.broadcasts += 1
        super().broadcast(tensors, root)
