"""Positions in a model file's batches: loaders with a state, functions with ``start_step``, and plain generators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from zeroir.errors import UserError
from zeroir.runtime.data.training_data import BatchFunction, RankOfData, TrainingData, repeated

Taken = list[object]


def data(function: BatchFunction, rank: int = 0, world_size: int = 2) -> TrainingData:
    return TrainingData(function, RankOfData(rank=rank, world_size=world_size, seed=3))


def take(source: TrainingData, count: int) -> Taken:
    return [source.take(step) for step in range(1, count + 1)]


def from_start(rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[str]:
    step = start_step
    while True:
        yield f"{rank}/{world_size} {seed} {step}"
        step += 1


def plain(rank: int, world_size: int, seed: int) -> Iterator[str]:
    return from_start(rank, world_size, seed)


@dataclass
class Loader:
    """A loader like torchdata's: the state is one rank's."""

    name: str
    position: int = 0
    is_global: bool = False

    def __iter__(self) -> Iterator[str]:
        while True:
            self.position += 1
            yield f"{self.name} {self.position}"

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position, **({"is_global": True} if self.is_global else {})}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        position = state["position"]
        assert isinstance(position, int)
        if position > 90:
            raise ValueError("beyond the end")
        self.position = position


def per_rank(rank: int, world_size: int, seed: int, start_step: int = 0) -> Loader:
    assert start_step == 0
    return Loader(f"{rank}/{world_size} {seed}")


def for_all(rank: int, world_size: int, seed: int) -> Loader:
    return Loader(f"{rank}/{world_size} {seed}", is_global=True)


@pytest.mark.parametrize(
    ("function", "resumption"),
    [(from_start, "start-step"), (plain, "replay"), (per_rank, "loader"), (for_all, "loader")],
)
def test_three_resumes_are_one_run(function: BatchFunction, resumption: str) -> None:
    whole = take(data(function), 9)
    source = data(function)
    batches = take(source, 2)
    for count in (1, 4, 2):
        state = json.loads(json.dumps(source.state_dict()))
        source = data(function)
        assert source.load_state_dict(state, world_size=2) == resumption
        batches += take(source, count)
    assert batches == whole
    assert source.batches_taken == 9


@pytest.mark.parametrize("function", [from_start, for_all])
def test_another_world_size(function: BatchFunction) -> None:
    source = data(function, 1, 3)
    take(source, 4)
    later = data(function, 1, 2)
    later.load_state_dict(source.state_dict(), world_size=3)
    fresh = data(function, 1, 2)
    assert take(later, 2) == take(fresh, 6)[4:]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (plain, "takes no start_step and gives other batches to each number of ranks, so 2"),
        (per_rank, "has a position for each rank of 3, so 2 cannot go on"),
    ],
)
def test_another_world_size_is_refused(function: BatchFunction, sentence: str) -> None:
    source = data(function, 1, 3)
    take(source, 4)
    with pytest.raises(UserError, match=sentence):
        data(function, 1, 2).load_state_dict(source.state_dict(), world_size=3)


def test_the_function_is_called_once_with_its_start() -> None:
    starts: list[int] = []

    def batches(_rank: int, _world_size: int, _seed: int, start_step: int) -> list[str]:
        starts.append(start_step)
        return ["a", "b", "c"]

    source = data(batches)
    take(source, 2)
    later = data(batches)
    later.load_state_dict(source.state_dict(), world_size=2)
    later.open()
    later.take(3)
    assert starts == [0, 2]


def test_the_example_is_repeated() -> None:
    source = data(repeated(lambda: "example"))
    assert take(source, 2) == ["example"] * 2
    later = data(repeated(lambda: "example"))
    later.load_state_dict(source.state_dict(), world_size=5)
    assert take(later, 1) == ["example"]


def test_a_data_loader_begins_again_with_another_order_in_each_epoch() -> None:
    def shuffled(rank: int, world_size: int, seed: int) -> DataLoader[int]:
        samples = cast("Dataset[int]", list(range(20)))
        sampler: DistributedSampler[int] = DistributedSampler(
            samples, world_size, rank, seed=seed, drop_last=True
        )
        return DataLoader(samples, batch_size=2, sampler=sampler, drop_last=True)

    def plain_data(source: TrainingData, count: int) -> list[list[int]]:
        return [cast("torch.Tensor", batch).tolist() for batch in take(source, count)]

    whole = plain_data(data(shuffled), 12)
    epochs = [list(chain(*whole[start : start + 5])) for start in (0, 5)]
    assert len(set(epochs[0])) == 10
    assert epochs[0] != epochs[1]
    source = data(shuffled)
    take(source, 7)
    later = data(shuffled)
    assert later.load_state_dict(source.state_dict(), world_size=2) == "replay"
    assert plain_data(later, 5) == whole[7:]


def test_a_shuffled_data_loader_resumes_where_a_seed_decides_its_order() -> None:
    def loader(generator: torch.Generator | None) -> DataLoader[int]:
        samples = cast("Dataset[int]", list(range(8)))
        return DataLoader(samples, batch_size=4, shuffle=True, generator=generator)

    def seeded(_rank: int, _world_size: int, seed: int) -> DataLoader[int]:
        return loader(torch.Generator().manual_seed(seed))

    def unseeded(_rank: int, _world_size: int, _seed: int) -> DataLoader[int]:
        return loader(None)

    whole = [str(batch) for batch in take(data(seeded), 5)]
    source = data(seeded)
    take(source, 3)
    later = data(seeded)
    later.load_state_dict(source.state_dict(), world_size=2)
    assert [str(batch) for batch in take(later, 2)] == whole[3:]
    with pytest.raises(UserError, match="shuffles without a generator"):
        data(unseeded).load_state_dict(source.state_dict(), world_size=2)


def test_an_iterable_without_batches_ends() -> None:
    with pytest.raises(UserError, match="ended before step 1"):
        data(lambda *_: []).take(1)


def short(rank: int, world_size: int, seed: int) -> Iterator[str]:
    yield f"{rank} {world_size} {seed}"


def failing(rank: int, world_size: int, seed: int) -> Iterator[int]:
    yield rank
    raise ValueError(f"no shard {world_size + seed}")


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "sentence"),
    [
        (plain, short, r"batches\(\) ended after 1 batches, but 3 had been taken"),
        (plain, failing, r"batches\(\) failed while 3 batches were skipped .*: no shard 5"),
        (plain, for_all, "the checkpoint has no state of a loader"),
        (per_rank, plain, r"batches\(\) returned a generator without load_state_dict"),
    ],
)
def test_data_that_changed(
    saved_by: BatchFunction, resumed_by: BatchFunction, sentence: str
) -> None:
    source = data(saved_by)
    take(source, 3)
    with pytest.raises(UserError, match=sentence):
        data(resumed_by).load_state_dict(source.state_dict(), world_size=2)


def test_a_loader_that_refuses() -> None:
    state = {"batches": 3, "loader": {"position": 99}}
    sentence = r"load_state_dict\(\) of the loader failed \(test_training_data.py:\d+\): ValueError: beyond the end"
    with pytest.raises(UserError, match=sentence):
        data(per_rank).load_state_dict(state, world_size=2)


def test_a_state_of_something_else() -> None:
    with pytest.raises(UserError, match="does not say how far the data was"):
        data(plain).load_state_dict({"epoch": 3}, world_size=2)


def test_errors_name_the_users_line() -> None:
    source = data(failing)
    source.take(1)
    sentence = r"batches\(\) failed at step 2 \(test_training_data.py:\d+\): ValueError: no shard 5"
    with pytest.raises(UserError, match=sentence):
        source.take(2)
    ended = data(short)
    ended.take(1)
    with pytest.raises(UserError, match=r"batches\(\) ended before step 2"):
        ended.take(2)
