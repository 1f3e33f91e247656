"""A rank that was stopped is noticed, one that is slow or done is not."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue

import pytest
import torch
from torch import nn

import zeroir
from zeroir.errors import UserError
from zeroir.runtime.distributed.heartbeat import Heartbeat, HeartbeatTiming
from zeroir.runtime.distributed.rank_position import RankPosition, behind
from zeroir.runtime.distributed.signs_of_life import ENDED, key_of_life

BEAT = HeartbeatTiming(interval_s=0.02, silence_s=0.3)


class SharedStore:
    """Values by key, for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.is_gone = False

    def set(self, key: str, value: str, /) -> None:
        if self.is_gone:
            raise RuntimeError("the connection was closed")
        self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        if self.is_gone:
            raise RuntimeError("the connection was closed")
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        if self.is_gone:
            raise RuntimeError("the connection was closed")
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        raise NotImplementedError


class FrozenStore(SharedStore):
    """What a rank writes to whose process is stopped: nothing arrives any more."""

    def __init__(self, shared: SharedStore) -> None:
        super().__init__()
        self._shared = shared
        self.is_frozen = False

    def set(self, key: str, value: str, /) -> None:
        if not self.is_frozen:
            self._shared.set(key, value)

    def get(self, key: str, /) -> bytes:
        return self._shared.get(key)

    def check(self, keys: list[str], /) -> bool:
        return self._shared.check(keys)


class SilentStore(SharedStore):
    """A store behind a link that is down: whoever asks it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_up = threading.Event()
        self.is_up.set()

    def check(self, keys: list[str], /) -> bool:
        self.is_up.wait()
        return super().check(keys)


def test_a_store_that_does_not_answer_is_noticed() -> None:
    store = SilentStore()
    said: SimpleQueue[str] = SimpleQueue()
    beat = Heartbeat(store, 1, 3, said.put, BEAT, " at alpha:29500")
    beat.hosts = ["alpha", "beta", "alpha"]
    time.sleep(BEAT.interval_s)
    store.is_up.clear()
    assert said.get(timeout=60.0).startswith(
        "The job's store at alpha:29500 has not answered for 0 s: rank 1 on beta cannot reach it, and with it alpha "
        "(ranks 0, 2)."
    )
    assert beat.ranks_behind() is None
    store.is_up.set()
    beat.break_off()


@pytest.mark.slow
def test_a_silent_rank_is_noticed_by_the_one_before_it_and_named_by_all() -> None:
    """A rank that ends for that would else be missed itself."""
    shared = SharedStore()
    stopped = FrozenStore(shared)
    silent: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def notice(by: int, why: str) -> None:
        silent.put((by, why))

    beats = [
        Heartbeat(stopped if rank == 2 else shared, rank, 3, partial(notice, rank), BEAT)
        for rank in range(3)
    ]
    time.sleep(2 * BEAT.silence_s)
    assert silent.empty()
    stopped.is_frozen = True
    (first, why), (second, same) = silent.get(timeout=60.0), silent.get(timeout=60.0)
    assert (first, second) == (1, 0)
    assert why.startswith("Rank 2 has given no sign of life for ")
    assert same == why
    for beat in beats:
        beat.stop()


@pytest.mark.slow
def test_a_rank_that_is_asked_to_end_misses_a_lost_one_at_once() -> None:
    store = SharedStore()
    said: SimpleQueue[str] = SimpleQueue()
    beat = Heartbeat(store, 0, 2, said.put, HeartbeatTiming(interval_s=60.0))
    while not store.check(["0"]):
        time.sleep(0.001)
    time.sleep(0.1)
    store.set("1", "1 ")
    store.set(key_of_life(1), ENDED.decode())
    with pytest.raises(Empty):
        said.get(timeout=0.3)
    beat.hurry()
    assert said.get(timeout=10.0).startswith(
        "Rank 1 has ended before the others, which wait for it"
    )
    beat.break_off()


def test_a_rank_that_is_done_or_not_yet_there_is_not_missed() -> None:
    """The last rank comes late, the first one leaves early."""
    shared = SharedStore()
    silent: list[str] = []
    first = Heartbeat(shared, 0, 3, silent.append, BEAT)
    second = Heartbeat(shared, 1, 3, silent.append, BEAT)
    time.sleep(BEAT.silence_s / 2)
    third = Heartbeat(shared, 2, 3, silent.append, BEAT)
    first.stop()
    time.sleep(2 * BEAT.silence_s)
    assert not silent
    for beat in (second, third):
        beat.stop()


def test_a_store_that_is_gone_is_noticed_by_all() -> None:
    """Its keeper was killed, and nobody is left to end the ranks."""
    shared = SharedStore()
    said: SimpleQueue[str] = SimpleQueue()
    beats = [Heartbeat(shared, rank, 2, said.put, BEAT) for rank in range(2)]
    time.sleep(BEAT.interval_s)
    shared.is_gone = True
    for _ in beats:
        assert said.get(timeout=60.0).startswith("The job's store is gone: ")
    for beat in beats:
        beat.stop()


def test_the_keeper_of_the_store_leaves_last() -> None:
    """Else a rank that comes to its end a little later would miss the store."""
    shared = SharedStore()
    alarms: list[str] = []
    first, second = (Heartbeat(shared, rank, 2, alarms.append, BEAT) for rank in range(2))
    keeper = threading.Thread(target=first.stop)
    keeper.start()
    keeper.join(5 * BEAT.interval_s)
    assert keeper.is_alive()
    second.stop()
    keeper.join(10.0)
    assert not keeper.is_alive()
    assert not alarms


def test_one_rank_says_what_happened_to_all() -> None:
    store = SharedStore()
    ranks = [Heartbeat(store, rank, 3, on_alarm=lambda _: None) for rank in range(3)]
    for each in ranks:
        each.break_off()
    assert [each.is_first_with("The worker 17 ended.") for each in ranks[:2]] == [True, False]
    assert not ranks[2].is_first_with("The worker 200 ended.")
    assert ranks[2].is_first_with("The worker 17 did not begin.")
    store.is_gone = True
    assert ranks[2].is_first_with("The worker 17 ended.")


# ---- A rank tells the others where it is, and the one that lost its peers names those that are behind


def place(step: int, op: int, text: str) -> RankPosition:
    return RankPosition(order=(step, 0, 1, op), text=text)


def test_ranks_behind_are_named_with_their_op() -> None:
    ahead, late = place(4, 7, "in update:7 wait of step 5"), place(4, -1, "outside its program")
    assert behind([ahead, late, ahead]) == "Rank 1 is behind the others: outside its program."
    assert behind([late, ahead, late]) == "Ranks 0, 2 are behind the others: outside its program."
    assert behind([ahead, None, place(3, 9, "in micro_step:9 of step 4")]) == (
        "Rank 2 is behind the others: in micro_step:9 of step 4."
    )
    assert behind([ahead, ahead]) is None
    assert behind([None, None]) is None
    assert RankPosition.decoded(late.encoded()) == late
    assert RankPosition.decoded("") is None


def test_a_heartbeat_tells_the_other_ranks() -> None:
    shared = SharedStore()
    alarms: list[str] = []
    places = [place(4, 7, "in wait"), place(4, 2, "in all_gather"), place(4, 7, "in wait")]

    def told(rank: int) -> RankPosition:
        return places[rank]

    beats = [Heartbeat(shared, rank, 3, alarms.append, BEAT) for rank in range(3)]
    assert beats[0].ranks_behind() is None
    for rank, beat in enumerate(beats):
        beat.tell = partial(told, rank)
    deadline = time.monotonic() + 60
    while beats[0].ranks_behind() != "Rank 1 is behind the others: in all_gather.":
        assert time.monotonic() < deadline, beats[0].ranks_behind()
        time.sleep(BEAT.interval_s)
    for beat in beats:
        beat.stop()
    assert beats[0].ranks_behind() is None
    assert not alarms


def test_an_engine_knows_the_op_that_it_is_in() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    ids = torch.zeros(2, 2, dtype=torch.int64)
    compiled = zeroir.compile(
        model, ids, loss=lambda m, x: m(x).square().mean(), world_size=1, evaluate=False
    )
    engine = compiled.engine(self_check=False)
    engine.step(ids)
    assert engine.position().text.endswith("after step 1")
    with pytest.raises(UserError, match="does not suit the model") as raised:
        engine.step(ids + 9)
    where = engine.position()
    # Streams are threads, so another stream may have started an op after the one that failed.
    assert re.fullmatch(r"in last_micro_step:\d+ .* of step 2", where.text)
    assert re.search(r"in last_micro_step:\d+ compute .* of step 2", str(raised.value))
    assert where.order[0] == 1
