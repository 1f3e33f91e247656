"""Which GPU a rank gets."""

from __future__ import annotations

import pytest

from zeroir.errors import UserError
from zeroir.runtime.distributed import rendezvous


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)


def test_a_rank_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous.join_job().device.index == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rendezvous.join_job().device.index == 1


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UserError, match="Local rank 3 has no GPU, because this machine shows 2"):
        rendezvous.join_job()


def test_ranks_share_gpus_where_nccl_is_told_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert rendezvous.join_job().device.index == 1
