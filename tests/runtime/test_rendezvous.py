"""What a rank's environment must say, and ranks that do not come or stop on the way."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from tests.support.zygote import Forked, compiling_zygote
from zeroir.errors import UserError
from zeroir.runtime.distributed import rank_discovery as roll_call
from zeroir.runtime.distributed import rendezvous
from zeroir.runtime.distributed.interfaces import interface_towards
from zeroir.runtime.distributed.rank_discovery import AbsentRankError, call_roll
from zeroir.runtime.distributed.rendezvous import (
    LaunchEnvironment,
    join_job,
    open_store,
    read_launch_environment,
)
from zeroir.runtime.distributed.slurm import become_rank_of_step

WELL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NAMES = (*WELL, "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def started_by_nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What sets variables of an environment without those of a rank."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_that_nobody_started_is_alone(started_by_nobody: pytest.MonkeyPatch) -> None:
    assert read_launch_environment() == LaunchEnvironment()
    started_by_nobody.setenv("WORLD_SIZE", "1")
    assert read_launch_environment() == LaunchEnvironment()


def test_a_local_rank_that_is_no_number_is_refused(started_by_nobody: pytest.MonkeyPatch) -> None:
    started_by_nobody.setenv("LOCAL_RANK", "one")
    with pytest.raises(UserError, match=r"^LOCAL_RANK is 'one', but"):
        join_job()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RANK": "abc"}, "RANK is 'abc', but must be a number from 0 to 65535"),
        ({"RANK": "-1"}, "RANK is '-1', but must be a number from 0"),
        ({"RANK": "9" * 5000}, "RANK is '9{40}…', but must be"),
        ({"RANK": "5"}, "RANK is 5, but the job has 2 ranks"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', but must be a number from 1 to 65536"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but"),
        *(
            ({name: None}, f"RANK is set, but {name} is not")
            for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        ),
        ({"RANK": None}, "WORLD_SIZE is set, but RANK is not"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000', but"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    started_by_nobody: pytest.MonkeyPatch, change: dict[str, str | None], sentence: str
) -> None:
    for name, text in {**WELL, **change}.items():
        if text is not None:
            started_by_nobody.setenv(name, text)
    with pytest.raises(UserError, match=f"^{sentence}"):
        read_launch_environment()


def test_loopback_and_unknown_hosts_have_no_interface_of_their_own() -> None:
    assert interface_towards("127.0.0.1", 29500) is None
    assert interface_towards("no such host", 29500) is None


def test_an_address_that_cannot_be_reached_is_explained(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_NOTE_AFTER_S", 0.0)
    caplog.set_level("INFO", "zeroir")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        launch = LaunchEnvironment(world_size=2, address="127.0.0.1", port=port, is_host=True)
        with pytest.raises(UserError, match=rf"^Another process uses port {port} of this machine"):
            open_store(launch, "test", timedelta(seconds=1))
    nowhere = LaunchEnvironment(rank=1, world_size=2, address="no.invalid", port=port)
    with pytest.raises(UserError, match=r"^Rank 1 could not join the job at no\.invalid:"):
        open_store(nowhere, "test", timedelta(seconds=0.5))
    assert "Rank 1 cannot reach the job at no.invalid" in caplog.messages[-1]
    assert "this machine knows no host no.invalid" in caplog.messages[-1]


def test_ranks_that_gloo_cannot_connect_are_told_of_its_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting")

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, text in alone.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("torch.distributed.init_process_group", fail)
    with pytest.raises(UserError, match=r"^Rank 0 has reached the job .* GLOO_SOCKET_IFNAME on"):
        join_job()


class Joining:
    """Processes that join a job without an agent, as started by hand on several hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]

    def start(self, rank: int, *arguments: str) -> Forked:
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
        }
        module = "tests.runtime.joining_workers"
        return Forked(compiling_zygote(), module, arguments, place, self._folder / f"rank{rank}")


@pytest.mark.dist
def test_ranks_join_and_leave(tmp_path: Path) -> None:
    job = Joining(tmp_path)
    for rank in [job.start(rank, "join", "30", "30") for rank in range(2)]:
        assert rank.wait(time.monotonic() + 60) == 0, rank.output()
        assert rank.output()[0] == "joined\n"


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    rank = Joining(tmp_path).start(0, "join", "1", "30")
    assert rank.wait(time.monotonic() + 60) == 2
    assert "Rank 1 has not joined the job within 1 s: " in rank.output()[1]


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_is_stopped_while_it_joins_is_named(tmp_path: Path) -> None:
    job = Joining(tmp_path)
    waiting, stopped = job.start(0, "join", "60", "2"), job.start(1, "stop", "60", "2")
    try:
        assert waiting.wait(time.monotonic() + 60) == 2, waiting.output()
    finally:
        stopped.kill()
    _, said = waiting.output()
    assert said.startswith("Rank 1 has given no sign of life for 2 s: ")


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_holds_the_lock_of_the_interpreter_is_alive(tmp_path: Path) -> None:
    """Its threads give no sign, but the process beside it does."""
    job = Joining(tmp_path)
    ranks = [job.start(0, "join", "60", "2"), job.start(1, "hold", "60", "2")]
    for rank in ranks:
        assert rank.wait(time.monotonic() + 60) == 0, rank.output()
        assert rank.output()[0] == "joined\n"


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_ends_while_another_one_waits_is_named(tmp_path: Path) -> None:
    job = Joining(tmp_path)
    waiting, left = job.start(0, "join", "60", "30"), job.start(1, "leave", "60", "30")
    assert waiting.wait(time.monotonic() + 60) == 2, waiting.output()
    assert left.wait(time.monotonic() + 60) == 0
    _, said = waiting.output()
    assert said.startswith("Rank 1 has ended before the others, which wait for it: ")


# ---- A task of srun is a rank; a batch script, a step of one task and a rank of torchrun are left alone


TASK = {
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_a_task_has_the_numbers_of_its_rank() -> None:
    environment = dict(TASK)
    become_rank_of_step(environment)
    assert {name: environment[name] for name in environment.keys() - TASK.keys()} == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }


@pytest.mark.parametrize(
    ("listed", "machine", "tasks"),
    [("2(x3),1", "3", "1"), ("4", "0", "4"), ("2(x3),1", "4", None), ("?", "0", None)],
)
def test_the_tasks_of_a_machine_are_read_where_slurm_lists_them(
    listed: str, machine: str, tasks: str | None
) -> None:
    environment = {**TASK, "SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": machine}
    become_rank_of_step(environment)
    assert environment.get("LOCAL_WORLD_SIZE") == tasks


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TASK, "RANK": "0"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {name: text for name, text in TASK.items() if "STEP" not in name},
    ],
    ids=["no Slurm", "torchrun", "one task", "batch script"],
)
def test_other_processes_keep_their_environment(environment: dict[str, str]) -> None:
    before = dict(environment)
    become_rank_of_step(environment)
    assert environment == before


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_tasks_without_a_meeting_point_are_refused(missing: str) -> None:
    environment = {name: text for name, text in TASK.items() if name != missing}
    with pytest.raises(UserError, match=f"^srun has started 7 tasks, but {missing} is not set: "):
        become_rank_of_step(environment)


# ---- Which GPU a rank gets


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous.join_job().device.index == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rendezvous.join_job().device.index == 1


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UserError, match="Local rank 3 has no GPU, because this machine shows 2"):
        rendezvous.join_job()


@pytest.mark.usefixtures("two_gpus")
def test_ranks_share_gpus_where_nccl_is_told_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert rendezvous.join_job().device.index == 1


# ---- Ranks find those of their own attempt of a job, whatever earlier attempts left in the store


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
