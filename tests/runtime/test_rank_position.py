"""A rank tells the others where it is, and the one that lost its peers names those that are behind."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import nn

import zeroir
from tests.runtime.test_heartbeat import BEAT, SharedStore
from zeroir.errors import UserError
from zeroir.runtime.distributed.heartbeat import Heartbeat
from zeroir.runtime.distributed.rank_position import RankPosition, behind


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
    assert where.text.startswith("in ")
    assert where.text.removeprefix("in ") in str(raised.value)
    assert where.order[0] == 1
