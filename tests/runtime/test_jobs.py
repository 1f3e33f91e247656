"""Real processes that fail: every rank stops soon, with one sentence and an exit code."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.support import (
    Ranks,
    begun,
    lowered,
    random_batches,
    require_run,
    require_success,
)
from tests.runtime.workers_cases import MODEL_STEPS, one_cycle
from tests.support.programs import mlp
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = pytest.mark.dist

WORLD_SIZE = 3
SOON_S = 40
"""Far below the time limit of a collective, and enough on a machine that has much else to do."""


def wait_until_under_way(ranks: Ranks, folder: Path, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not all((folder / f"under-way.{rank}").exists() for rank in range(WORLD_SIZE)):
        assert time.monotonic() < deadline, ranks.wait(1.0)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("delay_s", "backend"),
    [
        ("0", "peer-memory"),
        pytest.param("0", "gloo", marks=pytest.mark.slow),
        pytest.param("0.3", "peer-memory", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_stops_the_others(tmp_path: Path, delay_s: str, backend: str) -> None:
    ranks = Ranks(WORLD_SIZE, tmp_path, "steps-for-ever", delay_s, backend)
    wait_until_under_way(ranks, tmp_path)
    start = time.monotonic()
    ranks.processes[1].kill()
    results = ranks.wait(60.0)
    assert time.monotonic() - start < SOON_S
    for rank in (0, 2):
        code, out, err = results[rank]
        assert code == 2, err
        assert out == ""
        # Between some steps the ranks compare their settings.
        place = r"(in (last_micro_step|update):\d+ \w+|between steps)"
        assert re.match(rf"Error: Rank {rank} lost its peers {place}", err), err
        assert err.count("\n") == 1, err


@pytest.mark.slow
def test_an_interrupt_stops_every_rank(tmp_path: Path) -> None:
    ranks = Ranks(WORLD_SIZE, tmp_path, "steps-for-ever", "0", "peer-memory")
    wait_until_under_way(ranks, tmp_path)
    start = time.monotonic()
    for process in ranks.processes:
        process.send_signal(signal.SIGINT)
    results = ranks.wait(60.0)
    assert time.monotonic() - start < SOON_S
    for code, _, err in results:
        # A rank may see its peers leave before it sees the signal, or while it says so.
        lost_peers = "lost its peers" in err
        assert (code == 130 and err.endswith("Interrupted.\n")) or (code == 2 and lost_peers)
        assert lost_peers or err == "Interrupted.\n"
    assert any(code == 130 for code, _, _ in results)


def test_a_rank_with_another_program_stops_all(tmp_path: Path) -> None:
    for rank, (code, _, err) in enumerate(Ranks(WORLD_SIZE, tmp_path, "other-program").wait(60.0)):
        assert code == 2, f"rank {rank}: {err}"
        assert err.startswith("Error: Rank 1 has another program than rank 0 (digest ")
        assert err.count("\n") == 1


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_all(tmp_path: Path) -> None:
    for rank, (code, _, err) in enumerate(Ranks(WORLD_SIZE, tmp_path, "nan-loss").wait(60.0)):
        assert code == 2, f"rank {rank}: {err}"
        knows = "is nan" if rank == 1 else "of another rank is not finite"
        assert err.startswith(f"Error: The loss {knows} at step 3")
        assert err.count("\n") == 1


@pytest.mark.slow
def test_ranks_with_different_settings_stop_with_a_sentence(tmp_path: Path) -> None:
    for rank, (code, _, err) in enumerate(Ranks(WORLD_SIZE, tmp_path, "other-settings").wait(60.0)):
        assert code == 2, err
        assert "Rank 1 has another setting of the optimizer's group default than rank 0" in err
        assert "0.001 instead of 0.01" in err, rank


@pytest.mark.slow
def test_a_schedule_changes_the_settings_of_every_rank(tmp_path: Path) -> None:
    """Real processes equal virtual ranks, bit for bit."""
    require_success(Ranks(WORLD_SIZE, tmp_path, "scheduled-settings").wait(60.0))
    lockstep = begun(Lockstep(lowered(mlp(), 3, WORLD_SIZE)))
    scheduler = one_cycle(lockstep.optimizer)
    losses: list[float] = []
    for batches in random_batches(MODEL_STEPS, WORLD_SIZE):
        losses.append(float(lockstep.step(batches)[0].loss))
        scheduler.step()
    require_run(tmp_path / "scheduled.safetensors", losses, lockstep.full_state())
