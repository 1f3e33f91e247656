"""Ranks find those of their own attempt of a job, whatever earlier attempts left in the store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from zeroir.runtime.distributed import rank_discovery as roll_call
from zeroir.runtime.distributed.rank_discovery import AbsentRankError, call_roll

LONG = timedelta(seconds=30)


def attempt(
    store: HashStore, ranks: list[int], world_size: int, patience: timedelta = LONG
) -> dict[int, str | int]:
    """The token that each rank gets, or the rank that it misses; the ranks come in this order."""
    results: dict[int, str | int] = {}

    def come(rank: int) -> None:
        try:
            results[rank] = call_roll(store, rank, world_size, patience)
        except AbsentRankError as error:
            results[rank] = error.rank

    threads = []
    for rank in ranks:
        threads.append(threading.Thread(target=come, args=(rank,)))
        threads[-1].start()
        threads[-1].join(0.03)
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_attempts_in_one_store_have_their_own_tokens(ranks: list[int]) -> None:
    store = HashStore()
    tokens = []
    for _ in range(3):
        results = attempt(store, ranks, 3)
        assert results.keys() == {0, 1, 2}
        assert len(set(results.values())) == 1
        tokens.append(results[0])
    assert len(set(tokens)) == 3


@pytest.mark.slow
def test_a_rank_of_an_earlier_attempt_counts_for_nothing() -> None:
    """Rank 0 of the second attempt comes last, and rank 1 last but one: each finds the keys of the first attempt."""
    store = HashStore()
    attempt(store, [0, 1, 2], 3)
    shorter = timedelta(seconds=0.2)
    assert attempt(store, [0, 2], 3, shorter) == {0: 1, 2: 1}
    assert attempt(store, [1, 2], 3, shorter) == {1: 0, 2: 0}


def test_rank_0_says_for_which_rank_it_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "_NOTE_AFTER_S", 0.0)
    caplog.set_level("INFO", "zeroir")
    with pytest.raises(AbsentRankError):
        call_roll(HashStore(), 0, 4, timedelta(seconds=0.1))
    assert caplog.messages == ["Waiting for rank 1 and 2 more of 4 ranks to join."]


@pytest.mark.slow
def test_one_rank_waits_for_nobody() -> None:
    assert isinstance(call_roll(HashStore(), 0, 1, timedelta(0)), str)
