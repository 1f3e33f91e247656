"""The engine on a CUDA device: streams and events of the program are CUDA's own, and NCCL carries the collectives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.programs import mlp
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine import Engine
from zeroir.runtime.lockstep import run_lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}


@pytest.fixture
def _one_nccl_rank(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_nccl_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_one_nccl_rank_follows_the_reference(stage: int, precision: str) -> None:
    logical = mlp(precision=precision, clip=0.5)
    program = lowered(logical, stage, 1)
    batches = random_batches(10, 1)
    expected = run_lockstep(program, initial=initial_flats(logical), inputs=batches)
    engine = Engine(program, backend=Backend.NCCL, device=torch.device("cuda", 0))
    engine.initialise_flats(initial_flats(logical))
    found = [engine.step(batch).loss for ((batch,),) in batches]
    engine.close()
    torch.testing.assert_close(
        torch.tensor(found),
        torch.tensor([losses[0] for losses in expected.losses]),
        rtol=TOLERANCE[precision],
        atol=TOLERANCE[precision],
    )


@pytest.mark.usefixtures("_one_nccl_rank")
def test_what_a_step_allocates_is_given_back() -> None:
    logical = mlp(dim=256, features=64, batch=32)
    engine = Engine(lowered(logical, 3, 1), backend=Backend.NCCL, device=torch.device("cuda", 0))
    engine.initialise_flats(initial_flats(logical))
    (((batch,),),) = random_batches(1, 1, shape=(32, 64))
    engine.step(batch)
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated()
    engine.step(batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == at_rest
    engine.close()
