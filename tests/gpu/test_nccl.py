"""NCCL's collectives against the reference semantics, alone and with several ranks on one card; gloo from a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gpu.support import MLP_TOLERANCE
from tests.runtime.support import Ranks, initial_flats, lowered, random_batches, require_success
from tests.support.lockstep import run_lockstep
from tests.support.programs import mlp
from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import CollectiveTensors, Comm, TensorPair
from zeroir.runtime.comm.groups import make_groups
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, require_same_program
from zeroir.runtime.comm.lockstep import LockstepComm
from zeroir.runtime.comm.nccl import NcclComm

pytestmark = pytest.mark.gpu

PAIRS: dict[str, list[tuple[torch.dtype, torch.dtype, int]]] = {
    "one": [(torch.float32, torch.float32, 512)],
    "several": [(torch.float32, torch.float32, n) for n in (1, 256, 3)],
    "mixed": [
        (torch.float32, torch.float32, 64),
        (torch.bfloat16, torch.bfloat16, 128),
        (torch.float16, torch.float16, 64),
    ],
    "converted": [(torch.float16, torch.float32, 64), (torch.float16, torch.float32, 128)],
}
"""Dtype of the source, of the destination, and number of elements, of every pair."""

CALLS: dict[str, Callable[[Comm, CollectiveTensors], None]] = {
    "all_gather": lambda comm, tensors: comm.all_gather(tensors),
    "reduce_scatter": lambda comm, tensors: comm.reduce_scatter(tensors, Reduction.SUM),
    "reduce_scatter_max": lambda comm, tensors: comm.reduce_scatter(tensors, Reduction.MAX),
    "all_reduce": lambda comm, tensors: comm.all_reduce(tensors, Reduction.SUM),
    "all_reduce_max": lambda comm, tensors: comm.all_reduce(tensors, Reduction.MAX),
    "broadcast": lambda comm, tensors: comm.broadcast(tensors, 0),
}


def launch_on(
    where: torch.device, case: str, wire_dtype: torch.dtype | None, *, in_place: bool
) -> tuple[CollectiveTensors, list[Tensor]]:
    """The same tensors on any device, and its destinations."""
    generator = torch.Generator().manual_seed(7)
    pairs = []
    for source_dtype, destination_dtype, numel in PAIRS[case]:
        source = torch.randn(numel, generator=generator).to(source_dtype).to(where)
        is_same = in_place and source_dtype == destination_dtype
        destination = (
            source if is_same else torch.zeros(numel, dtype=destination_dtype, device=where)
        )
        pairs.append(TensorPair(source=source, destination=destination))
    tensors = CollectiveTensors(comm="gather", pairs=[pairs], staging=[None], wire_dtype=wire_dtype)
    return tensors, [pair.destination for pair in pairs]


@pytest.mark.usefixtures("_one_nccl_rank")
def test_every_collective_of_one_rank_is_the_references(device: torch.device) -> None:
    program = lowered(mlp(), 3, 1)
    require_same_program(program, device)
    nccl, reference = (
        NcclComm.of_groups(make_groups(program, "nccl", DEFAULT_TIMEOUT)),
        LockstepComm(program),
    )
    for name, call in CALLS.items():
        for pairs in PAIRS:
            for wire_dtype in (None, torch.bfloat16):
                for in_place in (False, True):
                    found_launch, found = launch_on(device, pairs, wire_dtype, in_place=in_place)
                    tensors, expected = launch_on(
                        torch.device("cpu"), pairs, wire_dtype, in_place=in_place
                    )
                    call(nccl, found_launch)
                    call(reference, tensors)
                    for one, other in zip(found, expected, strict=True):
                        assert torch.equal(one.cpu(), other), (name, pairs, wire_dtype, in_place)
    nccl.close()


def stages_on_one_card(
    folder: Path, backend: str, world_size: int, precision: str, environment: dict[str, str]
) -> list[dict[str, Tensor]]:
    """Losses and states after ten steps at every stage, of ranks that share a card."""
    ranks = Ranks(
        world_size,
        folder,
        backend,
        precision,
        module="tests.gpu.workers",
        environment=environment,
    )
    require_success(ranks.wait(240.0))
    return [load_file(folder / f"{stage}.safetensors") for stage in range(4)]


def require_close_to_lockstep(
    found: list[dict[str, Tensor]], world_size: int, precision: str
) -> None:
    """Losses of every stage within the dtype's bound, and states that differ no more than losses allow."""
    logical = mlp(precision=precision, clip=0.5)
    expected = run_lockstep(
        lowered(logical, 0, world_size),
        initial=initial_flats(logical),
        inputs=random_batches(10, world_size),
    )
    reference = torch.tensor([losses[0] for losses in expected.losses], dtype=torch.float64)
    bound = MLP_TOLERANCE[precision]
    for of_stage in found:
        torch.testing.assert_close(of_stage["losses"], reference, rtol=bound, atol=bound)


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gloo_ranks_share_a_card(tmp_path: Path, precision: str) -> None:
    """Real streams and asynchronous kernels at three ranks, and sums in rank order: stages agree bit for bit."""
    found = stages_on_one_card(tmp_path, "gloo", 3, precision, {})
    require_close_to_lockstep(found, 3, precision)
    for of_stage in found[1:]:
        for key, value in of_stage.items():
            assert torch.equal(value, found[0][key]), key


@pytest.mark.dist
@pytest.mark.needs_nccl(2, 30)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nccl_ranks_share_a_card(tmp_path: Path, world_size: int, precision: str) -> None:
    """NCCL adds in an order of its own: results agree within the dtype's bound."""
    environment = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", "4"),
    }
    found = stages_on_one_card(tmp_path, "nccl", world_size, precision, environment)
    require_close_to_lockstep(found, world_size, precision)
