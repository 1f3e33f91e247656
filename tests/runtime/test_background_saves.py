"""Saves write files while training goes on, and never mix the states of two moments."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from tests.runtime.support import (
    Ranks,
    begun,
    initial_flats,
    lowered,
    random_batches,
    require_same,
    require_success,
    trained_engine,
)
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.errors import UserError
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.checkpoint import saving
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.lockstep import Lockstep


@contextmanager
def slow_writes() -> Iterator[threading.Event]:
    """Saves in the body write no file before the event is set."""
    go_on = threading.Event()
    write = saving.RankSave.write

    def slow(
        self: saving.RankSave, assignment: saving.Assignment, own_tensors: saving.OwnTensors
    ) -> saving.Written:
        assert go_on.wait(30)
        return write(self, assignment, own_tensors)

    with patch.object(saving.RankSave, "write", slow):
        yield go_on


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    program = applied(lowered(mlp(), 3, 1), (SaveState(),))
    engine = trained_engine(program)
    expected = {key: values.clone() for key, values in engine.full_state().items()}
    with slow_writes() as go_on:
        first = engine.save(tmp_path / "first", wait=False)
        engine.step(random_batches(1, 1)[0][0])
        assert not first.is_done
        threading.Timer(0.1, go_on.set).start()
        engine.save(tmp_path / "second")
        first.wait()
    # Training went on meanwhile, and the first checkpoint has what was there when it began.
    loaded = Engine(program)
    assert loaded.load(tmp_path / "first").step == 1
    require_same(loaded.full_state(), expected)
    assert loaded.load(tmp_path / "second").step == 2
    require_same(loaded.full_state(), engine.full_state())


def test_a_save_outlives_the_program_that_began_it(tmp_path: Path) -> None:
    """A step of several batches needs another program: its engine takes the place of the one that is being saved."""
    save_state = (SaveState(),)
    engine = Engine(
        applied(lowered(mlp(), 3, 1), save_state),
        accumulating=lambda: applied(lowered(mlp(micro_steps=2), 3, 1), save_state),
    )
    engine.initialise_flats(initial_flats(mlp()))
    (first,), (second,) = random_batches(2, 1, micro_steps=2)
    engine.step(first[0])
    expected = {key: values.clone() for key, values in engine.full_state().items()}
    with slow_writes() as go_on:
        engine.save(tmp_path / "first", wait=False)
        engine.step(second)
        go_on.set()
        engine.save(tmp_path / "second", wait=False).wait()
    again = Engine(lowered(mlp(), 0, 1))
    again.load(tmp_path / "first")
    require_same(again.full_state(), expected)
    again.load(tmp_path / "second")
    require_same(again.full_state(), engine.full_state())


def test_closing_waits_for_the_save_under_way(tmp_path: Path) -> None:
    engine = trained_engine(applied(lowered(mlp(), 0, 1), (SaveState(),)))
    engine.save(tmp_path / "saved", wait=False, metrics={"loss": 2.5}, read_back=True)
    engine.close()
    assert read_manifest(str(tmp_path / "saved")).metrics == {"loss": 2.5}


def test_a_program_without_the_section_saves_while_training_waits(tmp_path: Path) -> None:
    engine = trained_engine(lowered(mlp(), 0, 1))
    with pytest.raises(UserError, match="section `save`"):
        engine.save(tmp_path / "saved", wait=False)
    engine.save(tmp_path / "saved")


def test_metrics_are_numbers_of_any_library(tmp_path: Path) -> None:
    engine = trained_engine(lowered(mlp(), 0, 1))
    metrics = {"numpy": np.float32(1.5), "torch": torch.tensor([2.0]), "int": 3}
    engine.save(tmp_path / "saved", metrics=cast("dict[str, float]", metrics))
    assert read_manifest(str(tmp_path / "saved")).metrics == {"numpy": 1.5, "torch": 2, "int": 3}
    with pytest.raises(UserError, match="The metric 'loss' is of type str: give a number"):
        engine.save(tmp_path / "other", metrics=cast("dict[str, float]", {"loss": "low"}))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_state_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    engine = trained_engine(lowered(mlp(), 0, 1))
    with pytest.raises(UserError, match="which a checkpoint cannot hold"):
        engine.save(tmp_path / "saved", state={"loader": threading.Event()})
    assert not list(tmp_path.iterdir())
    engine.save(tmp_path / "saved", state={"seen": 3, "order": torch.arange(5)})
    loaded = engine.load(tmp_path / "saved")
    state = loaded.state
    assert isinstance(state, dict)
    assert state["seen"] == 3
    assert torch.equal(state["order"], torch.arange(5))


# ---- Real processes save to a store, and others go on with what is there


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_save_to_a_store_and_load_from_it(
    tmp_path: Path, s3_bucket: str, s3_environment: Mapping[str, str]
) -> None:
    # The driver looks the host's name up in a thread, even when the interpreter is about to end.
    endpoint = s3_environment["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
    environment = {**s3_environment, "AWS_ENDPOINT_URL": endpoint}
    url = f"{s3_bucket}/runs"
    for scenario, world_size in (("save", 2), ("load", 3)):
        folder = tmp_path / scenario
        folder.mkdir()
        ranks = Ranks(
            world_size,
            folder,
            scenario,
            url,
            module="tests.runtime.store_workers",
            environment=environment,
        )
        require_success(ranks.wait())
        for listed in CheckpointFolder(root=url).list():
            verify_all(listed.path, read_manifest(listed.path))
    assert [listed.step for listed in CheckpointFolder(root=url).list()] == [2, 1]


def test_the_file_of_a_rank_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store fails in passing: the bytes of the state can be read again."""
    lockstep = begun(Lockstep(lowered(mlp(), 2, 2)))
    write = MemoryFile.write
    failures = [TimeoutError("slow"), ConnectionResetError("gone")]

    def failing(file: MemoryFile, data: memoryview) -> int:
        if failures and file.tell() > 0:
            raise failures.pop()
        return int(write(file, data))

    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(MemoryFile, "write", failing, raising=False)
    path = "memory://again/step-00000000"
    lockstep.save(path)
    assert not failures
    verify_all(path, read_manifest(path))
    MemoryFileSystem.store.clear()
