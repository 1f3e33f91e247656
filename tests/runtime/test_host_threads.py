"""The threads of an update on the host, and the pinned memory that it works in."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError, memory_for
from zeroir.ir import ops
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.runtime.device.pinned_memory import LARGE_BYTES, pinned_empty
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.host_threads import update_threads


@pytest.mark.parametrize(
    ("cores", "bound", "ranks", "given", "expected"),
    [
        (64, 64, None, None, 63),
        (64, 64, "8", "1", 7),
        (64, 16, "4", None, 15),
        (64, 64, "8", "6", 6),
        (2, 2, "2", "1", 1),
        (1, 1, None, None, 1),
        (8, 8, "none", "", 7),
    ],
)
def test_a_rank_updates_with_its_share_of_the_cores_but_one(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    bound: int,
    ranks: str | None,
    given: str | None,
    expected: int,
) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", ranks), ("OMP_NUM_THREADS", given)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
    assert update_threads() == expected


def test_the_thread_of_the_update_uses_them_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace())
    program = applied(mlp(), (*for_stage(2, 2), OffloadOptimizer()))
    own = torch.get_num_threads()
    step = next(op for op in program.ops() if isinstance(op, ops.OptimizerStep))
    used: list[tuple[str, int]] = []

    def note() -> None:
        used.append((threading.current_thread().name, torch.get_num_threads()))

    streams = CudaStreams(program, torch.device("cuda"))
    try:
        streams.bind(step, partial(note))()
        streams._threads.join([])
        assert used == [("zeroir-optimizer", 3)]
        assert torch.get_num_threads() == own
    finally:
        streams.close()
        torch.set_num_threads(own)


class Cudart:
    """Notes what is registered; refuses more than ``limit`` bytes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}

    def library(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)

    def register(self, address: int, size_bytes: int, _: int) -> int:
        if size_bytes > self.limit:
            return 2
        self.registered[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.slow
def test_large_pinned_tensors_have_exactly_their_bytes_until_they_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", cudart.library)
    numel = LARGE_BYTES // 4 + 24_680
    tensor = pinned_empty(numel, torch.float32)
    assert tensor.shape == (numel,)
    assert tensor.dtype is torch.float32
    assert cudart.registered == {tensor.data_ptr(): 4 * numel}
    view = tensor[5:].view(torch.int32)
    tensor[5] = 1.0
    del tensor
    gc.collect()
    assert cudart.registered, "a view still uses it"
    assert view[0] == 0x3F800000
    del view
    gc.collect()
    assert not cudart.registered


def test_memory_that_cannot_be_pinned_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart(limit=LARGE_BYTES)
    monkeypatch.setattr(torch.cuda, "cudart", cudart.library)
    with (
        pytest.raises(UserError, match="not enough memory for the program's buffers"),
        memory_for("the program's buffers"),
    ):
        pinned_empty(LARGE_BYTES, torch.float32)
